"""Delete what the seed set aside in an earlier boot, at the promotion's rate."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

from image_builder.node import files, mounts
from image_builder.node.promote.shared import Bucket, Pacer, take


def empty(trash: Path, rate: int, boot: str) -> list[str]:
    """Delete what boots other than this one set aside, without following links or crossing mounts.

    Return what stays, and why. Volumes are users' data: a tree that contains any stays. ``rate`` is in bytes per
    second, 0 for no limit. Raises OSError.
    """
    remaining = []
    spend = _pacer(rate).spend
    for name in names(trash):
        path = trash / name
        if name.endswith(f".{boot}"):
            remaining.append(f"{path}: set aside in this boot, kept until the next has succeeded")
        elif not stat.S_ISDIR(path.lstat().st_mode):
            path.unlink()
        elif mount_points := mounts.below(path):
            remaining.append(f"{path}: {mount_points[0]} is a mount point")
        elif volumes := _volumes(path):
            remaining.append(f"{path}: holds {len(volumes)} volumes of Docker's, such as {volumes[0]}")
        else:
            files.remove_tree(path, spend)
    return remaining


def names(trash: Path) -> list[str]:
    """Return the names in the trash; none if it doesn't exist. Raises OSError."""
    try:
        return sorted(os.listdir(trash))
    except FileNotFoundError:
        return []


def _volumes(path: Path) -> list[str]:
    """Return the volumes in a data root: the directories there, since Docker's own metadata is a file."""
    try:
        with os.scandir(path / "volumes") as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _pacer(rate: int) -> Pacer:
    bucket = Bucket(0.0, time.monotonic())

    def exchange(cost: int) -> float:
        nonlocal bucket
        if not rate:
            return 0.0
        bucket, seconds = take(bucket, time.monotonic(), rate, cost)
        return seconds

    return Pacer(exchange, time.sleep)
