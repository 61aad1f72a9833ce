"""The control groups of a bake's containers: below one of the process's own, removed afterwards.

Namespaces don't clean up control groups. Those of a killed bake are empty and are removed by the next one. Those that
a runtime has just created are empty as well, so their process holds a lock, which the kernel releases when it ends.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from image_builder.node import files

_PREFIX = "image-builder-"
_NAME = f"{_PREFIX}{uuid.uuid4().hex[:12]}"
# For this process and those that it forks.
PARENT = f"/{_NAME}"
_MOUNT = Path("/sys/fs/cgroup")
_LOCKS = Path("/run/image-builder-cgroups")


@contextmanager
def held(mount: Path = _MOUNT, locks: Path = _LOCKS) -> Iterator[None]:
    """Keep any process from reaping the groups below ``PARENT``; reap them at the end."""
    locks.mkdir(mode=0o700, exist_ok=True)
    try:
        with _lock(locks / _NAME):
            yield
    finally:
        reap(mount, locks)


def reap(mount: Path = _MOUNT, locks: Path = _LOCKS) -> None:
    """Remove the empty control groups that no process holds, in every hierarchy."""
    tops = list(_hierarchies(mount))
    names = {group.name for top in tops for group in top.glob(f"{_PREFIX}*")}
    names |= set(os.listdir(locks)) if locks.is_dir() else set()
    for name in names:
        with _unheld(locks / name) as dead:
            for group in (top / name for top in tops if dead):
                _remove(group)


def _remove(group: Path) -> None:
    for folder, _, _ in os.walk(group, topdown=False):
        with suppress(OSError):  # its container is still ending
            os.rmdir(folder)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock that others may hold too."""
    while True:
        with path.open("ab") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH)
            if _is(path, stream):
                yield
                return


def _is(path: Path, stream: IO[bytes]) -> bool:
    """Return whether the file wasn't removed between being opened and being locked."""
    try:
        return os.path.samestat(path.stat(), os.fstat(stream.fileno()))
    except FileNotFoundError:
        return False


@contextmanager
def _unheld(path: Path) -> Iterator[bool]:
    """Yield whether a lock is free; if so, hold it during the block, then remove it."""
    try:
        stream = path.open("rb")
    except FileNotFoundError:
        yield True
        return
    with stream:
        if not files.try_lock(stream.fileno(), 0):
            yield False
            return
        yield True
        path.unlink(missing_ok=True)


def _hierarchies(mount: Path) -> Iterator[Path]:
    """Yield the single hierarchy of version 2, or each one of version 1."""
    if (mount / "cgroup.controllers").exists():
        yield mount
    elif mount.is_dir():
        yield from (path for path in mount.iterdir() if path.is_dir() and not path.is_symlink())
