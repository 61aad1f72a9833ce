"""Ways to get from a blank disk to a running container whose image is on the OS disk: ours and those of others.

Each is measured by a function without parameters that returns the time it took. Before that the engine is stopped and
all caches are dropped. Whatever is prepared once (a data root, a seed device, a podman store) is made by a context
manager, outside the measured time.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from image_builder.bake.lock.model import LockedImage
from image_builder.system import cgroups, namespace, process
from image_builder.system.sandbox import Root, open_root
from tests.bench.blank_disks import blank_device, blank_disk, drop_caches, loop_device
from tests.support.registries.pulls import Lab, wait_until
from tests.support.stores.seeds import Baked, Node, node

ROUNDS = 3
ARCHIVE = "/opt/preloaded_docker_images.tar"
# What a Debian root needs for the ways that don't use the engine. crun, which comes with podman, refuses to run on a
# host that has both versions of control groups.
PACKAGES = ("btrfs-progs", "podman", "runc")
_PODMAN = ("podman", "--runtime", "runc", "--cgroup-manager", "cgroupfs", "--storage-driver", "overlay")


@dataclass(frozen=True)
class Took:
    """Seconds until the disk had the image, and until the container ran, including the daemon's start."""

    fill: float
    total: float


Way = Callable[[], Took]
Then = Callable[[Node, Any], None]


def ours(lab: Lab, baked: Baked, then: Then | None = None) -> Took:
    """Run ``node-agent seed``; time the whole process."""

    def seed(here: Node) -> None:
        section = here.seed()
        assert section["state"] == "ok" and section["action"] == "seeded", section

    with _blank_node(lab, baked) as here:
        return _run(lab, baked, here, seed, then=then)


def loaded(lab: Lab, baked: Baked, then: Then | None = None) -> Took:
    """Run ``docker image load`` or ``ctr images import`` on the archive, which needs the daemon."""
    command = {
        "docker": ["docker", "image", "load", "--quiet", "--input", ARCHIVE],
        "containerd": ["ctr", "-n", "k8s.io", "images", "import", ARCHIVE],
    }[lab.engine]
    with _blank_node(lab, baked) as here:
        return _run(lab, baked, here, load=lambda: here.root.run(command), then=then)


@contextmanager
def copied(lab: Lab, baked: Baked, _programs: Path) -> Iterator[Way]:
    """Copy a populated data root with ``cp -a``, without waiting until it is on the disk."""

    def way() -> Took:
        with _blank_node(lab, baked) as here:
            return _run(
                lab, baked, here, lambda here: process.run(["cp", "-a", f"{baked.state}/.", here.data])
            )

    yield way


@contextmanager
def in_place(lab: Lab, baked: Baked, _programs: Path) -> Iterator[Way]:
    """Use a populated data root on the OS disk; there is no local disk."""
    folder = lab.folder("os")
    data = folder / "data"

    def way() -> Took:
        with node(lab, baked.opt, folder) as here:
            return _run(lab, baked, here)

    baked.state.rename(data)
    try:
        yield way
    finally:
        data.rename(baked.state)


@contextmanager
def btrfs_seed(lab: Lab, baked: Baked, programs: Path) -> Iterator[Way]:
    """Use a populated data root as a btrfs seed device, to which the blank disk is added."""
    folder, tree = lab.folder("btrfs"), lab.folder("tree")
    baked.state.rename(tree / "data")
    try:
        with open_root(
            [programs], lab.folder("programs"), writable_binds={"/mnt/made": folder, "/mnt/tree": tree}
        ) as root:
            with (folder / "seed.img").open("wb") as file:
                file.truncate(int(_bytes(baked) * 1.5 + 1e9))
            root.run(["mkfs.btrfs", "-q", "--rootdir", "/mnt/tree", "--shrink", "/mnt/made/seed.img"])
            root.run(["btrfstune", "-S", "1", "/mnt/made/seed.img"])
            yield lambda: _sprout(lab, baked, root, folder / "seed.img")
    finally:
        (tree / "data").rename(baked.state)
    process.run(["rm", "-rf", folder])


