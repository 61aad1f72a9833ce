"""Deleting and setting aside whole directories on the local disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from image_builder.node.errors import NodeError


def mounts(path: str = "/proc/self/mountinfo") -> list[tuple[str, str, str]]:
    """Return (mount point, filesystem type, source) of every mount, in order."""
    found = []
    with open(path, encoding="utf-8", errors="surrogateescape") as stream:
        for line in stream:
            head, _, tail = line.partition(" - ")
            kind, source = tail.split(" ")[:2]
            found.append((_unescaped(head.split(" ")[4]), kind, _unescaped(source)))
    return found


def _unescaped(text: str) -> str:
    """Undo mountinfo's octal escapes."""
    for code in ("040", "011", "012", "134"):
        text = text.replace(f"\\{code}", chr(int(code, 8)))
    return text


def mounted_at(where: Path) -> tuple[str, str] | None:
    """Return (filesystem type, source) of what is mounted on a directory, the uppermost; None for nothing."""
    found = [(kind, source) for point, kind, source in mounts() if point == os.fspath(where)]
    return found[-1] if found else None


def remove(path: Path) -> None:
    """Delete a directory and all below it, follow no link; nothing happens where there is none.

    Raises NodeError (``disk.busy``) when something is mounted on it or below it.
    """
    real = os.path.realpath(path)
    if below := [point for point, _, _ in mounts() if point == real or point.startswith(f"{real}/")]:
        raise NodeError("disk.busy", f"{path} is not deleted: {below[0]} is a mount point")
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
