"""Copy a layer exactly as it is in the store, as an engine would have unpacked it.

Preserved: type, mode, owner, modification time, extended attributes (``trusted.overlay.opaque``,
``security.capability``, ACLs), device numbers (a whiteout is a character device 0:0), hard links within the layer. Runs
of zeros in big files become holes. A directory gets its own attributes only after its entries, so that creating these
doesn't change the attributes and no entry inherits the directory's ACL.

Entries are copied in the order of their inodes, subdirectories one after another: the store's data is in that order,
and reading the directories of a real system in another one takes up to a third longer.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from image_builder.node.files import LONGEST_PATH, Spend, free

BLOCK = 4096
# How much is read at once; smaller files are copied without checking for zeros.
CHUNK = 1 << 20
# How much of a file may be buffered in memory while the copy is rate-limited: bursts of writes slow down readers.
_FLUSH = 4 << 20
_SYNC_FILE_RANGE_WRITE = 2
_ZEROS = bytes(BLOCK)
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY = _READ | os.O_DIRECTORY
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FORGOTTEN_BY_CHOWN = stat.S_ISUID | stat.S_ISGID
_libc = ctypes.CDLL(None, use_errno=True)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)

Attributes = dict[str, bytes]


class SourceError(Exception):
    """The store could not be read: ``code`` is the errno, ``path`` the place."""

    def __init__(self, code: int, path: str) -> None:
        super().__init__(f"{path}: {os.strerror(code)}")
        self.code = code
        self.path = path


@dataclass(frozen=True)
class _Base:
    """A directory, open in the store and in the copy; ``shown`` is its path for messages."""

    source: int
    target: int
    shown: str


@dataclass
class _Job:
    """A tree being copied. Paths are relative to a base: the top, or a directory so deep that paths to its entries
    would be too long for the kernel.
    """

    spend: Spend
    flush: bool
    waiting: list[tuple[_Base, str, os.stat_result]] = field(default_factory=list)
    first_names: dict[int, tuple[int, str]] = field(default_factory=dict)
    bases: list[_Base] = field(default_factory=list)


def copy_tree(source: Path, target: Path, spend: Spend = free, *, flush: bool = False) -> None:
    """Copy the directory ``source`` to ``target``, which must not exist.

    ``spend`` is called with each entry's bytes before they are written, and may wait. ``flush``: start writing big
    files out while they are still being copied. Raises SourceError, or OSError for the target.
    """
    before = os.umask(0)
    try:
        with _reading(os.fspath(source)):
            top = os.open(source, _DIRECTORY)
        try:
            os.mkdir(target, 0o700)
            copy = os.open(target, _DIRECTORY)
            try:
                _walk(_Job(spend, flush), _Base(top, copy, os.fspath(source)))
            finally:
                os.close(copy)
        finally:
            os.close(top)
    finally:
        os.umask(before)


def copy_file(source: Path, target: Path, spend: Spend = free, *, flush: bool = False) -> None:
    """Copy one regular file to ``target``, which must not exist. Otherwise like ``copy_tree``."""
    before = os.umask(0)
    try:
        with _reading(os.fspath(source)):
            folder = os.open(source.parent, _DIRECTORY)
        try:
            target_folder = os.open(target.parent, _DIRECTORY)
            try:
                with _reading(os.fspath(source)):
                    info = os.stat(source.name, dir_fd=folder, follow_symlinks=False)
                _file(folder, source.name, info, (target_folder, target.name), (spend, flush))
            finally:
                os.close(target_folder)
        finally:
            os.close(folder)
    finally:
        os.umask(before)


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """Turn an error of the store into one that can't be mistaken for the disk's."""
    try:
        yield
    except OSError as error:
        raise _source_error(error, path) from error


def _source_error(error: OSError, path: str) -> SourceError:
    return SourceError(error.errno or errno.EIO, path)


def _walk(job: _Job, top: _Base) -> None:
    job.waiting.append((top, ".", os.fstat(top.source)))
    try:
        while job.waiting:
            base, name, info = job.waiting.pop()
            try:
                _directory(job, base, name, info)
            except SourceError as error:
                shown = os.path.normpath(f"{base.shown}/{name}/{error.path}")
                raise SourceError(error.code, shown) from error
    finally:
        for base in job.bases:
            os.close(base.source)
            os.close(base.target)


def _below(job: _Job, base: _Base, path: str, source: int, target: int) -> tuple[_Base, str]:
    """Return the base and path to use for an open directory's entries: the same base, or a new one for a long path."""
    if len(os.fsencode(path)) <= LONGEST_PATH:
        return base, path
    new = _Base(os.dup(source), os.dup(target), os.path.normpath(f"{base.shown}/{path}"))
    job.bases.append(new)
    return new, "."


