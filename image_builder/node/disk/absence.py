"""Members of an array that are missing: whether an earlier boot missed the same ones.

The note is on the OS disk, since the disk that is missing can't hold it. It decides nothing but this: a note that was
lost means that a node keeps its taint for one boot more.
"""

from __future__ import annotations

import json
from pathlib import Path

from image_builder.node import files, reboots
from image_builder.node.disk.model import Survey

PATH = Path("/var/lib/node-agent/disk-incomplete.json")


def members(survey: Survey) -> list[list[str | int]]:
    """Return what identifies the disks that are here."""
    usable = [observation for observation in survey.observations if not observation.disk.system]
    return sorted(
        [
            observation.disk.serial or observation.disk.wwid,
            observation.raid.uuid if observation.raid else "",
            observation.raid.role if observation.raid else -1,
        ]
        for observation in usable
    )


def lasts(survey: Survey, boot_id: str, path: Path = PATH, ordered: Path = reboots.PATH) -> bool:
    """Note what this boot sees; tell whether an earlier one saw the same, and ended by another hand than the node's.

    Raises OSError.
    """
    now = members(survey)
    try:
        before = json.loads(path.read_bytes())
        boot = before["boot_id"] if before["members"] == now else ""
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        boot = ""
    if boot not in ("", boot_id) and not reboots.was_ordered(boot, ordered):
        return True
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    files.write_json(path, {"members": now, "boot_id": boot_id})
    return False


def forget(path: Path = PATH) -> None:
    """Nothing is missing any more. Raises OSError."""
    path.unlink(missing_ok=True)
