"""The node's condition in Kubernetes: set only when it changes, with growing pauses while that fails. Pure."""

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
class Reported:
    """The condition that Kubernetes has, and the failures to change it. ``not_before`` is of the monotonic clock."""

    status: str = ""
    reason: str = ""
    failures: int = 0
    not_before: float = 0.0


def from_alarms(alarms: Sequence[Alarm], boot_id: str, image: str) -> Condition:
    """Return the condition of a node with these alarms, the worst first. A warning leaves it True."""
    failed = [alarm.finding for alarm in alarms if alarm.finding.severity == "fail"]
    tail = f" (boot {boot_id}{f', image {image}' if image else ''})"
    if not failed:
        return Condition("True", "NodeIsHealthy", f"nothing is wrong{tail}")
    parts = [f"{finding.code}: {finding.detail}" for finding in failed]
    more = f"{len(parts)} findings: " if len(parts) > 1 else ""
    text = f"{more}{'; '.join(parts)}"
    room = _MESSAGE - len(tail.encode())
    if len(text.encode()) > room:
        text = text.encode()[: room - 3].decode(errors="ignore") + "..."
    return Condition("False", reason(failed[0].code), text + tail)


def reason(code: str) -> str:
    """Return a code as Kubernetes writes reasons: ``filesystem.read-only`` is ``FilesystemReadOnly``."""
    return "".join(word.capitalize() for word in code.replace(".", "-").split("-"))


def due(reported: Reported, now: Condition, clock: float) -> bool:
    """Tell whether the condition changed, and it is time. A new message alone is no change."""
    return (reported.status, reported.reason) != (now.status, now.reason) and clock >= reported.not_before


def after_success(now: Condition) -> Reported:
    """Return what is remembered after the condition was set."""
    return Reported(now.status, now.reason)


def after_failure(reported: Reported, clock: float, wait: float) -> Reported:
    """Return what is remembered after that failed: the next attempt is in ``wait`` seconds."""
    return replace(reported, failures=reported.failures + 1, not_before=clock + wait)


def from_json(document: Mapping[str, object]) -> Reported:
    """Return it from JSON; raises TypeError for what isn't."""
    return Reported(**document)  # type: ignore[arg-type]