def _directory(job: _Job, base: _Base, path: str, info: os.stat_result) -> None:
    """Fill a directory that already exists, then set its own attributes. Its subdirectories are queued for later."""
    with _reading("."):
        source = os.open(path, _DIRECTORY, dir_fd=base.source)
    try:
        target = os.open(path, _DIRECTORY, dir_fd=base.target)
        try:
            with _reading("."), os.scandir(source) as entries:
                names = [entry.name for entry in sorted(entries, key=os.DirEntry.inode)]
                attributes = _attributes(source)
            place = _below(job, base, path, source, target)
            queued = len(job.waiting)
            for name in names:
                _entry(job, source, target, place, name)
            job.waiting[queued:] = reversed(job.waiting[queued:])
            _finish(target, info, attributes)
        finally:
            os.close(target)
    finally:
        os.close(source)


def _entry(job: _Job, source: int, target: int, place: tuple[_Base, str], name: str) -> None:
    base, path = place
    try:
        info = os.stat(name, dir_fd=source, follow_symlinks=False)
    except OSError as error:
        raise _source_error(error, name) from error
    mode = info.st_mode
    if stat.S_ISDIR(mode):
        job.spend(BLOCK)
        os.mkdir(name, 0o700, dir_fd=target)
        job.waiting.append((base, f"{path}/{name}", info))
        return
    if info.st_nlink > 1:
        own_name = (base.target, f"{path}/{name}")
        first = job.first_names.setdefault(info.st_ino, own_name)
        if first != own_name:
            os.link(first[1], name, src_dir_fd=first[0], dst_dir_fd=target, follow_symlinks=False)
            return
    if stat.S_ISREG(mode):
        _file(source, name, info, (target, name), (job.spend, job.flush))
    else:
        job.spend(BLOCK)
        _special(source, target, name, info)


def _special(source: int, target: int, name: str, info: os.stat_result) -> None:
    """Make a symbolic link, device, whiteout, FIFO or socket."""
    try:
        text = os.readlink(name, dir_fd=source) if stat.S_ISLNK(info.st_mode) else ""
        # Before Linux 6.13 no system call accesses attributes relative to a directory.
        attributes = _attributes(f"/proc/self/fd/{source}/{name}")
    except OSError as error:
        raise _source_error(error, name) from error
    if text:
        os.symlink(text, name, dir_fd=target)
    else:
        os.mknod(name, info.st_mode, info.st_rdev, dir_fd=target)
    if info.st_uid or info.st_gid:
        os.chown(name, info.st_uid, info.st_gid, dir_fd=target, follow_symlinks=False)
    for key, value in attributes.items():
        os.setxattr(f"/proc/self/fd/{target}/{name}", key, value, follow_symlinks=False)
    if not text and (info.st_uid or info.st_gid or attributes):
        # This opens neither a device nor a FIFO: the name was just created, in a private directory.
        os.chmod(name, stat.S_IMODE(info.st_mode), dir_fd=target)
    os.utime(name, ns=(info.st_mtime_ns, info.st_mtime_ns), dir_fd=target, follow_symlinks=False)


