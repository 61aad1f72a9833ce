"""What the platform has in store for this machine: Azure's Scheduled Events, from the metadata service.

https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events. Nothing is ever acknowledged: that would
let the event begin. The first question of a machine's life can take two minutes to be answered; until then it is
one that could not be answered.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from image_builder.node import imds
from image_builder.node.asking import Said
from image_builder.node.errors import NodeError
from image_builder.node.health.model import Finding, Look, Outcome, Sample, Severity

_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_TIMEOUT = 5.0
_REST_SECONDS, _MOST_REST = 60.0, 3600.0
# The machine goes on where it was; all others end or restart it.
_PAUSES = ("Freeze",)


@dataclass(frozen=True)
class Event:
    """One event. ``kind``: Freeze, Reboot, Redeploy, Preempt, Terminate. ``not_before``: Unix time, 0 once begun."""

    id: str
    kind: str
    status: str
    not_before: float
    resources: tuple[str, ...]
    description: str = ""


def check(look: Look) -> Outcome:
    """Ask for events. Raises NodeError (``health.imds``), OSError."""
    address = look.settings.imds
    if not address:
        return Outcome()
    name = str(look.memory.get("name", ""))
    if not name:
        said = imds.ask(_NAME, address=address, seconds=_TIMEOUT)
        name = said.body.decode(errors="replace").strip() if said.status == 200 else ""
    said = imds.ask(_EVENTS, address=address, seconds=_TIMEOUT)
    if said.status in (429, 503):
        # Asked too often: what was found last still counts, and it is left alone for a while.
        return _resting(look, name, said)
    events = parse(said)
    mine = [one for one in events if not name or name in one.resources]
    found = rule(mine)
    return Outcome(tuple(found), tuple(samples(mine)), {"name": name, "events": [_as_json(e) for e in mine]})


def _resting(look: Look, name: str, said: Said) -> Outcome:
    known = look.memory.get("events", [])
    events = [Event(**{**one, "resources": tuple(one["resources"])}) for one in known]
    rest = min(said.retry_after or _REST_SECONDS, _MOST_REST)
    return Outcome(
        tuple(rule(events)), tuple(samples(events)), {"name": name, "events": known}, rest_seconds=rest
    )


def _as_json(event: Event) -> dict[str, Any]:
    return {**vars(event), "resources": list(event.resources)}


def parse(said: Said) -> list[Event]:
    """Return the events of an answer; raises NodeError (``health.imds``) for one that isn't understood."""
    if said.status != 200:
        text = said.body[:200].decode(errors="replace").strip()
        raise NodeError("health.imds", f"the metadata service answered {said.status}: {text}")
    try:
        return [_event(one) for one in json.loads(said.body)["Events"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise NodeError(
            "health.imds", f"the metadata service's answer is not understood: {error!r}"
        ) from error


def _event(found: Mapping[str, Any]) -> Event:
    return Event(
        id=str(found["EventId"]),
        kind=str(found["EventType"]),
        status=str(found["EventStatus"]),
        not_before=_seconds(str(found.get("NotBefore") or "")),
        resources=tuple(str(name) for name in found["Resources"]),
        description=str(found.get("Description") or ""),
    )


def _seconds(date: str) -> float:
    if not date:
        return 0.0
    import calendar

    return float(calendar.timegm(time.strptime(date, "%a, %d %b %Y %H:%M:%S GMT")))


def rule(events: Iterable[Event]) -> list[Finding]:
    """Return what this machine has to expect; an event that is over is none."""
    found = []
    for one in events:
        if one.status in ("Completed", "Canceled"):
            continue
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(one.not_before)) if one.not_before else "now"
        words = f": {one.description}" if one.description else ""
        detail = f"{one.kind} {one.status.lower()}, not before {when}{words}"[:300]
        severity: Severity = "warn" if one.kind in _PAUSES else "fail"
        found.append(Finding("maintenance.scheduled", one.kind, severity, detail))
    return found


def samples(events: Iterable[Event]) -> list[Sample]:
    """Return the metrics of events, the earliest of each kind."""
    earliest: dict[str, float] = {}
    for one in events:
        earliest[one.kind] = min(one.not_before, earliest.get(one.kind, one.not_before))
    return [
        Sample("maintenance_not_before_timestamp_seconds", when, {"type": kind})
        for kind, when in earliest.items()
    ]
