"""Delete what the seed set aside, at the pace of promotion."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

from image_builder.node import mounts
from image_builder.node.promote import pace

# What deleting an entry costs of the rate: its metadata are written, not its bytes.
_COST = 4096
# The longest path that a directory is opened by, in bytes: one name more is still below the kernel's 4096.
_LONGEST = 3072
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def empty(trash: Path, rate: int) -> list[str]:
    """Delete everything in ``trash``, follow no link, cross no mount; return what had to stay, and why.

    ``rate`` is in bytes per second, 0 for as fast as it goes. Raises OSError.
    """
    try:
        names = os.listdir(trash)
    except FileNotFoundError:
        return []
    left = []
    spend = _pacer(rate).spend
    for name in names:
        path = trash / name
        if not stat.S_ISDIR(path.lstat().st_mode):
            path.unlink()
        elif found := mounts.below(path):
            left.append(f"{path}: {found[0]} is a mount point")
        else:
            _remove(path, spend)
    return left


def _pacer(rate: int) -> pace.Pacer:
    bucket = pace.Bucket(0.0, time.monotonic())

    def exchange(cost: int) -> float:
        nonlocal bucket
        if not rate:
            return 0.0
        bucket, seconds = pace.take(bucket, time.monotonic(), rate, cost)
        return seconds

    return pace.Pacer(exchange, time.sleep)


def _remove(top: Path, spend: Callable[[int], None]) -> None:
    """Delete a tree, of any depth."""
    root = os.open(top, _DIRECTORY)
    try:
        device = os.fstat(root).st_dev
        folders, waiting = ["."], ["."]
        while waiting:
            path = waiting.pop()
            below = _empty_directory(root, path, device, spend)
            folders += below
            waiting += below
        for path in reversed(folders[1:]):
            os.rmdir(path, dir_fd=root)
    finally:
        os.close(root)
    top.rmdir()


def _empty_directory(root: int, path: str, device: int, spend: Callable[[int], None]) -> list[str]:
    """Delete a directory's entries but for its directories; return those, by path below ``root``.

    One whose path gets too long for the kernel is moved up to ``root``: whoever made the tree needed no path for it.
    """
    folder = os.open(path, _DIRECTORY, dir_fd=root)
    try:
        found = []
        for name in os.listdir(folder):
            spend(_COST)
            entry = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if not stat.S_ISDIR(entry.st_mode):
                os.unlink(name, dir_fd=folder)
            elif entry.st_dev == device:
                below = f"{path}/{name}"
                if len(os.fsencode(below)) > _LONGEST:
                    below = f"./{os.urandom(16).hex()}"
                    os.rename(name, below, src_dir_fd=folder, dst_dir_fd=root)
                found.append(below)
        return found
    finally:
        os.close(folder)
