"""Copying and hashing big files that are mostly holes.

A hole stays one in the copy: the bytes of a disk image are few beside its size. Progress is told as
``progress(done, total)`` in bytes of the file's size, some times a second.
"""

from __future__ import annotations

import errno
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

Progress = Callable[[int, int], None]

_CHUNK = 8 << 20
_BUFFER = 1 << 20
_SECONDS_BETWEEN = 0.2
# Answers of copy_file_range(2) to files that it can't copy between, such as ones of other filesystems.
_NOT_IN_KERNEL = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)


def copy(source: Path, target: Path, progress: Progress | None = None) -> int:
    """Copy a regular file to a new one and return its size in bytes; holes stay holes.

    On filesystems that can, the copy shares the source's blocks. The copy is not synced. Raises OSError,
    FileExistsError when ``target`` is there.
    """
    teller = _Teller(progress)
    with source.open("rb") as reader, target.open("xb") as writer:
        size = os.fstat(reader.fileno()).st_size
        writer.truncate(size)
        for start, end in _extents(reader.fileno(), size):
            at = start
            while at < end:
                done = _copy_range(reader.fileno(), writer.fileno(), at, min(_CHUNK, end - at))
                if not done:
                    raise OSError(errno.EIO, f"{source} became shorter while it was copied")
                at += done
                teller.tell(at, size)
        teller.tell(size, size)
    return size


def sha256(path: Path, progress: Progress | None = None) -> str:
    """Return the SHA-256 of a file, in hex. Holes are not read, but count as the zeros they are."""
    teller = _Teller(progress)
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        at = 0
        for start, end in _extents(stream.fileno(), size):
            _update_zeros(digest.update, start - at)
            stream.seek(start)
            at = start
            while at < end:
                block = stream.read(min(_BUFFER, end - at))
                if not block:
                    raise OSError(errno.EIO, f"{path} became shorter while it was read")
                digest.update(block)
                at += len(block)
                teller.tell(at, size)
        _update_zeros(digest.update, size - at)
        teller.tell(size, size)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Write a file to its disk and drop it from the page cache, so that the next read comes from the disk."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _extents(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a file that hold data: (start, end)."""
    end = 0
    while end < size:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:  # ENXIO: only a hole follows
                raise
            return
        end = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, end


def _copy_range(reader: int, writer: int, offset: int, length: int) -> int:
    try:
        return os.copy_file_range(reader, writer, length, offset, offset)
    except OSError as error:
        if error.errno not in _NOT_IN_KERNEL:
            raise
    return os.pwrite(writer, os.pread(reader, min(length, _BUFFER), offset), offset)


def _update_zeros(update: Callable[[bytes], object], count: int) -> None:
    zeros = bytes(_BUFFER)
    for _ in range(count // _BUFFER):
        update(zeros)
    update(bytes(count % _BUFFER))


class _Teller:
    """Passes progress on, but not more often than people can read it."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._next = 0.0

    def tell(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._progress and (done == total or now >= self._next):
            self._next = now + _SECONDS_BETWEEN
            self._progress(done, total)
