"""``node-agent disk``: decide, do it, and tell what happened."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from image_builder.node import lock, status
from image_builder.node import settings as files
from image_builder.node.disk import apply, find, probe
from image_builder.node.disk.decide import decide
from image_builder.node.disk.model import Decision, Disk, Places
from image_builder.node.disk.settings import Settings, parse
from image_builder.node.errors import NodeError


def run(
    *,
    places: Places = Places(),  # noqa: B008 (frozen)
    directory: Path = files.DIRECTORY,
    release: Path = files.RELEASE,
    disks: Callable[[], Sequence[Disk]] | None = None,
) -> int:
    """Make the local disk ready; return the exit status.

    0 where a decision was made and carried out, also the one that nothing is touched; 1 where a program or the
    system failed on the way. ``disks`` gives the candidates instead of the selector.
    """
    began = time.monotonic()
    value: dict[str, Any]
    try:
        # Without them a node that fails later would lose the taints that it was given.
        files.kubelet_taints(directory)
        settings = parse(files.load("disk", directory))
        build = files.build_id(release)
        # Another agent may be at it, and take as long as a filesystem takes to be made.
        with lock.held(places.run / "disk.lock"):
            found = disks() if disks else find.wait(settings, places)
            decision = _settle(settings, build, found, places)
        value = section(settings, decision)
    except (NodeError, OSError) as error:
        value = _failed(error)
    value["seconds"] = round(time.monotonic() - began, 3)
    status.update("disk", value, directory=places.run, settings=directory)
    status.tell(f"disk: {sentence(value)}")
    # The settings' own decision has an action; a failure has none.
    return 0 if "action" in value else 1


def _settle(settings: Settings, build: str, disks: Sequence[Disk], places: Places) -> Decision:
    seen = probe.observe_all(disks, settings, places)
    decision = decide(settings, build, seen)
    if decision.action != "none":
        apply.carry_out(decision, seen, settings, build, places)
    apply.furnish(settings, on_disk=decision.action != "none")
    return decision


def section(settings: Settings, decision: Decision) -> dict[str, Any]:
    """Return the status of a decision that was carried out."""
    missing = status.FAILED if settings.policy == "require" else status.DEGRADED
    return {
        "state": missing if decision.code else status.OK,
        "code": decision.code,
        "reason": decision.reason,
        "action": decision.action,
        "mount_point": settings.mount_point,
        "members": [disk.member.as_json() for disk in decision.disks],
        "filesystem": settings.filesystem if decision.disks else "",
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