def _sprout(lab: Lab, baked: Baked, root: Root, seed: Path) -> Took:
    where = root.path / "mnt/disk"
    where.mkdir(exist_ok=True)

    def fill(_: Node) -> None:
        process.run(["mount", "-t", "btrfs", "-o", "ro", old, where])
        root.run(["btrfs", "device", "add", "-f", new, "/mnt/disk"])
        # Unmount and mount again: the manual warns that a remount leaks space.
        process.run(["umount", where])
        process.run(["mount", "-t", "btrfs", "-o", f"device={old}", new, where])

    with loop_device(seed) as old, blank_device(lab.folder("ssd"), _gigabytes(baked)) as new:
        for device in (old, new):
            if not (root.path / os.fspath(device).lstrip("/")).exists():
                os.mknod(root.path / os.fspath(device).lstrip("/"), 0o60600, device.stat().st_rdev)
        try:
            with node(lab, baked.opt, where) as here:
                return _run(lab, baked, here, fill)
        finally:
            if os.path.ismount(where):
                namespace.unmount(os.fspath(where))


@contextmanager
def additional_store(lab: Lab, baked: Baked, programs: Path) -> Iterator[Way]:
    """Use podman with an additional image store on the OS disk; there is no daemon."""
    store = lab.folder("store")
    image = baked.images[0]

    def way() -> Took:
        with (
            blank_disk(lab.folder("ssd"), _gigabytes(baked)) as ssd,
            _podman_root(lab, programs, {"/mnt/disk": ssd.path, "/mnt/store": store}) as root,
        ):
            podman = [
                *_PODMAN,
                "--root",
                "/mnt/disk/graph",
                "--storage-opt",
                "additionalimagestore=/mnt/store",
            ]
            run = [
                "run",
                "--name",
                "first",
                "--detach",
                "--network",
                "none",
                "--cgroup-parent",
                cgroups.PARENT,
            ]
            drop_caches()
            started = time.monotonic()
            root.run([*podman, *run, "--pull", "never", image.ref])
            root.run([*podman, "rm", "--force", "--time", "0", "first"])
            return Took(0.0, time.monotonic() - started)

    with _podman_root(lab, programs, {"/mnt/store": store, "/opt": baked.opt}) as root:
        root.run([*_PODMAN, "--root", "/mnt/store", "load", "--quiet", "--input", ARCHIVE])
    yield way
    process.run(["rm", "-rf", store])


@contextmanager
def _podman_root(lab: Lab, programs: Path, binds: dict[str, Path]) -> Iterator[Root]:
    work = lab.folder("podman")
    with (
        cgroups.held(),
        open_root([programs], work, writable_binds=binds, network=True, writable_cgroups=True) as root,
    ):
        (root.path / "var/tmp").mkdir(parents=True, exist_ok=True)
        yield root
        # Processes that podman leaves behind still clean up in the background, and keep the root's /dev busy.
        last = ["pgrep", "--exact", "conmon|podman|runc|pause"]
        assert wait_until(lambda: process.run(last, ok=(0, 1)).returncode == 1), "podman's programs don't end"


PEERS: dict[str, Callable[[Lab, Baked, Path], Any]] = {
    "copy": copied,
    "in_place": in_place,
    "btrfs_seed": btrfs_seed,
    "podman_store": additional_store,
}


# -- measuring -------------------------------------------------------------------------------------------------


@contextmanager
def _blank_node(lab: Lab, baked: Baked) -> Iterator[Node]:
    with (
        blank_disk(lab.folder("ssd"), _gigabytes(baked)) as ssd,
        node(lab, baked.opt, ssd.path) as here,
    ):
        yield here


def _gigabytes(baked: Baked) -> float:
    """Return the size of a local disk. Loading needs room for the layers twice; unwritten space takes no room."""
    return 1 + 4 * _bytes(baked) / 1e9


def _bytes(baked: Baked) -> int:
    return sum(int(image["bytes"]) for image in baked.manifest()["images"])


def _run(
    lab: Lab,
    baked: Baked,
    here: Node,
    fill: Callable[[Node], object] = lambda _: None,
    load: Callable[[], object] = lambda: None,
    then: Then | None = None,
) -> Took:
    """Fill the disk, start the engine, let it load, run a container, and call ``then``."""
    wanted: LockedImage = baked.images[0]
    drop_caches()
    started = time.monotonic()
    fill(here)
    filled = time.monotonic() - started
    with here.engine() as engine:
        began = time.monotonic()
        load()
        filled += time.monotonic() - began
        assert engine.try_out(wanted) is not None, f"{lab.engine} ran no container"
        if then:
            then(here, engine)
        return Took(filled, time.monotonic() - started)


def in_turn(**ways: Way) -> dict[str, Took]:
    """Measure all ways back to back, once per round; return the medians of each."""
    found: dict[str, list[Took]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            found[name].append(way())
    return {
        name: Took(statistics.median(t.fill for t in took), statistics.median(t.total for t in took))
        for name, took in found.items()
    }
