"""The preload store: it has the listed images and was rehearsed; a machine was seeded from it, and verifies it."""

from __future__ import annotations

import json
from typing import Any

from preloaded import deletable, kernel_modules
from suite import booted, differences, load, needs, nothing, offline, output, read
from testinfra.host import Host
from tree import Tree

V = dict[str, Any]
LIST = "/opt/preloaded_docker_images.json"
MANIFEST, REHEARSAL = "/opt/preload/store.json", "/opt/preload/rehearsal.json"
MOUNT_POINT = "/var/lib/preload"
STATUS = "/run/node/status.json"
EROFS_MAGIC = "e0f5e1e2"
# Computes dm-verity's root hash over the store's blocks, and whether the hash tree after them matches those blocks.
_VERIFIER = """
import hashlib, json, sys

path, size, salt = sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3])
with open(path, "rb") as stream:
    def blocks(start, length):
        stream.seek(start)
        for _ in range(length // 4096):
            yield stream.read(4096)
    level, levels = blocks(0, size), []
    while True:
        hashes = [hashlib.sha256(salt + block).digest() for block in level]
        if len(hashes) == 1:
            break
        packed = b"".join(hashes)
        levels.append(packed + bytes(-len(packed) % 4096))
        level = [levels[-1][at : at + 4096] for at in range(0, len(levels[-1]), 4096)]
    stored = True
    at = size
    for level in reversed(levels):
        stored = stored and b"".join(blocks(at, len(level))) == level
        at += len(level)
print(json.dumps({"root_hash": hashes[0].hex(), "stored": stored}))
"""

stored = needs("container_runtime", image_preload=bool)
stored_and_bootable = needs("container_runtime", "system", image_preload=bool, system_bootable=True)
seeded = needs("container_runtime", "node", image_preload=bool)


