"""Copying and hashing big files that are mostly holes.

A hole stays a hole in the copy: a disk image contains little data for its size. Progress is reported as
``progress(done, total)`` in bytes of the file's size, several times a second.

``direct`` is O_DIRECT, bypassing the page cache: what is written is on the disk, what is read comes from there, and no
memory is used for pages that are never read again, which costs more than the disk does. If a filesystem doesn't
support it (open(2): EINVAL), the page cache is used.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

Progress = Callable[[int, int], None]

_CHUNK = 8 << 20
_BUFFER = 1 << 20
_SECONDS_BETWEEN = 0.2
# The alignment of direct transfers on any disk; memory from mmap is aligned to it as well.
_ALIGNED = 4096
_FICLONE = 0x40049409  # linux/fs.h
# Errors of copy_file_range(2) for files that it can't copy between, such as ones on different filesystems.
_NOT_IN_KERNEL = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)


def copy(source: Path, target: Path, progress: Progress | None = None, *, direct: bool = False) -> int:
    """Copy a regular file to a new one and return its size in bytes; holes stay holes.

    On filesystems that support it, the copy shares the source's blocks. The copy isn't synced. Raises OSError,
    FileExistsError if ``target`` exists.
    """
    teller = _Teller(progress)
    with source.open("rb") as reader, target.open("xb") as writer:
        size = os.fstat(reader.fileno()).st_size
        if direct and _cloned(reader.fileno(), writer.fileno()):
            teller.tell(size, size)
            return size
        writer.truncate(size)
        with _copier(reader.fileno(), writer.fileno(), target, direct=direct) as copy_range:
            for start, end in extents(reader.fileno(), size):
                at = start
                while at < end:
                    done = copy_range(at, min(_CHUNK, end - at))
                    if not done:
                        raise OSError(errno.EIO, f"{source} became shorter while it was copied")
                    at += done
                    teller.tell(at, size)
        writer.truncate(size)
        teller.tell(size, size)
    return size


def sha256(path: Path, progress: Progress | None = None, *, direct: bool = False) -> str:
    """Return the SHA-256 of a file, in hex. Holes aren't read, but count as zeros."""
    teller = _Teller(progress)
    digest = hashlib.sha256()
    # One piece is hashed while the next one is read.
    buffers = [mmap.mmap(-1, _BUFFER), mmap.mmap(-1, _BUFFER)]
    hashed: Future[None] | None = None
    with ThreadPoolExecutor(1) as hasher, _closing_fd(_open(path, os.O_RDONLY, direct=direct)) as fd:
        size = os.fstat(fd).st_size
        at = 0
        for start, end in extents(fd, size):
            hasher.submit(_update_zeros, digest.update, start - at)
            at = start
            while at < end:
                # Data beyond the end is read too, since a direct read covers whole blocks.
                count = min(os.preadv(fd, [buffers[0]], at), end - at)
                if count <= 0:
                    raise OSError(errno.EIO, f"{path} became shorter while it was read")
                if hashed:
                    hashed.result()
                hashed = hasher.submit(_update, digest.update, buffers[0], count)
                buffers.reverse()
                at += count
                teller.tell(at, size)
        hasher.submit(_update_zeros, digest.update, size - at).result()
        teller.tell(size, size)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Write a file to its disk and drop it from the page cache, so that the next read comes from the disk."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def extents(fd: int, size: int) -> Iterator[tuple[int, int]]:
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


@contextmanager
def _closing_fd(fd: int) -> Iterator[int]:
    """Close a file descriptor at the end."""
    try:
        yield fd
    finally:
        os.close(fd)


def _open(path: Path, flags: int, *, direct: bool) -> int:
    """Open a file, bypassing the page cache if ``direct`` and the filesystem supports it."""
    if direct:
        try:
            return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return os.open(path, flags | os.O_CLOEXEC)


@contextmanager
def _copier(reader: int, writer: int, target: Path, *, direct: bool) -> Iterator[Callable[[int, int], int]]:
    """Yield a function that copies a range (offset, bytes) and returns the bytes copied, 0 at the source's end."""
    if not direct:
        yield lambda offset, length: _copy_range(reader, writer, offset, length)
        return
    with (
        _closing_fd(_open(target, os.O_WRONLY, direct=True)) as past,
        closing(mmap.mmap(-1, _CHUNK)) as buffer,
    ):
        yield lambda offset, length: _write_range(reader, past, buffer, offset, length)


def _cloned(reader: int, writer: int) -> bool:
    """Make the copy share all blocks of the source; return whether the filesystem supports that."""
    try:
        fcntl.ioctl(writer, _FICLONE, reader)
    except OSError as error:
        if error.errno not in (*_NOT_IN_KERNEL, errno.ENOTTY):
            raise
        return False
    return True


def _write_range(reader: int, writer: int, buffer: mmap.mmap, offset: int, length: int) -> int:
    """Copy through a buffer, in whole blocks; anything written beyond the file's end has to be truncated."""
    with memoryview(buffer) as whole, whole[:length] as part:
        count = os.preadv(reader, [part], offset)
        blocks = -(-count // _ALIGNED) * _ALIGNED
        whole[count:blocks] = bytes(blocks - count)
        with whole[:blocks] as written:
            return min(os.pwritev(writer, [written], offset), count) if count else 0


def _copy_range(reader: int, writer: int, offset: int, length: int) -> int:
    try:
        return os.copy_file_range(reader, writer, length, offset, offset)
    except OSError as error:
        if error.errno not in _NOT_IN_KERNEL:
            raise
    return os.pwrite(writer, os.pread(reader, min(length, _BUFFER), offset), offset)


def _update(update: Callable[[memoryview], object], buffer: mmap.mmap, count: int) -> None:
    with memoryview(buffer) as whole, whole[:count] as part:
        update(part)


def _update_zeros(update: Callable[[bytes], object], count: int) -> None:
    zeros = bytes(_BUFFER)
    for _ in range(count // _BUFFER):
        update(zeros)
    update(bytes(count % _BUFFER))


class _Teller:
    """Reports progress, but no more often than people can read it."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._next = 0.0

    def tell(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._progress and (done == total or now >= self._next):
            self._next = now + _SECONDS_BETWEEN
            self._progress(done, total)
