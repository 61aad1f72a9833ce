"""Who uses a data root: then nothing in it is made, changed or moved."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from image_builder.node import mounts

# Databases that an engine keeps locked (flock, by bbolt) from its start to its end, below its data root. That says
# more than an answer on its socket, which systemd may hold, and which does not name a data root.
_LOCKED: Mapping[str, Sequence[str]] = {
    "docker": ("volumes/metadata.db", "network/files/local-kv.db"),
    "containerd": ("io.containerd.metadata.v1.bolt/meta.db",),
}


def user(engine: str, data_root: Path) -> str:
    """Return who uses a data root, as the end of a sentence; empty where nobody does. Raises OSError."""
    if any(_is_locked(data_root / name) for name in _LOCKED[engine]):
        return f"{engine} runs on it"
    real = os.path.realpath(data_root)
    below = [target for target in mounts.below(data_root) if target != real]
    return f"{below[0]} is mounted below it" if below else ""


def _is_locked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
