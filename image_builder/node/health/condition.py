"""What Kubernetes is told of the node, and when: at a change alone, later and later while nobody listens. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from image_builder.node.health.alarms import Alarm

_MESSAGE = 1024
# For the wait after a failed attempt, in seconds: the first, and the longest.
FIRST_WAIT, LONGEST_WAIT = 60.0, 1800.0


@dataclass(frozen=True)
class Condition:
    """``status`` is True or False, in Kubernetes' words; ``reason`` one word for programs."""

    status: str
    reason: str
    message: str


@dataclass(frozen=True)
class Told:
    """What was told last, and since when in vain. ``not_before`` is of the monotonic clock."""

    status: str = ""
    reason: str = ""
    failures: int = 0
    not_before: float = 0.0


def wanted(alarms: Sequence[Alarm], boot_id: str, image: str) -> Condition:
    """Return the condition of a node with these alarms, the worst first. A warning leaves it True."""
    failed = [alarm.finding for alarm in alarms if alarm.finding.severity == "fail"]
    tail = f" (boot {boot_id}{f', image {image}' if image else ''})"
    if not failed:
        return Condition("True", "NodeIsHealthy", f"nothing is wrong{tail}")
    parts = [f"{one.code}: {one.detail}" for one in failed]
    more = f"{len(parts)} findings: " if len(parts) > 1 else ""
    text = f"{more}{'; '.join(parts)}"
    room = _MESSAGE - len(tail.encode())
    if len(text.encode()) > room:
        text = text.encode()[: room - 3].decode(errors="ignore") + "..."
    return Condition("False", reason(failed[0].code), text + tail)


def reason(code: str) -> str:
    """Return a code as Kubernetes writes reasons: ``filesystem.read-only`` is ``FilesystemReadOnly``."""
    return "".join(word.capitalize() for word in code.replace(".", "-").split("-"))


def due(told: Told, now: Condition, clock: float) -> bool:
    """Tell whether there is something to tell, and it is time. The message alone is no change."""
    return (told.status, told.reason) != (now.status, now.reason) and clock >= told.not_before


def heard(now: Condition) -> Told:
    """Return what is remembered after it was told."""
    return Told(now.status, now.reason)


def unheard(told: Told, clock: float, wait: float) -> Told:
    """Return what is remembered after nobody listened: it is tried again after ``wait`` seconds."""
    return replace(told, failures=told.failures + 1, not_before=clock + wait)


def from_json(found: Mapping[str, object]) -> Told:
    """Return what was told from JSON; raises TypeError for what isn't."""
    return Told(**found)  # type: ignore[arg-type]