def _by_ref(content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {image["ref"]: image for image in content["images"]}


@offline
@stored_and_bootable
def test_kernel_can_mount_the_store(host: Host, tree: Tree, v: V) -> None:
    """Every kernel has EROFS and, where declared, dm-verity."""
    expected = {"erofs"} | ({"dm_verity"} if v["image_preload_verity"] else set())
    paths = tree.matching(r"/usr/lib/modules/[^/]+/modules\.(dep|builtin)", having="/modules.")
    modules = kernel_modules({path: read(host, path) for path in paths})
    assert modules, "no kernel has a list of modules"
    nothing(f"{kernel} has no {m}" for kernel, names in modules.items() for m in sorted(expected - names))


@offline
@booted
@stored
def test_store_is_the_recorded_one(host: Host) -> None:
    """The store's file is an EROFS of the recorded size, which only root can change."""
    manifest = load(host, MANIFEST)
    file = host.file(manifest["file"])
    nothing(differences({"bytes": file.size}, manifest))
    assert (file.user, file.mode) == ("root", 0o644), f"{file.user} {file.mode:o}"
    magic = output(host, "od -A n -t x4 -j 1024 -N 4 %s", manifest["file"]).strip()
    assert magic == EROFS_MAGIC, magic


@offline
@booted
@stored
def test_store_lists_the_preloaded_images(host: Host) -> None:
    """The store lists the preloaded images, with the same ids and layers, and has all layers that it must provide."""
    manifest, archive = load(host, MANIFEST), _by_ref(load(host, LIST))
    images = _by_ref(manifest)
    assert images.keys() == archive.keys(), f"{sorted(images)}, in the list {sorted(archive)}"
    layers = {layer["diff_id"] for layer in manifest["layers"]}
    for ref, image in images.items():
        keys = ("id", "digest", "manifest", "diff_ids", "pin")
        nothing(f"{ref}: {line}" for line in differences({k: archive[ref][k] for k in keys}, image))
        # Nodes load the others from the archive.
        needed = image["diff_ids"] if image["mode"] != "archive" else ()
        nothing(f"{ref}: {diff_id} is in no layer" for diff_id in needed if diff_id not in layers)


@offline
@booted
@stored
def test_store_is_for_the_installed_engine(host: Host, v: V) -> None:
    """The engine that made the store is the installed one, judging by its program's size."""
    engines = load(host, MANIFEST)["engines"]
    baked = engines.get(v["container_runtime_engine"])
    assert baked, f"the store is for {', '.join(engines)}"
    nothing(differences({"bytes": host.file(baked["binary"]).size}, baked))


@offline
@stored
def test_store_can_be_verified(host: Host, v: V) -> None:
    """The store's content matches its root hash and its hash tree or, without dm-verity, its SHA-256."""
    manifest = load(host, MANIFEST)
    if not v["image_preload_verity"]:
        assert manifest["verity"] is None
        nothing(differences({"sha256": output(host, "sha256sum %s", manifest["file"])[:64]}, manifest))
        return
    verity = manifest["verity"]
    assert verity, "the store has no hash tree"
    command = "python3 -c %s %s %s %s"
    arguments = (manifest["file"], str(verity["hash_offset"]), verity["salt"])
    expected = {"root_hash": verity["root_hash"], "stored": True}
    nothing(differences(expected, json.loads(output(host, command, _VERIFIER, *arguments))))


@offline
@booted
@stored
def test_seed_was_rehearsed(host: Host, v: V) -> None:
    """The bake created a container of every image from a seeded disk, with each engine.

    ``started`` is false for an image without a command, since the bake fails if a container doesn't start.
    """
    rehearsal = load(host, REHEARSAL)
    engines, images = set(rehearsal["seed"]), _by_ref(rehearsal)
    assert v["container_runtime_engine"] in engines
    expected = [image["ref"] for image in load(host, MANIFEST)["images"] if image["mode"] != "archive"]
    nothing(ref for ref in expected if ref not in images)
    nothing(f"{ref}: {image['started']}" for ref, image in images.items() if set(image["started"]) != engines)


@booted
@seeded
def test_images_were_seeded(host: Host, v: V) -> None:
    """The data root was seeded from the store; only images left to the archive, or deleted since, were loaded."""
    status = load(host, STATUS)
    manifest = load(host, MANIFEST)
    expected = {"state": "ok", "engine": v["container_runtime_engine"], "store": manifest["id"]}
    nothing(differences(expected, status["seed"]))
    archived = {image["ref"] for image in manifest["images"] if image["mode"] == "archive"}
    # containerd's seed can't restore what a kubelet deleted.
    assert set(status["preload"]["loaded"]) <= archived | deletable(host, v), status["preload"]


@booted
@seeded
def test_store_is_verified_by_the_kernel(host: Host, v: V) -> None:
    """While the store serves layers, the kernel verifies its blocks, if declared; afterwards it is unmounted."""
    status = json.loads(host.run("node-agent status --json").stdout)
    mounted = host.run("findmnt --noheadings --output SOURCE --mountpoint %s", MOUNT_POINT).stdout.strip()
    if not status["layers"]["links"]:
        assert not mounted, f"{mounted} is still mounted"
    elif v["image_preload_verity"]:
        assert mounted == "/dev/mapper/image-builder-preload", mounted
        fields = output(host, "dmsetup status image-builder-preload").split()
        assert fields[2:4] == ["verity", "V"], fields


@booted
@seeded
def test_every_layer_is_somewhere(host: Host, v: V) -> None:
    """No link is broken, and the layers of all images that no kubelet deleted are on the local disk or in the store."""
    status = json.loads(host.run("node-agent status --json").stdout)
    nothing(differences({"broken": 0}, status["layers"]))
    sources = ("preload store", "local disk", "local disk and preload store")
    lost = {image["ref"]: image["source"] for image in status["images"] if image["source"] not in sources}
    # Images that the bake left to the archive are loaded from it.
    left = {image["ref"] for image in status["images"] if image["mode"] == "archive"}
    gone = deletable(host, v)
    good = {(ref, "archive") for ref in left | gone} | {(ref, "MISSING") for ref in gone}
    nothing(f"{ref}: {source}" for ref, source in lost.items() if (ref, source.partition(":")[0]) not in good)
