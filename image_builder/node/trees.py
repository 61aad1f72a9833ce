"""Deleting and setting aside whole directories on the local disk."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from image_builder.node import mounts
from image_builder.node.errors import NodeError

# What deleting an entry costs of a rate: its metadata are written, not its bytes.
ENTRY_COST = 4096
# The longest path that a directory is opened by, in bytes: one name more is still below the kernel's 4096.
LONGEST_PATH = 3072
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

Spend = Callable[[int], None]


def free(_cost: int) -> None:
    """Spend nothing: work as fast as it goes."""


def remove(path: Path, spend: Spend = free) -> None:
    """Delete a directory of any depth and all below it, follow no link; nothing happens where there is none.

    ``spend`` is told of each entry before it goes, and may wait. Raises OSError, and NodeError (``disk.busy``) when
    something is mounted on it or below it.
    """
    if found := mounts.below(path):
        raise NodeError("disk.busy", f"{path} is not deleted: {found[0]} is a mount point")
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

    One whose path gets too long for the kernel is moved up to ``top``: whoever made the tree needed no path for it.
    """
    folder = os.open(path, _DIRECTORY, dir_fd=top)
    try:
        found = []
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
                found.append(below)
        return found
    finally:
        os.close(folder)


def set_aside(path: Path, trash: Path, boot: str) -> None:
    """Rename a directory into ``trash``, on the same filesystem, under a name that is free there.

    The name ends with the boot in which that happened: nothing is deleted before a later boot has succeeded. Raises
    OSError, and NodeError (``disk.busy``) when something is mounted on it or below it.
    """
    if found := mounts.below(path):
        raise NodeError("disk.busy", f"{path} is not set aside: {found[0]} is a mount point")
    trash.mkdir(parents=True, exist_ok=True)
    for number in range(10_000):
        target = trash / f"{path.name}.{number}.{boot}"
        if not os.path.lexists(target):
            path.rename(target)
            return
    raise NodeError("disk.busy", f"{trash} holds too much to set {path} aside")
