"""Directory trees on this machine, deleted with care for mounts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from image_builder.errors import StoreError
from image_builder.node import mounts


def remove_tree(path: Path) -> None:
    """Delete a directory tree. Refuses, before it touches anything, when something is mounted in it."""
    if not os.path.lexists(path):
        return
    mounted = mounts.below(path)
    if mounted:
        raise StoreError(
            f"not deleting {path}: {', '.join(mounted)} is mounted there", hint="unmount it first"
        )
    shutil.rmtree(path)
