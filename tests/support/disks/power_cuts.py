"""Power cuts at every write: a disk that records its writes and flushes, and copies of it as of each power cut.

The disk is a file that a process serves through FUSE, under a loop device: the kernel's filesystem writes to it as to
any disk. A copy has all writes up to a given one. A disk with a cache may also lose some writes that weren't flushed
yet but keep later ones: such copies are made as well.
"""

from __future__ import annotations

import errno
import os
import random
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from image_builder.system import namespace

MB = 1 << 20
_MAX_WRITE = MB
# linux/fuse.h
_FORGET, _GETATTR, _SETATTR, _OPEN, _READ, _WRITE, _RELEASE = 2, 3, 4, 14, 15, 16, 18
_FSYNC, _FLUSH, _INIT, _INTERRUPT, _DESTROY, _BATCH_FORGET = 20, 25, 26, 36, 38, 42
_SILENT = frozenset([_FORGET, _INTERRUPT, _BATCH_FORGET])
_BIG_WRITES, _MAX_PAGES = 1 << 5, 1 << 22
_IN, _OUT = struct.Struct("=IIQQIIIHH"), struct.Struct("=IiQ")
_RECORD = struct.Struct("=qI")  # a write's offset and length; a negative offset is a flush


@dataclass(frozen=True)
class Cut:
    """A copy of the disk: ``writes`` are the numbers of the recorded writes that are on it."""

    name: str
    writes: tuple[int, ...]


@dataclass
class Record:
    """What happened to a disk: ``base`` is its initial image, ``writes`` has the offset and bytes of each write, and
    ``flushes`` the number of writes before each flush.
    """

    base: Path
    writes: list[tuple[int, bytes]] = field(default_factory=list)
    flushes: list[int] = field(default_factory=list)

    def cuts(self, seed: int = 1) -> list[Cut]:
        """Return a cut after each write, and for each flush a cut that came before it and lost some of its writes."""
        found = [Cut(f"after write {n}", tuple(range(n))) for n in range(len(self.writes) + 1)]
        chance, before = random.Random(seed), 0
        for flush in [*self.flushes, len(self.writes)]:
            cached = range(before, flush)
            if len(cached) > 1:
                kept = tuple(n for n in cached if chance.random() < 0.5)
                found.append(
                    Cut(f"lost {len(cached) - len(kept)} before write {flush}", (*range(before), *kept))
                )
            before = flush
        return found

    @contextmanager
    def disk(self, cut: Cut, target: Path) -> Iterator[Path]:
        """Mount a copy as the next boot would, replaying its journal."""
        image = self.base.with_suffix(".cut")
        subprocess.run(["cp", "--sparse=always", self.base, image], check=True)
        with image.open("r+b") as file:
            for number in cut.writes:
                place, data = self.writes[number]
                file.seek(place)
                file.write(data)
        mount_loop(image, target)
        try:
            yield target
        finally:
            namespace.unmount(os.fspath(target))
            image.unlink()


@contextmanager
def recorded(folder: Path, target: Path, size: int) -> Iterator[Record]:
    """Mount a new filesystem at ``target``; the record is complete once it is unmounted."""
    base, served, log = folder / "base.img", folder / "served.img", folder / "writes"
    with base.open("wb") as file:
        file.truncate(size)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m0", "-Jsize=4", base], check=True)
    served.touch()
    record = Record(base)
    with suppress(FileExistsError):
        os.mknod("/dev/fuse", 0o20600, os.makedev(10, 229))
    fuse = os.open("/dev/fuse", os.O_RDWR)
    namespace.mount(
        "fuse", "recorder", os.fspath(served), f"fd={fuse},rootmode=100000,user_id=0,group_id=0,allow_other"
    )
    server = os.fork()
    if server == 0:
        status = 1
        try:
            _Server(fuse, base, log, size).serve()
            status = 0
        finally:
            os._exit(status)
    os.close(fuse)
    try:
        mount_loop(served, target)
        try:
            yield record
        finally:
            namespace.unmount(os.fspath(target))
    finally:
        namespace.unmount(os.fspath(served))
        _, status = os.waitpid(server, 0)
    assert status == 0, "the recorder failed"
    _read(log, record)


def _read(log: Path, record: Record) -> None:
    data, at = log.read_bytes(), 0
    while at < len(data):
        place, count = _RECORD.unpack_from(data, at)
        at += _RECORD.size
        if place < 0:
            record.flushes.append(len(record.writes))
        else:
            record.writes.append((place, data[at : at + count]))
            at += count


class _Server:
    """A filesystem with one file; writes to it go to memory and the log, nowhere else."""

    def __init__(self, fuse: int, base: Path, log: Path, size: int) -> None:
        self._fuse, self._size = fuse, size
        self._disk = bytearray(base.read_bytes())
        self._log = log.open("wb")

    def serve(self) -> None:
        while True:
            try:
                request = os.read(self._fuse, _MAX_WRITE + 8192)
            except OSError as error:
                if error.errno == errno.ENODEV:  # unmounted
                    break
                if error.errno == errno.ENOENT:  # the request was aborted in the meantime
                    continue
                raise
            _, code, unique, *_ = _IN.unpack_from(request)
            if code in _SILENT:
                continue
            number, answer = self._answer(code, request[_IN.size :])
            with suppress(FileNotFoundError):
                os.write(self._fuse, _OUT.pack(_OUT.size + len(answer), -number, unique) + answer)
        self._log.close()

    def _answer(self, code: int, body: bytes) -> tuple[int, bytes]:
        if code == _INIT:
            major, minor, ahead, _ = struct.unpack_from("=IIII", body)
            flags = _BIG_WRITES | _MAX_PAGES
            told = struct.pack(
                "=IIIIHHIIHHI28x", major, minor, ahead, flags, 16, 12, _MAX_WRITE, 1, 256, 0, 0
            )
            return 0, told
        if code in (_GETATTR, _SETATTR):
            attributes = struct.pack("=6Q3I", 1, self._size, self._size // 512, 0, 0, 0, 0, 0, 0)
            return 0, struct.pack("=QII", 1, 0, 0) + attributes + struct.pack(
                "=7I", 0o100600, 1, 0, 0, 0, 4096, 0
            )
        if code == _OPEN:
            return 0, bytes(16)
        if code == _READ:
            _, place, count = struct.unpack_from("=QQI", body)
            return 0, bytes(self._disk[place : place + count])
        if code == _WRITE:
            _, place, count = struct.unpack_from("=QQI", body)
            data = body[40 : 40 + count]
            self._disk[place : place + count] = data
            self._log.write(_RECORD.pack(place, count) + data)
            return 0, struct.pack("=II", count, 0)
        if code == _FSYNC:
            self._log.write(_RECORD.pack(-1, 0))
            return 0, b""
        return (0, b"") if code in (_FLUSH, _RELEASE, _DESTROY) else (errno.ENOSYS, b"")


def mount_loop(image: Path, target: Path, options: str = "") -> None:
    """Mount an ext4 image through a loop device that disappears with the mount."""
    with suppress(FileExistsError):
        os.mknod("/dev/loop-control", 0o20600, os.makedev(10, 237))
    for number in range(64):
        with suppress(FileExistsError):
            os.mknod(f"/dev/loop{number}", 0o60600, os.makedev(7, number))
    done = subprocess.run(["losetup", "-f", "--show", image], check=True, capture_output=True, text=True)
    device = done.stdout.strip()
    try:
        namespace.mount("ext4", device, os.fspath(target), options)
    finally:
        subprocess.run(["losetup", "-d", device], check=True)
