"""Mutations for test_preload_store.py, which change the manifest's JSON and the store's bytes in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.suite.booted import edited, record_booted
from tests.suite.offline import Mutation, chmod, edit_json, given, outside, record, remove
from tests.suite.preload import flip, overwrite

MANIFEST, REHEARSAL = "/opt/preload/store.json", "/opt/preload/rehearsal.json"
STORE = "/opt/preload/store.erofs"
STATUS = "/run/node/status.json"


def shorter(root: Path, _variables: dict[str, Any]) -> None:
    with outside(root, STORE).open("r+b") as stream:
        stream.truncate(stream.seek(0, 2) - 4096)


def no_filesystem(root: Path, _variables: dict[str, Any]) -> None:
    overwrite(outside(root, STORE), 1024, bytes(4))


def other_byte(root: Path, _variables: dict[str, Any]) -> None:
    """Change a byte in the middle of the filesystem."""
    place = outside(root, STORE)
    flip(place, place.stat().st_size // 2)


def other_hashes(root: Path, _variables: dict[str, Any]) -> None:
    """Change a byte near the end of the hash tree."""
    flip(outside(root, STORE), -4096)


def longer(variables: dict[str, Any]) -> Mutation:
    """Change the engine's program by appending a byte."""

    def mutate(root: Path, _variables: dict[str, Any]) -> None:
        engine = {"docker": "/usr/sbin/dockerd", "containerd": "/usr/bin/containerd"}
        with outside(root, engine[variables["container_runtime_engine"]]).open("ab") as stream:
            stream.write(b"x")

    return mutate


def no_erofs(root: Path, _variables: dict[str, Any]) -> None:
    """Take EROFS off the lists of every kernel's modules."""
    for path in root.glob("usr/lib/modules/*/modules.*"):
        if path.name in ("modules.dep", "modules.builtin"):
            place = outside(root, str(path.relative_to(root)))
            lines = place.read_text(encoding="utf-8").splitlines(keepends=True)
            place.write_text("".join(line for line in lines if "/erofs.ko" not in line.partition(":")[0]))


record("test_kernel_can_mount_the_store", no_erofs)
record("test_store_is_the_recorded_one", shorter, no_filesystem, chmod(STORE, 0o666))
record(
    "test_store_lists_the_preloaded_images",
    edit_json(MANIFEST, lambda found: found["images"].pop()),
    edit_json(MANIFEST, lambda found: found["images"][-1].update(id=f"sha256:{'0' * 64}")),
    edit_json(MANIFEST, lambda found: found["layers"].pop()),
)
record(
    "test_store_is_for_the_installed_engine",
    edit_json(MANIFEST, lambda found: found.update(engines={})),
    given(longer),
)
record(
    "test_store_can_be_verified",
    # Each of these must work with and without dm-verity.
    edit_json(MANIFEST, lambda found: found.update(verity=None, sha256=None)),
    edit_json(
        MANIFEST, lambda found: found.update(verity={**(found["verity"] or {}), "root_hash": "0" * 64})
    ),
    other_byte,
    other_hashes,
)
record(
    "test_seed_was_rehearsed",
    remove(REHEARSAL),
    edit_json(REHEARSAL, lambda found: found["images"].pop()),
    edit_json(REHEARSAL, lambda found: found["images"][0]["started"].clear()),
    edit_json(REHEARSAL, lambda found: found["seed"].clear()),
)
record_booted("test_images_were_seeded", **edited(STATUS, 's/"store": "/&0/'))
record_booted(
    "test_store_is_verified_by_the_kernel",
    # Whether promoted or not: what is mounted there last isn't a device-mapper device.
    "mount -t tmpfs preload /var/lib/preload",
    mend="umount /var/lib/preload",
)
record_booted(
    "test_every_layer_is_somewhere",
    "for d in /mnt/local/docker/overlay2/*/diff "
    "/mnt/local/containerd/io.containerd.snapshotter.v1.overlayfs/snapshots/*/fs; do "
    # The engine may remove a snapshot in the meantime.
    "if mv $d $d.gone 2>/dev/null; then ln -s /var/lib/preload/layers/gone $d; fi; done",
    turn=4,
)