def _file(folder: int, name: str, info: os.stat_result, to: tuple[int, str], how: tuple[Spend, bool]) -> None:
    """Copy a regular file from a directory to ``to`` (directory, name). ``how`` is ``spend`` and ``flush``."""
    spend, flush = how
    size = info.st_size
    try:
        source = os.open(name, _READ, dir_fd=folder)
    except OSError as error:
        raise _source_error(error, name) from error
    try:
        try:
            attributes = _attributes(source)
            data = os.read(source, min(size, CHUNK)) if size else b""
        except OSError as error:
            raise _source_error(error, name) from error
        spend(len(data) + BLOCK)
        target = os.open(to[1], _NEW, stat.S_IMODE(info.st_mode), dir_fd=to[0])
        try:
            if size < CHUNK:
                if len(data) != size or (data and os.write(target, data) != size):
                    _write_rest(target, data, size, name)
            else:
                _big_file(source, target, data, name, size, spend, flush)
            _finish(target, info, attributes)
        finally:
            os.close(target)
    finally:
        os.close(source)


def _write_rest(target: int, data: bytes, size: int, name: str) -> None:
    """Write a small file again after a short write (the disk is full). Raises SourceError after a short read."""
    if len(data) != size:
        raise SourceError(errno.EIO, name)
    _write(target, data, 0)


def _big_file(source: int, target: int, data: bytes, name: str, size: int, spend: Spend, flush: bool) -> None:
    """Copy a big file whose first chunk is ``data``; blocks of zeros become holes."""
    place = flushed = 0
    while True:
        if not data:
            raise SourceError(errno.EIO, name)
        for start, end in extents(data):
            _write(target, data[start:end] if end - start < len(data) else data, place + start)
        place += len(data)
        if flush and place - flushed >= _FLUSH:
            _libc.sync_file_range(target, flushed, place - flushed, _SYNC_FILE_RANGE_WRITE)
            flushed = place
        if place >= size:
            break
        try:
            data = os.read(source, min(size - place, CHUNK))
        except OSError as error:
            raise _source_error(error, name) from error
        spend(len(data))
    os.ftruncate(target, size)


def _write(target: int, data: bytes, place: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(target, data[done:] if done else data, place + done)


def extents(data: bytes) -> list[tuple[int, int]]:
    """Return the ranges of ``data`` that are not whole blocks of zeros, in order; adjacent ranges are merged."""
    # Usually no block begins with a zero byte, so there are no blocks of zeros: check that first.
    if data[::BLOCK].find(0) < 0:
        return [(0, len(data))]
    ranges: list[tuple[int, int]] = []
    for start in range(0, len(data), BLOCK):
        end = min(start + BLOCK, len(data))
        if data[start] == 0 and data[start:end] == _ZEROS[: end - start]:
            continue
        if ranges and ranges[-1][1] == start:
            ranges[-1] = (ranges[-1][0], end)
        else:
            ranges.append((start, end))
    return ranges


def _attributes(of: int | str) -> Attributes:
    """Return the extended attributes of an open file, or of a path, without following a symbolic link at its end."""
    follow = isinstance(of, int)
    return {
        key: os.getxattr(of, key, follow_symlinks=follow) for key in os.listxattr(of, follow_symlinks=follow)
    }


def _finish(target: int, info: os.stat_result, attributes: Attributes) -> None:
    """Set an open file's or directory's owner, mode, attributes and time, in an order in which none undoes another."""
    mode = stat.S_IMODE(info.st_mode)
    owned = info.st_uid or info.st_gid
    if owned:
        os.fchown(target, info.st_uid, info.st_gid)
    for key, value in attributes.items():
        os.setxattr(target, key, value)
    if stat.S_ISDIR(info.st_mode) or attributes or (owned and mode & _FORGOTTEN_BY_CHOWN):
        os.fchmod(target, mode)
    os.utime(target, ns=(info.st_mtime_ns, info.st_mtime_ns))
