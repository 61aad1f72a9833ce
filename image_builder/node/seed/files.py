"""Small files and links of a data root, made from the store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from image_builder.node.errors import NodeError
from image_builder.node.store import unreadable


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Make an error while the store is read one that can't be taken for the disk's.

    Raises NodeError: ``store.io`` where a retry may succeed, else ``store.damaged``.
    """
    try:
        yield
    except OSError as error:
        raise unreadable(error, "store.damaged", f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise NodeError("store.damaged", f"{path}: {error}") from error


def copy(source: Path, target: Path) -> int:
    """Copy a small file with its mode: to a reader it is there whole or not at all. Returns 1, for counting."""
    with reading(source):
        data, mode = source.read_bytes(), source.stat().st_mode & 0o7777
    draft = target.with_name(f".{target.name}.new")
    write(draft, data, mode)
    draft.replace(target)
    return 1


def write(path: str | Path, data: bytes, mode: int = 0o644) -> None:
    """Write a file whole, with exactly this mode. Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        if mode & 0o077:  # which a umask may have taken away
            os.fchmod(fd, mode)
        done = 0
        while done < len(data):
            done += os.write(fd, data[done:])
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


def directory(path: Path, mode: int) -> None:
    """Make a directory with exactly this mode; one that is there already is left alone."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        return
    path.chmod(mode)
