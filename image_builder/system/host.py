"""Checks of this host before a bake changes anything on it."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterable
from pathlib import Path

from image_builder.errors import HostError, SpaceError, StoreError
from image_builder.node import mounts
from image_builder.node.mounts import Mount

_MIB = 1 << 20
# Below this no build ends well; what a given build needs is estimated by ``space.py`` once its plan is known.
LEAST_FREE = 1024 * _MIB
# Filesystems that can't hold the upper layer of an overlay, or lose owners and device nodes.
_UNSUITABLE = frozenset(
    [
        "overlay",
        "aufs",
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "9p",
        "virtiofs",
        "ceph",
        "vfat",
        "exfat",
        "msdos",
        "ntfs",
        "ntfs3",
        "squashfs",
        "iso9660",
        "erofs",
        "ramfs",
        "ecryptfs",
    ]
)


def check_host(store: Path) -> None:
    """Check all that a build needs of the host and of its store's place; raises HostError, StoreError, SpaceError."""
    check_root()
    machine = platform.machine()
    if platform.system() != "Linux" or machine != "x86_64":
        raise HostError(f"images are baked on Linux on x86_64, this is {platform.system()} on {machine}")
    check_kernel(("overlay",))
    check_store(store)


def check_root() -> None:
    """Raise HostError unless this process is root."""
    if os.geteuid() != 0:
        raise HostError("this needs root", hint="run it through ./image-builder, which uses sudo, or as root")


def check_kernel(
    filesystems: tuple[str, ...],
    registered: Path = Path("/proc/filesystems"),
    modules: Path = Path("/lib/modules"),
) -> None:
    """Raise HostError for a filesystem that the running kernel neither has nor can load."""
    listed = {line.split()[-1] for line in registered.read_text(encoding="ascii").splitlines()}
    here = modules / platform.release()
    for name in filesystems:
        folder = {"overlay": "overlayfs"}.get(name, name)
        if name not in listed and not list(here.glob(f"kernel/fs/{folder}/{name}.ko*")):
            raise HostError(f"the kernel {platform.release()} of this host has no {name} filesystem")


def check_store(store: Path, proc: Path = Path("/proc")) -> None:
    """Raise StoreError for a store on an unsuitable filesystem, SpaceError where almost nothing is free."""
    below = nearest_existing(store)
    kind = filesystem_of(below, mounts.listed(proc))
    if kind in _UNSUITABLE or kind.startswith("fuse"):
        raise StoreError(
            f"the store {store} is on {kind}, which can't hold the upper layer of an overlay",
            hint="put it on ext4, xfs or btrfs: --store DIR, or IMAGE_BUILDER_STORE=DIR; in a container, on a volume",
        )
    free = shutil.disk_usage(below).free
    if free < LEAST_FREE:
        raise SpaceError(
            f"{below} has {free // _MIB} MiB free, a store needs at least {LEAST_FREE // _MIB} MiB: "
            f"{(LEAST_FREE - free) // _MIB} MiB are missing",
            hint="image-builder store gc --keep 1; or another disk: --store DIR",
        )


def nearest_existing(path: Path) -> Path:
    """Return ``path`` with links resolved, or the nearest of its parents that exists."""
    path = path.resolve()
    while not path.exists():
        path = path.parent
    return path


def filesystem_of(path: Path, mounted: Iterable[Mount]) -> str:
    """Return the type of the filesystem that holds ``path`` (absolute, without links): ``ext4``, ``overlay``."""
    best, kind = "", ""
    for mount in mounted:
        holds = mount.target == "/" or path.is_relative_to(mount.target)
        # The last of several mounts at one place is the one in sight.
        if holds and len(mount.target) >= len(best):
            best, kind = mount.target, mount.filesystem
    return kind
