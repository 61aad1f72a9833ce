"""Reboots that the node itself ordered: one that somebody else ordered is a decision about the node."""

from __future__ import annotations

import json
from pathlib import Path

from image_builder.node import files

PATH = Path("/var/lib/node-agent/reboot.json")


def record(boot_id: str, path: Path = PATH) -> None:
    """Note that this boot is ended by the node itself. Raises OSError."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    files.write_json(path, {"boot_id": boot_id})


def was_ordered(boot_id: str, path: Path = PATH) -> bool:
    """Tell whether a boot was ended by the node itself; of a note that can't be read, that it was."""
    try:
        return bool(json.loads(path.read_bytes())["boot_id"] == boot_id)
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError):
        return True
