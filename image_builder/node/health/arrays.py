"""Arrays of md that lost a member."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from image_builder.node.health.model import Finding, Look, Outcome, Sample
from image_builder.node.health.sysfs import number, text

# Of /sys/block/mdN/md/array_state: what can't be used. RAID0 has no `degraded`, it says `broken`.
_LOST = ("broken", "inactive")


@dataclass(frozen=True)
class Array:
    """An array: ``degraded`` is how many members it lacks, ``state`` the kernel's word."""

    name: str
    state: str
    degraded: int


def check(look: Look) -> Outcome:
    """Look at every array."""
    arrays = read(look.places.sys)
    samples = [Sample("md_degraded_devices", one.degraded, {"device": one.name}) for one in arrays]
    return Outcome(tuple(rule(arrays)), tuple(samples))


def read(sys: Path) -> list[Array]:
    """Return the arrays that the kernel has; one that is being stopped may be gone in between."""
    found = []
    for entry in sorted((sys / "block").glob("md*/md")):
        state = text(entry / "array_state")
        # An array that was stopped leaves its name behind for a moment.
        if state and state != "clear":
            found.append(Array(entry.parent.name, state, number(entry / "degraded")))
    return found


def rule(arrays: Iterable[Array]) -> list[Finding]:
    """Return what is wrong with arrays."""
    found = []
    for one in arrays:
        if one.degraded or one.state in _LOST:
            lacks = f" and lacks {one.degraded} members" if one.degraded else ""
            detail = f"{one.name} is {one.state}{lacks}"
            found.append(Finding("array.degraded", one.name, "fail", detail, action="replace"))
    return found
