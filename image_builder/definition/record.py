"""The name under which a store remembers an image."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path


def record_name(image: str, inventories: Sequence[Path], repo_root: Path) -> str:
    """Return the name of what a store remembers of an image, its lock and its builds: ``worker@lab-1b9d6bcd``.

    Other inventories may have an image of the same name. Those of the project have the same name in every checkout.
    """
    root = repo_root.resolve()
    places = [path.resolve() for path in inventories]
    named = [path.relative_to(root) if path.is_relative_to(root) else path for path in places]
    digest = hashlib.sha256(b"\0".join(os.fsencode(path) for path in named)).hexdigest()
    readable = re.sub(r"[^A-Za-z0-9._-]", "_", places[0].name)[:40]
    return f"{image}@{readable}-{digest[:8]}"
