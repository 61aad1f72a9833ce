"""Deleting and setting aside whole directories on the local disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from image_builder.node import mounts
from image_builder.node.errors import NodeError


def remove(path: Path) -> None:
    """Delete a directory and all below it, follow no link; nothing happens where there is none.

    Raises NodeError (``disk.busy``) when something is mounted on it or below it.
    """
    if found := mounts.below(path):
        raise NodeError("disk.busy", f"{path} is not deleted: {found[0]} is a mount point")
    if os.path.lexists(path):
        shutil.rmtree(path)  # noqa: TID251 (the node's door to deletion; it follows no symbolic link)


def set_aside(path: Path, trash: Path) -> None:
    """Rename a directory into ``trash``, on the same filesystem, under a name that is free there."""
    trash.mkdir(parents=True, exist_ok=True)
    for number in range(10_000):
        target = trash / f"{path.name}.{number}"
        if not os.path.lexists(target):
            path.rename(target)
            return
    raise NodeError("disk.busy", f"{trash} holds too much to set {path} aside")
