"""Writes that a power cut can't halve, and the system calls that Python lacks."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_AT_FDCWD = -100
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str, path: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}", path)


def syncfs(path: Path) -> None:
    """Write everything of the filesystem that holds ``path`` to its disk; raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _check(_libc.syncfs(fd), "syncfs", os.fspath(path))
    finally:
        os.close(fd)


def sync_directory(path: Path) -> None:
    """Make what was renamed in a directory durable; raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _renameat2(source: Path, target: Path, flags: int) -> None:
    done = _libc.renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags)
    _check(done, "renameat2", os.fspath(target))


def exchange(one: Path, other: Path) -> None:
    """Exchange two names of one filesystem in one step; raises OSError."""
    _renameat2(one, other, _RENAME_EXCHANGE)


def rename_new(source: Path, target: Path) -> None:
    """Rename; raises FileExistsError where ``target`` is there already."""
    _renameat2(source, target, _RENAME_NOREPLACE)


def write(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace a file: afterwards it holds ``data`` or, after a crash, what it held before. Raises OSError."""
    draft = path.with_name(f".{path.name}.new")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    with os.fdopen(fd, "wb") as file:
        os.fchmod(fd, mode)
        file.write(data)
        file.flush()
        os.fsync(fd)
    draft.replace(path)
    sync_directory(path.parent)


def write_json(path: Path, value: Mapping[str, Any], mode: int = 0o644) -> None:
    """Replace a file by an object as JSON, as ``write`` does."""
    write(path, (json.dumps(value, indent=1) + "\n").encode(), mode)
