"""Files, directories and locks that survive a power cut, a killed agent and a second one.

The node's only writer by rename: what a reader finds under a name is whole. And the system calls that Python lacks.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from image_builder.node import mounts
from image_builder.node.errors import NodeError

_AT_FDCWD = -100
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)

# What deleting an entry costs of a rate: its metadata are written, not its bytes.
ENTRY_COST = 4096
# The longest path that a directory is opened by, in bytes: one name more is still below the kernel's 4096.
LONGEST_PATH = 3072
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# What is done under a lock, a test or a new filesystem, ends within so many seconds.
LONGEST_WORK = 900.0
_POLL_SECONDS = 0.05

Spend = Callable[[int], None]


@contextmanager
def descriptor(path: str | Path, flags: int = os.O_RDONLY, mode: int = 0o600) -> Iterator[int]:
    """Yield the descriptor of a file or directory, which is closed in any ending. Raises OSError."""
    fd = os.open(path, flags | os.O_CLOEXEC, mode)
    try:
        yield fd
    finally:
        os.close(fd)


# -- syncing -----------------------------------------------------------------------------------------------------


def syncfs(path: Path) -> None:
    """Write everything of the filesystem that holds ``path`` to its disk; raises OSError."""
    with descriptor(path, os.O_DIRECTORY) as fd:
        mounts.check(_libc.syncfs(fd), "syncfs", path)


def sync_directory(path: Path) -> None:
    """Make what was renamed in a directory durable; raises OSError."""
    with descriptor(path, os.O_DIRECTORY) as fd:
        os.fsync(fd)


# -- names -------------------------------------------------------------------------------------------------------


def _renameat2(source: Path, target: Path, flags: int) -> None:
    result = _libc.renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags)
    mounts.check(result, "renameat2", target)


def exchange(first: Path, second: Path) -> None:
    """Exchange two names of one filesystem in one step; raises OSError."""
    _renameat2(first, second, _RENAME_EXCHANGE)


def rename_new(source: Path, target: Path) -> None:
    """Rename; raises FileExistsError where ``target`` exists."""
    _renameat2(source, target, _RENAME_NOREPLACE)


# -- files -------------------------------------------------------------------------------------------------------


def write(path: Path, data: bytes, mode: int = 0o644, *, durable: bool = True) -> None:
    """Replace a file: afterwards it holds ``data`` or, after a crash, what it held before. Raises OSError.

    ``durable`` False is for a memory filesystem, and where the caller syncs: a power cut may halve the file.
    """
    draft = path.with_name(f".{path.name}.new")
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        with os.fdopen(fd, "wb") as file:
            os.fchmod(fd, mode)
            file.write(data)
            file.flush()
            if durable:
                os.fsync(fd)
        draft.replace(path)
    except OSError:
        with suppress(OSError):
            draft.unlink()
        raise
    if durable:
        sync_directory(path.parent)


def write_json(path: Path, value: Mapping[str, Any], mode: int = 0o644, *, durable: bool = True) -> None:
    """Replace a file by an object as JSON, as ``write`` does."""
    write(path, (json.dumps(value, indent=1) + "\n").encode(), mode, durable=durable)


def write_changed(path: Path, data: bytes, mode: int = 0o644, *, durable: bool = True) -> bool:
    """Replace a file, as ``write`` does, unless it holds that already with that mode; tell whether it was written."""
    try:
        if path.read_bytes() == data and stat.S_IMODE(path.stat().st_mode) == mode:
            return False
    except FileNotFoundError:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    write(path, data, mode, durable=durable)
    return True


def read_json(path: Path) -> dict[str, Any]:
    """Return a file's JSON object; empty where there is none that is whole."""
    try:
        return json_object(path.read_bytes())
    except OSError:
        return {}


def json_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object that these bytes are; empty for anything else."""
    try:
        document = json.loads(data)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def create(path: str | Path, data: bytes, mode: int = 0o644) -> None:
    """Write a file in place, with exactly this mode: for a directory that has no reader yet. Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        if mode & 0o077:  # which a umask may have taken away
            os.fchmod(fd, mode)
        written = 0
        while written < len(data):
            written += os.write(fd, data[written:])
    except OSError as error:
        error.filename = os.fspath(path)
        raise
    finally:
        os.close(fd)


