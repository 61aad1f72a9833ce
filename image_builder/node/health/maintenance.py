"""The platform's plans for this machine: Azure's Scheduled Events, from the metadata service.

https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events. Events are never acknowledged: that would let
them begin. The answer to a machine's very first request can take two minutes; until then the check can't look.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from image_builder.node.decode import decode
from image_builder.node.errors import NodeError
from image_builder.node.health.model import Finding, Look, Outcome, Sample, Severity
from image_builder.node.net import imds
from image_builder.node.net.fetch import Response

_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_TIMEOUT = 5.0
_REST_SECONDS, _MOST_REST = 60.0, 3600.0
# After these the machine continues where it was; all others end or restart it.
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
    name = str(look.memory.get("name", "")) or _name(address)
    response = imds.ask(_EVENTS, address=address, seconds=_TIMEOUT)
    if response.status in (429, 503):
        # Rate limited: the last events still count, and the service is left alone for a while.
        return _resting(look, name, response)
    events = [event for event in parse(response) if name in event.resources]
    findings = rule(events)
    return Outcome(
        tuple(findings), tuple(samples(events)), {"name": name, "events": [asdict(event) for event in events]}
    )


def _name(address: str) -> str:
    """Return this machine's name. Raises NodeError: the events are those of many machines, and could be anybody's."""
    response = imds.ask(_NAME, address=address, seconds=_TIMEOUT)
    name = response.body.decode(errors="replace").strip()
    if response.status != 200 or not name:
        raise NodeError("health.imds", f"the metadata service answered {response.status}, without a name")
    return name


def _resting(look: Look, name: str, response: Response) -> Outcome:
    items = look.memory.get("events", [])
    events = [decode(Event, item) for item in items]
    rest = min(response.retry_after or _REST_SECONDS, _MOST_REST)
    return Outcome(
        tuple(rule(events)), tuple(samples(events)), {"name": name, "events": items}, rest_seconds=rest
    )


def parse(response: Response) -> list[Event]:
    """Return the events of an answer; raises NodeError (``health.imds``) for one that isn't understood."""
    if response.status != 200:
        text = response.body[:200].decode(errors="replace").strip()
        raise NodeError("health.imds", f"the metadata service answered {response.status}: {text}")
    try:
        return [_event(item) for item in json.loads(response.body)["Events"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise NodeError("health.imds", f"the metadata service's answer can't be parsed: {error!r}") from error


def _event(item: Mapping[str, Any]) -> Event:
    return Event(
        id=str(item["EventId"]),
        kind=str(item["EventType"]),
        status=str(item["EventStatus"]),
        not_before=_seconds(str(item.get("NotBefore") or "")),
        resources=tuple(str(name) for name in item["Resources"]),
        description=str(item.get("Description") or ""),
    )


def _seconds(date: str) -> float:
    if not date:
        return 0.0
    import calendar

    return float(calendar.timegm(time.strptime(date, "%a, %d %b %Y %H:%M:%S GMT")))


def rule(events: Iterable[Event]) -> list[Finding]:
    """Return what this machine has to expect; events that are over don't count."""
    findings = []
    for event in events:
        if event.status in ("Completed", "Canceled"):
            continue
        when = (
            time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(event.not_before)) if event.not_before else "now"
        )
        description = f": {event.description}" if event.description else ""
        detail = f"{event.kind} {event.status.lower()}, not before {when}{description}"[:300]
        severity: Severity = "warn" if event.kind in _PAUSES else "fail"
        findings.append(Finding("maintenance.scheduled", event.kind, severity, detail))
    return findings


def samples(events: Iterable[Event]) -> list[Sample]:
    """Return the metrics of events, the earliest of each kind."""
    earliest: dict[str, float] = {}
    for event in events:
        earliest[event.kind] = min(event.not_before, earliest.get(event.kind, event.not_before))
    return [
        Sample("maintenance_not_before_timestamp_seconds", when, {"type": kind})
        for kind, when in earliest.items()
    ]
