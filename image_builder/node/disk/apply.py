"""Carry a decision out: only this module and ``arrays`` write to disks.

Each disk is probed again, under a lock, right before the first byte is written. A crash at any moment leaves a
disk that the next run recognizes as ours or as blank: erasing a disk and making a filesystem begin by writing a page
that says so and end by removing it, an array has our UUID from its first superblock on, and the marker comes last.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

from image_builder.node import child, files, mounts
from image_builder.node.disk import arrays, layout, probe
from image_builder.node.disk.decide import nature
from image_builder.node.disk.model import Array, Decision, Disk, Observation, Places, Survey, Volume
from image_builder.node.disk.settings import Settings
from image_builder.node.errors import NodeError

_BLKRRPART, _BLKGETDISKSEQ = 0x125F, 0x80081280
_PROJECT = 1
# Making a filesystem writes a few hundred MB at most; allow for a slow disk.
_MKFS_SECONDS = 600


def carry_out(
    decision: Decision,
    survey: Survey,
    settings: Settings,
    build: str,
    places: Places,
    candidates: Callable[[], Sequence[Disk]],
) -> Volume:
    """Format the disks if needed, mount the volume and return it. Raises NodeError, OSError."""
    volume = decision.volume
    if volume is None:
        volume = _make(decision.disks, survey, settings, places, candidates)
    root = Path(settings.mount_point)
    if not volume.mounted:
        root.mkdir(mode=0o755, parents=True, exist_ok=True)
        try:
            mounts.mount(volume.path, root, volume.filesystem, mounts.NOATIME, options(settings))
        except OSError as error:
            if error.errno == errno.EINVAL and options(settings):
                raise NodeError(
                    "disk.quota", f"{error.strerror}: has this kernel's xfs no quotas?"
                ) from error
            raise
        root.chmod(0o755)
    if decision.action != "mount":
        try:
            _mark(decision, volume, settings, build)
        except BaseException:
            # Files without a marker would be foreign at the next boot: don't let anything write any.
            mounts.unmount(root)
            raise
    return volume


def options(settings: Settings) -> str:
    """Return the mount options; without ``discard``, since fstrim does that."""
    return "prjquota" if settings.cache and settings.cache.quota_bytes else ""


def _mark(decision: Decision, volume: Volume, settings: Settings, build: str) -> None:
    """Write the marker, after everything that it vouches for is on the disk."""
    root = Path(settings.mount_point)
    state = root / ".node"
    state.mkdir(mode=0o700, exist_ok=True)
    files.syncfs(root)
    marker = {
        "format": 1,
        "uuid": volume.uuid,
        "label": settings.label,
        "filesystem": volume.filesystem,
        "image": build,
        "members": [asdict(disk.member) for disk in decision.disks],
    }
    files.write_json(root / probe.MARKER, marker)
    files.sync_directory(root)


def _make(
    disks: Sequence[Disk],
    survey: Survey,
    settings: Settings,
    places: Places,
    candidates: Callable[[], Sequence[Disk]],
) -> Volume:
    """Make one filesystem from disks. Raises NodeError if any of them has changed since it was probed."""
    with ExitStack() as stack:
        for disk in disks:
            stack.enter_context(_held(disk))
        _check_same(disks, candidates())
        used = [
            observation
            for observation in _again(disks, settings, places, survey.arrays)
            if not _is_blank(observation, settings)
        ]
        for array in survey.arrays.values():
            if array.device:
                arrays.stop(array.device, places)
        erase(used)
        unerased = [
            observation
            for observation in _again(disks, settings, places, {})
            if not _is_blank(observation, settings)
        ]
        if unerased:
            raise NodeError("disk.busy", f"{unerased[0].disk} is not blank after it was erased")
        return _filesystem(disks, settings, places)


def _check_same(disks: Sequence[Disk], candidates: Sequence[Disk]) -> None:
    """Raise NodeError unless the selector still matches exactly these disks: the kernel reuses names."""

    def identities(disks: Sequence[Disk]) -> set[tuple[object, ...]]:
        return {
            (disk.name, disk.bytes, disk.serial, disk.wwid, disk.sequence, disk.local)
            for disk in disks
            if not disk.system
        }

    changed = identities(disks) ^ identities(candidates)
    if changed:
        names = ", ".join(sorted({str(name) for name, *_ in changed}))
        raise NodeError("disk.changed", f"{names}: came, went or changed since the disks were looked at")


def _again(
    disks: Sequence[Disk], settings: Settings, places: Places, arrays: Mapping[str, Array]
) -> list[Observation]:
    """Probe again the disks that will be written to. Raises NodeError unless each is still blank or ours."""
    observations = probe.observe_disks(disks, settings, places)
    for observation in observations:
        kind = nature(settings, observation, arrays)
        if kind.kind in ("foreign", "busy", "error"):
            raise NodeError(
                "disk.changed", f"{observation.disk} changed since it was looked at: {kind.content}"
            )
    return observations


def _is_blank(observation: Observation, settings: Settings) -> bool:
    return nature(settings, observation, {}).kind == "blank"


@contextmanager
def _held(disk: Disk) -> Iterator[None]:
    """Keep udev from probing a disk while it changes (systemd, "Locking Block Device Access").

    Raises NodeError if the kernel has given the name to another disk.
    """
    with files.descriptor(disk.path) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX)
        if disk.sequence:
            (now,) = struct.unpack("Q", fcntl.ioctl(fd, _BLKGETDISKSEQ, bytes(8)))
            if str(now) != disk.sequence:
                raise NodeError("disk.changed", f"{disk.path} is no longer {disk}")
        yield


def erase(observations: Sequence[Observation]) -> None:
    """Make disks blank: erase their first 8 MiB and their last MiB, in an order that leaves nothing foreign on a crash.

    Mark all of them as being erased before the first is blank: a blank disk next to the rest of an array would look
    like an array that lost a member. Raises OSError (EBUSY) if any disk is in use, before anything is written.
    """
    with ExitStack() as stack:
        opened = []
        for observation in observations:
            fd = stack.enter_context(files.descriptor(observation.disk.path, os.O_RDWR | os.O_EXCL))
            opened.append((observation, fd, layout.erasure(observation.disk.bytes)))
        for _, fd, (first, *_) in opened:
            _write(fd, *first)
        for observation, fd, (_, *rest) in opened:
            for offset, data in rest:
                _write(fd, offset, data)
            if observation.partitions:
                fcntl.ioctl(fd, _BLKRRPART)


def _write(fd: int, offset: int, data: bytes) -> None:
    os.pwrite(fd, data, offset)
    os.fsync(fd)


def _filesystem(disks: Sequence[Disk], settings: Settings, places: Places) -> Volume:
    """Make the filesystem on blank disks; several disks become an array."""
    uuid = layout.new_uuid()
    if len(disks) == 1:
        with _announced(disks):
            _check_blank(disks[0].path, layout.making(disks[0].bytes)[1])
            child.run(mkfs(settings, uuid, disks[0].path), timeout=_MKFS_SECONDS)
        return Volume(disks[0].path, settings.filesystem, uuid, "empty")
    # Once each member's superblock has our UUID, the array identifies itself; until then the marks on the disks do.
    with _announced(disks):
        path = arrays.create(uuid, settings.label, disks, places)
    _check_blank(path)
    child.run(mkfs(settings, uuid, path), timeout=_MKFS_SECONDS)
    return Volume(path, settings.filesystem, uuid, "empty")


def _check_blank(path: Path, tail: bytes = b"") -> None:
    """Raise NodeError unless a device is blank, except that its last MiB begins with ``tail``.

    mke2fs itself checks for an existing filesystem only when run on a terminal.
    """
    with files.descriptor(path) as fd:
        size = os.lseek(fd, 0, os.SEEK_END)
        ends = (os.pread(fd, layout.MIB, 0), os.pread(fd, layout.MIB, size - layout.MIB))
    types = " and ".join(signature.type for signature in probe.signatures([path])[os.fspath(path)])
    if types or ends != (bytes(layout.MIB), tail.ljust(layout.MIB, b"\0")):
        raise NodeError("disk.changed", f"{path} has {types or 'data'} on it, right before it was formatted")


@contextmanager
def _announced(disks: Sequence[Disk]) -> Iterator[None]:
    """Mark blank disks as having a filesystem made on them, until it is done; after an error the marks stay."""
    for disk in disks:
        offset, page = layout.making(disk.bytes)
        _change(disk, offset, bytes(len(page)), page, os.O_EXCL)
    yield
    for disk in disks:
        offset, page = layout.making(disk.bytes)
        _change(disk, offset, page, bytes(len(page)))  # no O_EXCL: the array may hold it by now


def _change(disk: Disk, offset: int, old: bytes, new: bytes, flags: int = 0) -> None:
    """Replace ``old`` with ``new`` on the disk, durably; anything other than ``old`` is left alone. Raises OSError."""
    with files.descriptor(disk.path, os.O_RDWR | flags) as fd:
        if os.pread(fd, len(old), offset) == old:
            _write(fd, offset, new)


def mkfs(settings: Settings, uuid: str, path: Path) -> list[str]:
    """Return the mkfs command: never with force, since the device is blank; no discard, since it holds no data."""
    if settings.filesystem == "xfs":
        argv = ["mkfs.xfs", "-q", "-K", "-L", settings.label, "-m", f"crc=1,uuid={uuid}", "-n", "ftype=1"]
    else:
        lazy = "nodiscard,lazy_itable_init=1,lazy_journal_init=1"
        argv = ["mkfs.ext4", "-q", "-E", lazy, "-m", "0", "-L", settings.label, "-U", uuid]
    return [*argv, os.fspath(path)]


def furnish(settings: Settings, *, on_disk: bool) -> None:
    """Create what programs expect below the mount point, on the local or the OS disk. Raises OSError, NodeError."""
    root = Path(settings.mount_point)
    root.mkdir(mode=0o755, parents=True, exist_ok=True)
    if not on_disk:
        root.chmod(0o755)
    (root / ".node").mkdir(mode=0o700, exist_ok=True)
    for item in settings.directories:
        path = root / item.path
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(item.mode)
    if settings.cache:
        (root / settings.cache.path).mkdir(parents=True, exist_ok=True)
        if on_disk and settings.cache.quota_bytes:
            _limit(root, root / settings.cache.path, settings.cache.quota_bytes)
    if on_disk:
        _bind(settings)


def _limit(root: Path, path: Path, quota: int) -> None:
    """Assign a directory to a quota project and set the project's limit; existing contents already belong to it."""
    commands = (f"project -s -d 0 -p {path} {_PROJECT}", f"limit -p bhard={quota} {_PROJECT}")
    child.run(["xfs_quota", "-x", *(word for text in commands for word in ("-c", text)), os.fspath(root)])


def _bind(settings: Settings) -> None:
    """Bind-mount directories of the disk where programs expect them, unless already done."""
    root = Path(settings.mount_point)
    mount_points = {mounted.target for mounted in mounts.listed()}
    for item in settings.binds:
        (root / item.source).mkdir(parents=True, exist_ok=True)
        Path(item.target).mkdir(parents=True, exist_ok=True)
        if os.path.realpath(item.target) not in mount_points:
            mounts.bind(root / item.source, Path(item.target), apart=True)


def hidden_bytes(root: Path, most: int = 20_000) -> int:
    """Return how many bytes a directory holds that a mount will hide; stop counting after about ``most`` entries."""
    if not root.exists():
        return 0
    device, total, names = root.stat().st_dev, 0, 0
    for folder, folders, members in os.walk(root):
        for name in members:
            total += os.lstat(os.path.join(folder, name)).st_blocks * 512
        folders[:] = [name for name in folders if os.lstat(os.path.join(folder, name)).st_dev == device]
        names += len(members) + len(folders)
        if names > most:
            break
    return total
