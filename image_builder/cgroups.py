"""The control groups of a bake's containers: below one directory of our own, taken away afterwards.

Namespaces don't clean control groups. Those of a killed bake are empty and are removed by the next one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

PARENT = "/image-builder"
_MOUNT = Path("/sys/fs/cgroup")


def reap(mount: Path = _MOUNT) -> None:
    """Remove the empty control groups below ``PARENT``, in every hierarchy; those in use stay."""
    for top in _hierarchies(mount):
        ours = top / PARENT.lstrip("/")
        if not ours.is_dir():
            continue
        for folder, _, _ in os.walk(ours, topdown=False):
            try:
                os.rmdir(folder)
            except OSError:  # a container of a running bake
                continue


def _hierarchies(mount: Path) -> Iterator[Path]:
    """Yield the one hierarchy of version 2, or each of version 1."""
    if (mount / "cgroup.controllers").exists():
        yield mount
    elif mount.is_dir():
        yield from (path for path in mount.iterdir() if path.is_dir() and not path.is_symlink())
