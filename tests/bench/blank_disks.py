"""Blank disks for measurements: loop devices with a filesystem, with throttled reads where a measurement needs them."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from image_builder.system import namespace, process
from image_builder.system.environment import environment

_LOOP_CTL_GET_FREE = 0x4C82
_BLKIO = Path("/sys/fs/cgroup/blkio")


@dataclass(frozen=True)
class Disk:
    """A mounted loop device: its mount point, its number as the kernel writes it (``7:3``), and its name."""

    path: Path
    number: str
    name: str

    def written(self) -> int:
        """Return the bytes written to the device so far (Documentation/block/stat.rst: 512-byte sectors)."""
        return int(Path("/sys/block", self.name, "stat").read_text().split()[6]) * 512


@contextmanager
def blank_disk(folder: Path, gigabytes: float) -> Iterator[Disk]:
    """Make and mount a blank disk on a loop device of its own; all of it is removed afterwards.

    It has XFS, as ``roles/local_disk`` makes by default, or ext4 on a host without ``mkfs.xfs``.
    """
    where = folder / "mnt"
    where.mkdir()
    kind = filesystem()
    argv: dict[str, list[str]] = {
        "xfs": ["mkfs.xfs", "-q", "-f", "-n", "ftype=1"],
        "ext4": ["mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=1"],
    }
    with blank_device(folder, gigabytes) as device:
        process.run([*argv[kind], device])
        namespace.mount(kind, os.fspath(device), os.fspath(where), "noinit_itable" if kind == "ext4" else "")
        try:
            number = os.stat(where).st_dev
            process.run(["sync"])
            yield Disk(where, f"{os.major(number)}:{os.minor(number)}", device.name)
        finally:
            namespace.unmount(os.fspath(where))
    where.rmdir()


@contextmanager
def blank_device(folder: Path, gigabytes: float) -> Iterator[Path]:
    """Make a loop device of the given size, backed by a sparse file; both are removed afterwards."""
    file = folder / "disk.img"
    with file.open("wb") as sink:
        sink.truncate(int(gigabytes * 1e9) // 4096 * 4096)
    try:
        with loop_device(file) as device:
            yield device
    finally:
        file.unlink()


@contextmanager
def loop_device(file: Path) -> Iterator[Path]:
    """Attach a file to a loop device that bypasses the host's page cache."""
    device = _attach(file)
    try:
        yield device
    finally:
        process.run(["losetup", "--detach", device])


def filesystem() -> str:
    """Return the filesystem that ``blank_disk`` makes on this host."""
    return "xfs" if shutil.which("mkfs.xfs", path=environment()["PATH"]) else "ext4"


def _attach(file: Path) -> Path:
    """Return a loop device for a file; /dev belongs to this namespace, so its device nodes are created here."""
    control = Path("/dev/loop-control")
    if not control.exists():
        os.mknod(control, 0o20600, os.makedev(10, 237))
    for _ in range(20):  # another process may take it in the meantime
        with control.open("rb") as stream:
            number = fcntl.ioctl(stream, _LOOP_CTL_GET_FREE)
        device = Path(f"/dev/loop{number}")
        if not device.exists():
            os.mknod(device, 0o60600, os.makedev(7, number))
        if process.run(["losetup", "--direct-io=on", device, file], ok=range(256)).returncode == 0:
            return device
    raise RuntimeError("no loop device is free")


@contextmanager
def throttled(disk: Disk, bytes_per_second: int) -> Iterator[None]:
    """Limit how fast this process and all that it starts can read from a disk."""
    group = _BLKIO / f"image-builder-bench-{os.getpid()}"
    group.mkdir()
    try:
        (group / "blkio.throttle.read_bps_device").write_text(f"{disk.number} {bytes_per_second}")
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (_BLKIO / "cgroup.procs").write_text(str(os.getpid()))
        _leave(group)


def _leave(group: Path) -> None:
    """Remove a control group once the last of its processes has exited."""
    for _ in range(100):
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(0.1)


def drop_caches() -> None:
    process.run(["sync"])
    Path("/proc/sys/vm/drop_caches").write_text("3")
