"""Checks of this host: what a command needs from it, before it changes anything."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path

from image_builder.errors import HostError, SpaceError, StoreError
from image_builder.node import mounts
from image_builder.node.mounts import Mount

_MIB = 1 << 20
# With less than this, no build succeeds; ``space.py`` estimates what a given build needs once its plan is known.
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
# The capabilities that a bake needs, by number (capabilities(7)).
_CAPABILITIES: Mapping[int, str] = {
    0: "CAP_CHOWN",
    1: "CAP_DAC_OVERRIDE",
    3: "CAP_FOWNER",
    4: "CAP_FSETID",
    5: "CAP_KILL",
    6: "CAP_SETGID",
    7: "CAP_SETUID",
    18: "CAP_SYS_CHROOT",
    21: "CAP_SYS_ADMIN",  # namespaces and mounts
    27: "CAP_MKNOD",
    31: "CAP_SETFCAP",
}
# The content of /proc/PID/uid_map outside all user namespaces: every user maps to itself.
_ALL_USERS = ["0", "0", "4294967295"]
RIGHTS = (
    "run it as root; in a container, start it with --cap-add SYS_ADMIN,MKNOD and, where AppArmor is on, "
    "--security-opt apparmor=unconfined; or with --privileged"
)
_TABLE = Path(__file__).with_name("host.txt")
# Python packages of the extra `azure`, which a venv may lack.
AZURE = (
    "azure-identity",
    "azure-mgmt-compute",
    "azure-mgmt-network",
    "azure-storage-blob",
    "securesystemslib",
)


def check_host(store: Path) -> None:
    """Check all that a build needs from the host and the store's location. Raises HostError, StoreError, SpaceError."""
    check_root()
    check_machine()
    check_capabilities()
    check_kernel(("overlay",))
    check_store(store)


def check_root(uid_map: Path = Path("/proc/self/uid_map")) -> None:
    """Raise HostError unless this process is root, and not only in a user namespace."""
    if os.geteuid() != 0:
        raise HostError(
            "this needs root",
            hint="run it with sudo, as a checkout's launcher does by itself, or as root",
        )
    if uid_map.read_text(encoding="ascii").split() != _ALL_USERS:
        raise HostError(
            "root is an ordinary user of the host here: this is a user namespace, which can't make device nodes "
            "and an overlay's trusted attributes",
            hint="in a container, let root start it: sudo podman run",
        )


def check_machine() -> None:
    """Raise HostError unless this is Linux on x86_64."""
    machine = platform.machine()
    if platform.system() != "Linux" or machine != "x86_64":
        raise HostError(f"images are baked on Linux on x86_64, this is {platform.system()} on {machine}")


def check_system(release: Mapping[str, str] | None = None, table: Path = _TABLE) -> None:
    """Raise HostError for an operating system that this program doesn't support, by the fields of its os-release."""
    release = platform.freedesktop_os_release() if release is None else release
    supported = [" ".join(fields) for kind, *fields in _requirements(table) if kind == "system"]
    if f"{release.get('ID')} {release.get('VERSION_ID')}" not in supported:
        name = release.get("PRETTY_NAME", "this system")
        raise HostError(f"{name} is not supported", hint=f"use one of: {', '.join(supported)}")


def check_packages(command: str, table: Path = _TABLE) -> None:
    """Raise HostError naming the Debian packages that a command needs and this host lacks."""
    missing = [
        name
        for kind, name, *rest in _requirements(table)
        if kind == "package" and command in rest[1:] and not Path(rest[0]).exists()
    ]
    if missing:
        names = " ".join(missing)
        raise HostError(
            f"these packages are missing: {names}",
            hint=f"apt-get install --no-install-recommends {names}",
        )


def check_azure(packages: Iterable[str] = AZURE) -> None:
    """Raise HostError naming the Python packages of the extra `azure` that this program's venv lacks."""
    missing = [name for name in packages if not list(metadata.distributions(name=name))]
    if missing:
        raise HostError(
            f"these Python packages are missing: {' '.join(missing)}",
            hint=f"{sys.executable} -m pip install 'image-builder[azure]'",
        )


def _requirements(table: Path) -> Iterator[list[str]]:
    """Yield the lines of the table of host requirements, each split into fields."""
    for line in table.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            yield line.split()


def check_capabilities(status: Path = Path("/proc/self/status")) -> None:
    """Raise HostError naming the capabilities that a bake needs and this process lacks, as in a container."""
    match = re.search(r"^CapEff:\s*([0-9a-f]+)$", status.read_text(encoding="ascii"), re.MULTILINE)
    held = int(match[1], 16) if match else 0
    lacking = [name for number, name in _CAPABILITIES.items() if not held >> number & 1]
    if lacking:
        raise HostError(f"this process lacks {', '.join(lacking)}", hint=RIGHTS)


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


def check_writable(store: Path) -> None:
    """Raise HostError if this user can neither write to the store nor create it."""
    if not os.access(nearest_existing(store), os.W_OK):
        raise HostError(
            f"the store {store} is not writable for this user",
            hint="use one of your own: --store DIR, or IMAGE_BUILDER_STORE=DIR; or run it as root",
        )


def check_cgroups(groups: Path = Path("/sys/fs/cgroup")) -> None:
    """Raise HostError if container engines can't create control groups, which a preload needs."""
    if os.statvfs(groups).f_flag & os.ST_RDONLY:
        raise HostError(
            f"{groups} is read-only here: an image with preloaded container images can't be built",
            hint="in a container, start it with --privileged",
        )


def check_store(store: Path, proc: Path = Path("/proc")) -> None:
    """Raise StoreError if the store is on an unsuitable filesystem, SpaceError if almost no space is free."""
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
        # Of several mounts at one place, the last one is visible.
        if holds and len(mount.target) >= len(best):
            best, kind = mount.target, mount.filesystem
    return kind
