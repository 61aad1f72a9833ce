"""``node-agent disk``: decide, act, and report."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from image_builder.node import files, status
from image_builder.node import settings as settings_files
from image_builder.node.disk import apply, arrays, find, probe
from image_builder.node.disk.decide import decide
from image_builder.node.disk.model import Decision, Disk, Places
from image_builder.node.disk.settings import Settings, parse
from image_builder.node.errors import NodeError


def run(
    *,
    places: Places = Places(),  # noqa: B008 (frozen)
    disks: Callable[[], Sequence[Disk]] | None = None,
) -> int:
    """Prepare the local disk; return the exit status.

    0 if a decision was made and carried out, even a decision to touch nothing; 1 if a program or the system failed on
    the way, so that the unit tries again. ``disks`` returns the candidates in place of the selector.
    """
    began = time.monotonic()
    value: dict[str, Any]
    try:
        # Fail now if these can't be read: a node that failed later would register without its configured taints.
        settings_files.kubelet_taints(places.etc)
        settings = parse(settings_files.load("disk", places.etc))
        look = disks or (lambda: find.candidates(settings.selector, places))
        of_size = find.disks_of_size(places.etc, places.cloud) if settings.selector.kind == "azure" else 0
        # Another agent may be at work, for as long as it takes to make a filesystem.
        with files.lock(places.run / "disk.lock"):
            waited = find.wait(settings, places, look, of_size)
            value = _settle(settings, waited, look, places, of_size)
    except (NodeError, OSError) as error:
        value = _failed(error)
    value["seconds"] = round(time.monotonic() - began, 3)
    status.update("disk", value, places)
    status.tell(f"disk: {sentence(value)}")
    # A decision has an action; a failure has none.
    return 0 if "action" in value else 1


def _settle(
    settings: Settings,
    disks: Sequence[Disk],
    look: Callable[[], Sequence[Disk]],
    places: Places,
    of_size: int = 0,
) -> dict[str, Any]:
    """Decide, carry the decision out, and return the status."""
    survey = probe.observe_all(disks, settings, places)
    build = settings_files.build_id(places.release)
    decision = decide(settings, build, survey, of_size)
    # Disks that this size has by the table hold nothing yet, and the table may be wrong: any second boot gives them up.
    is_late = decision.row == "missing" and not settings.expected_disks
    if is_late or decision.row == "incomplete":
        reboot = None if is_late else places.reboot
        if arrays.is_absence_old(survey, status.boot_id(places.boot_id), places.absence, reboot):
            decision = decide(replace(settings, incomplete_array="rebuild"), build, survey)
    elif decision.action != "none":
        places.absence.unlink(missing_ok=True)
    hidden = 0
    if decision.action != "none":
        if not (decision.volume and decision.volume.mounted):
            hidden = apply.hidden_bytes(Path(settings.mount_point))
        apply.carry_out(decision, survey, settings, build, places, look)
    apply.furnish(settings, on_disk=decision.action != "none")
    return section(settings, decision, hidden)


def section(settings: Settings, decision: Decision, hidden: int = 0) -> dict[str, Any]:
    """Return the status of a decision that was carried out. ``hidden``: bytes that the mount hides on the OS disk."""
    state = status.OK
    if decision.action == "none":
        state = status.FAILED if settings.policy == "require" else status.DEGRADED
    elif decision.code:
        state = status.DEGRADED
    beneath = (
        f"; a boot without the disk left {hidden} bytes on the OS disk, which it hides" if hidden else ""
    )
    return {
        "state": state,
        "code": decision.code,
        "reason": decision.reason + beneath,
        "action": decision.action,
        "mount_point": settings.mount_point,
        "members": [asdict(disk.member) for disk in decision.disks],
        "filesystem": settings.filesystem if decision.disks else "",
        "hidden_bytes": hidden,
    }


def _failed(error: NodeError | OSError) -> dict[str, Any]:
    if isinstance(error, NodeError):
        return {"state": status.FAILED, "code": error.code, "reason": error.message}
    return {"state": status.FAILED, "code": "disk.failed", "reason": str(error)}


def sentence(value: dict[str, Any]) -> str:
    """Return one line for people."""
    code = f" {value['code']}" if value["code"] else ""
    did = f" {value['action']}:" if value.get("action", "none") != "none" else ""
    return f"{value['state']}{code}:{did} {value['reason']} ({value['seconds']:g} s)"