def link(target: str | Path, path: str | Path) -> None:
    """Make a symbolic link, in place of an older one."""
    try:
        os.symlink(target, path)
    except FileExistsError:
        if os.path.islink(path):
            os.unlink(path)
        os.symlink(target, path)


def make_directory(path: Path, mode: int) -> None:
    """Make a directory with exactly this mode; an existing one is left alone."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        return
    path.chmod(mode)


# -- whole directories -------------------------------------------------------------------------------------------


def free(_cost: int) -> None:
    """Spend nothing: work as fast as it goes."""


def remove_tree(path: Path, spend: Spend = free) -> None:
    """Delete a directory of any depth and all below it, and follow no link; one that doesn't exist is no error.

    ``spend`` is called with the cost of each entry before it goes, and may wait. Raises OSError, and NodeError
    (``disk.busy``) when something is mounted on it or below it.
    """
    if mount_points := mounts.below(path):
        raise NodeError("disk.busy", f"{path} is not deleted: {mount_points[0]} is a mount point")
    try:
        top = os.open(path, _DIRECTORY)
    except FileNotFoundError:
        return
    try:
        device = os.fstat(top).st_dev
        folders, waiting = ["."], ["."]
        while waiting:
            below = _empty_directory(top, waiting.pop(), device, spend)
            folders += below
            waiting += below
        for folder in reversed(folders[1:]):
            os.rmdir(folder, dir_fd=top)
    finally:
        os.close(top)
    path.rmdir()


def _empty_directory(top: int, path: str, device: int, spend: Spend) -> list[str]:
    """Delete a directory's entries but for its directories; return those, by path below ``top``.

    One whose path gets too long for the kernel is moved up to ``top``: the program that made the tree needed no path.
    """
    folder = os.open(path, _DIRECTORY, dir_fd=top)
    try:
        folders = []
        for name in os.listdir(folder):
            spend(ENTRY_COST)
            entry = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if not stat.S_ISDIR(entry.st_mode):
                os.unlink(name, dir_fd=folder)
            elif entry.st_dev == device:  # else it was mounted a moment ago
                below = f"{path}/{name}"
                if len(os.fsencode(below)) > LONGEST_PATH:
                    below = f"./{os.urandom(16).hex()}"
                    os.rename(name, below, src_dir_fd=folder, dst_dir_fd=top)
                folders.append(below)
        return folders
    finally:
        os.close(folder)


def set_aside(path: Path, trash: Path, boot: str) -> None:
    """Rename a directory into ``trash``, on the same filesystem, under a name that is free there.

    The name ends with the boot in which that happened: nothing is deleted before a later boot has succeeded. Raises
    OSError, and NodeError (``disk.busy``) when something is mounted on it or below it.
    """
    if mount_points := mounts.below(path):
        raise NodeError("disk.busy", f"{path} is not set aside: {mount_points[0]} is a mount point")
    trash.mkdir(parents=True, exist_ok=True)
    for number in range(10_000):
        target = trash / f"{path.name}.{number}.{boot}"
        if not os.path.lexists(target):
            path.rename(target)
            return
    raise NodeError("disk.busy", f"{trash} holds too much to set {path} aside")


# -- locks -------------------------------------------------------------------------------------------------------


@contextmanager
def lock(path: Path, seconds: float = LONGEST_WORK) -> Iterator[None]:
    """Hold a file's lock, which the kernel takes back from a process however it ends. A missing file is made.

    Another holder is waited for, ``seconds`` at most: one that hangs in the kernel keeps it until the machine is
    restarted. Raises OSError; TimeoutError when the time is over.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with descriptor(path, os.O_RDWR | os.O_CREAT) as fd:
        if not try_lock(fd, seconds):
            message = f"another process has held it for more than {seconds:g} s"
            raise TimeoutError(errno.ETIMEDOUT, message, str(path))
        try:
            yield
        finally:
            # A forked child has the same lock, and may outlive this process: closing alone would leave it held.
            fcntl.flock(fd, fcntl.LOCK_UN)


def try_lock(fd: int, seconds: float) -> bool:
    """Take the lock of an open file, waiting for another holder at most so long; tell whether it was taken."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
        else:
            return True
