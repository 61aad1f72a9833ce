"""Files, directories and locks that survive a power cut, a killed agent and a second agent.

The node's only code that writes by rename, so that a reader never finds a partial file, and the system calls that
Python lacks.
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

# The cost of deleting an entry, in bytes of a rate limit: its metadata is written, not its contents.
ENTRY_COST = 4096
# The longest path used to open a directory, in bytes: with one more name it is still below the kernel's 4096.
LONGEST_PATH = 3072
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# The longest that work under a lock (a test, a new filesystem) takes, in seconds.
LONGEST_WORK = 900.0
_POLL_SECONDS = 0.05

Spend = Callable[[int], None]


@contextmanager
def descriptor(path: str | Path, flags: int = os.O_RDONLY, mode: int = 0o600) -> Iterator[int]:
    """Yield the descriptor of a file or directory; it is always closed afterwards. Raises OSError."""
    fd = os.open(path, flags | os.O_CLOEXEC, mode)
    try:
        yield fd
    finally:
        os.close(fd)


# -- syncing -----------------------------------------------------------------------------------------------------


def syncfs(path: Path) -> None:
    """Flush the filesystem that contains ``path`` to its disk. Raises OSError."""
    with descriptor(path, os.O_DIRECTORY) as fd:
        mounts.check(_libc.syncfs(fd), "syncfs", path)


def sync_directory(path: Path) -> None:
    """Make renames in a directory durable. Raises OSError."""
    with descriptor(path, os.O_DIRECTORY) as fd:
        os.fsync(fd)


# -- names -------------------------------------------------------------------------------------------------------


def _renameat2(source: Path, target: Path, flags: int) -> None:
    result = _libc.renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags)
    mounts.check(result, "renameat2", target)


def exchange(first: Path, second: Path) -> None:
    """Exchange two names on one filesystem atomically. Raises OSError."""
    _renameat2(first, second, _RENAME_EXCHANGE)


def rename_new(source: Path, target: Path) -> None:
    """Rename, but never over an existing ``target``. Raises FileExistsError if it exists."""
    _renameat2(source, target, _RENAME_NOREPLACE)


# -- files -------------------------------------------------------------------------------------------------------


def write(path: Path, data: bytes, mode: int = 0o644, *, durable: bool = True) -> None:
    """Replace a file: afterwards it contains ``data`` or, after a crash, its old contents. Raises OSError.

    ``durable=False`` is for a memory filesystem, or if the caller syncs: a power cut may truncate the file.
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
    """Replace a file with an object as JSON, as ``write`` does."""
    write(path, (json.dumps(value, indent=1) + "\n").encode(), mode, durable=durable)


def write_changed(path: Path, data: bytes, mode: int = 0o644, *, durable: bool = True) -> bool:
    """Replace a file, as ``write`` does, unless its contents and mode already match. Return whether it was written."""
    try:
        if path.read_bytes() == data and stat.S_IMODE(path.stat().st_mode) == mode:
            return False
    except FileNotFoundError:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    write(path, data, mode, durable=durable)
    return True


def read_text(path: str | Path) -> str:
    """Return the one line of a small file; empty if it is missing or damaged, as by a power cut. Raises OSError."""
    try:
        with open(path, encoding="ascii") as file:
            text = file.read()
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        return ""
    return text if text.isprintable() else ""


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if the file is missing, unreadable or not a JSON object."""
    try:
        return json_object(path.read_bytes())
    except OSError:
        return {}


def json_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object that these bytes encode; empty for anything else."""
    try:
        document = json.loads(data)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def create(path: str | Path, data: bytes, mode: int = 0o644) -> None:
    """Write a file in place, with exactly this mode: for a directory that has no readers yet. Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        if mode & 0o077:  # a umask may have cleared these bits
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
    """Create a symbolic link, replacing an existing one."""
    try:
        os.symlink(target, path)
    except FileExistsError:
        if os.path.islink(path):
            os.unlink(path)
        os.symlink(target, path)


def make_directory(path: Path, mode: int) -> None:
    """Create a directory with exactly this mode; leave an existing one alone."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        return
    path.chmod(mode)


# -- whole directories -------------------------------------------------------------------------------------------


def free(_cost: int) -> None:
    """Spend nothing: work without a rate limit."""


def remove_tree(path: Path, spend: Spend = free) -> None:
    """Delete a directory of any depth without following links; a missing one isn't an error.

    ``spend`` is called with the cost of each entry before the entry is deleted, and may wait. Raises OSError, and
    NodeError (``disk.busy``) if something is mounted on the directory or below it.
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
    """Delete a directory's entries except its subdirectories; return those, by path below ``top``.

    A subdirectory whose path gets too long for the kernel is moved up to ``top``: the program that made the tree may
    not have used full paths.
    """
    folder = os.open(path, _DIRECTORY, dir_fd=top)
    try:
        folders = []
        for name in os.listdir(folder):
            spend(ENTRY_COST)
            entry = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if not stat.S_ISDIR(entry.st_mode):
                os.unlink(name, dir_fd=folder)
            elif entry.st_dev == device:  # else something has just been mounted there
                below = f"{path}/{name}"
                if len(os.fsencode(below)) > LONGEST_PATH:
                    below = f"./{os.urandom(16).hex()}"
                    os.rename(name, below, src_dir_fd=folder, dst_dir_fd=top)
                folders.append(below)
        return folders
    finally:
        os.close(folder)


def set_aside(path: Path, trash: Path, boot: str) -> None:
    """Rename a directory into ``trash``, on the same filesystem, under an unused name.

    The name ends with the id of this boot: nothing is deleted before a later boot has succeeded. Raises OSError, and
    NodeError (``disk.busy``) if something is mounted on the directory or below it.
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
    """Hold a file's lock, which the kernel releases however the process ends. A missing file is created.

    Wait for another holder for at most ``seconds``: one that hangs in the kernel keeps the lock until the machine is
    restarted. Raises OSError; TimeoutError if the time runs out.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with descriptor(path, os.O_RDWR | os.O_CREAT) as fd:
        if not try_lock(fd, seconds):
            message = f"another process has held it for more than {seconds:g} s"
            raise TimeoutError(errno.ETIMEDOUT, message, str(path))
        try:
            yield
        finally:
            # A forked child shares the lock and may outlive this process: just closing the file would leave it held.
            fcntl.flock(fd, fcntl.LOCK_UN)


def try_lock(fd: int, seconds: float) -> bool:
    """Take the lock of an open file, waiting at most ``seconds`` for another holder. Return whether it was taken."""
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
