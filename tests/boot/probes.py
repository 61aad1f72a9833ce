"""Steps in a running machine: how its own agent handles half-made disks and a damaged store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.boot.node import Local
from tests.boot.steps import Facts, Place


def plug_copies(place: Place) -> Facts:
    """Plug in a disk for each copy that a power cut left."""
    for path in _crashes(place.folder):
        disk = Local(f"crashes/{path.stem}", 0, f"crash{path.stem}", bus="scsi")
        place.node.vm.plug(disk.extra(place.folder))
    place.node.shell("udevadm settle --timeout 300")
    return {}


def _crashes(folder: Path) -> list[Path]:
    return sorted((folder / "crashes").glob("*.raw"))


def recover(place: Place) -> Facts:
    """Let the agent continue with each copy that a power cut left; compare the result with a fresh seed."""
    serials = [f"crash{path.stem}" for path in _crashes(place.folder)]
    found = place.node.python("recover", *serials, timeout=3600)
    actions = sorted({(one["disk"], one.get("seed", "")) for one in found.values()})
    return {
        "copies": len(found) >= 5,
        "count": len(found),
        "actions": [f"{disk}, {seed}" for disk, seed in actions],
        "failed": {name: one for name, one in found.items() if one.get("different") != []},
    }


def damage_store(place: Place) -> Facts:
    """Damage the preload store at 20 offsets, one at a time, and return the effect of each."""
    found: Mapping[str, str] = place.node.python("verity", "20", timeout=3600)
    return {
        "offsets": len(found),
        "detected": sum(word in ("EIO", "refused") for word in found.values()),
        "undetected": {offset: word for offset, word in found.items() if word not in ("EIO", "refused")},
    }
