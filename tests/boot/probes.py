"""Steps in a running machine: how its own agent handles foreign disks, half-made ones, and a damaged store."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.boot import foreign
from tests.boot.node import MIB, Local
from tests.boot.steps import Facts, Place


def plug_foreign(place: Place) -> Facts:
    """Make a disk of each foreign kind, add one for each copy that a power cut left, and plug them all in."""
    folder, disks = place.folder, list[Local]()
    for prefix, kinds in (("kind", foreign.KINDS), ("azure", foreign.AZURE)):
        disks += foreign.make_disks(folder, kinds, prefix).values()
    _, make, size = foreign.PLATFORM
    platform = Local("platform", size, "platform", bus="scsi")
    foreign.make_disk(folder, platform, make)
    two = [Local(f"two{number}", 64 * MIB, f"two{number}", bus="scsi") for number in range(2)]
    crashed = [Local(f"crashes/{p.stem}", 0, f"crash{p.stem}", bus="scsi") for p in _crashes(folder)]
    for disk in (*disks, platform, *two, *crashed):
        place.node.vm.plug(disk.extra(folder))
    place.node.shell("udevadm settle --timeout 300")
    return {"plugged": len(disks) + len(crashed) + 3}


def _crashes(folder: Path) -> list[Path]:
    return sorted((folder / "crashes").glob("*.raw"))


def probe_foreign(place: Place) -> Facts:
    """Run ``node-agent disk`` for each foreign kind with a selector for only that disk; hash it before and after."""
    folder = place.folder
    numbered = {name: Local(f"kind{n:02}", 0) for n, name in enumerate(foreign.KINDS)}
    before = {name: foreign.digest(folder, local) for name, local in numbered.items()}
    told = _probe(place, {name: _selects(local.file) for name, local in numbered.items()})
    words = {name: kind[2] for name, kind in foreign.KINDS.items()}
    after = {name: foreign.digest(folder, local) for name, local in numbered.items()}
    return _judged(told, words, before, after)


def _selects(*serials: str, **more: Any) -> dict[str, Any]:
    return {"policy": "require", "selector": {"kind": "configured", "serials": list(serials)}, **more}


def _probe(place: Place, runs: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = place.node.python("probe", json.dumps(runs), timeout=1800)
    return found


def _judged(
    told: Mapping[str, Any], words: Mapping[str, str], before: Mapping[str, str], after: Mapping[str, str]
) -> Facts:
    named = {
        name: found["exit"] == 0 and found["code"] == "disk.foreign" and words[name] in found["reason"]
        for name, found in told.items()
    }
    tainted = [name for name, found in told.items() if "disk.foreign:NoSchedule" in found["kubelet"]]
    return {
        "kinds": len(told),
        "changed": [name for name in before if before[name] != after[name]],
        "unnamed": [f"{name}: {told[name]['reason']}" for name, is_named in named.items() if not is_named],
        "untainted": sorted(set(told) - set(tainted)),
    }


def probe_platform(place: Place) -> Facts:
    """Probe the platform's disks, found as on Azure: an NTFS with a file is foreign, one with only the readme is blank.

    The link by which Azure's rules name a local disk is made by hand, since QEMU's disks have other names.
    """
    folder = place.folder
    file = Local("azure00", 0)
    before = foreign.digest(folder, file)
    azure = {"policy": "require", "selector": {"kind": "azure"}}
    with_file = _with_link(place, file.file, lambda: _probe(place, {"file": azure})["file"])
    same = foreign.digest(folder, file) == before
    readme = _with_link(place, "platform", lambda: _probe(place, {"readme": azure})["readme"])
    words = next(iter(foreign.AZURE.values()))[2]
    return {
        "with_file": with_file["code"],
        "named": words in with_file["reason"],
        "same": same,
        "readme": readme["code"] or readme["action"],
        "readme_state": readme["state"],
    }


def _with_link(place: Place, serial: str, work: Callable[[], Any]) -> Any:
    place.node.shell(
        "mkdir -p /dev/disk/azure/local/by-index\n"
        f"page=$(grep --text --files-with-matches {serial} /sys/block/sd*/device/vpd_pg80)\n"
        "name=${page#/sys/block/}\n"
        'ln -sfn "/dev/${name%%/*}" /dev/disk/azure/local/by-index/0'
    )
    try:
        return work()
    finally:
        place.node.shell("rm -r /dev/disk/azure/local")


def probe_ambiguous(place: Place) -> Facts:
    """Probe selectors that match two disks where one is expected, the system's disk, and no disk."""
    disks = [Local(f"two{number}", 0) for number in range(2)]
    before = [foreign.digest(place.folder, disk) for disk in disks]
    told = _probe(
        place,
        {"two": _selects("two*", expected_disks=1), "system": _selects("os"), "none": _selects("nothing")},
    )
    return {
        **{name: found["code"] for name, found in told.items()},
        "names_both": all(disk.file in told["two"]["reason"] for disk in disks),
        "same": before == [foreign.digest(place.folder, disk) for disk in disks],
    }


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
