"""Alarms: when a finding counts, and when it is over. Pure decisions, without a clock or I/O.

A finding counts as soon as it is found, or, if it may pass by itself, after ``raise_looks`` looks in a row. It is over
when it has not been found for ``clear_seconds``; each time that it came back within the last hour doubles that, up to
an hour. So a finding that comes and goes every minute is reported a few times an hour, not sixty times. A check that
could not look leaves its findings as they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from image_builder.node.health.model import Finding, Key
from image_builder.node.health.settings import Settings

_HOUR = 3600.0
State = Literal["ok", "degraded", "failed"]


@dataclass(frozen=True)
class Alarm:
    """A finding and its history; times are of the monotonic clock.

    ``looks`` is how many looks in a row have found it, ``last`` the time of the latest; ``raised`` are the times when
    it began to count, within the last hour or still. ``since`` is the Unix time when it began to count, 0 while it
    doesn't.
    """

    check: str
    finding: Finding
    looks: int
    last: float
    raised: tuple[float, ...] = ()
    since: float = 0.0

    @property
    def counts(self) -> bool:
        return self.since > 0


def step(
    alarms: Iterable[Alarm],
    looked: Mapping[str, tuple[Finding, ...]],
    now: float,
    unix: float,
    settings: Settings,
) -> tuple[Alarm, ...]:
    """Return the alarms after a look. ``looked`` has the findings of each check that could look this time."""
    current: dict[Key, tuple[str, Finding]] = {}
    for check, findings in looked.items():
        for finding in findings:
            if weighed := weigh(finding, settings):
                current[finding.key] = (check, weighed)
    before = {alarm.finding.key: alarm for alarm in alarms}
    after: dict[Key, Alarm] = {}
    for key, alarm in before.items():
        if key in current or alarm.check in settings.disabled:
            continue
        if remaining := _absent(alarm, now, settings) if alarm.check in looked else alarm:
            after[key] = remaining
    for key, (check, finding) in current.items():
        after[key] = _present(before.get(key), check, finding, now, unix, settings)
    return tuple(after.values())


def weigh(finding: Finding, settings: Settings) -> Finding | None:
    """Return a finding with the severity that the settings give its code, None if it is to be ignored."""
    match settings.severities.get(finding.code, finding.severity):
        case "ignore":
            return None
        case "warn":
            return replace(finding, severity="warn")
        case _:
            return replace(finding, severity="fail")


def _present(
    alarm: Alarm | None, check: str, finding: Finding, now: float, unix: float, settings: Settings
) -> Alarm:
    previous = alarm or Alarm(check, finding, 0, now)
    looks = previous.looks + 1
    after = replace(previous, finding=finding, looks=looks, last=now)
    if previous.counts or (finding.patient and looks < settings.raise_looks):
        return after
    return replace(after, raised=(*previous.raised, now), since=unix)


def _absent(alarm: Alarm, now: float, settings: Settings) -> Alarm | None:
    """Return what is left of an alarm whose finding is gone, None if nothing is."""
    hold = min(settings.clear_seconds * 2 ** max(0, len(alarm.raised) - 1), _HOUR)
    recent = tuple(when for when in alarm.raised if now - when <= _HOUR)
    if alarm.counts and now - alarm.last < hold:
        return replace(alarm, looks=0)
    return replace(alarm, looks=0, raised=recent, since=0.0) if recent else None


def counting(alarms: Iterable[Alarm]) -> list[Alarm]:
    """Return the alarms that count, the worst first, then by name."""
    active = [alarm for alarm in alarms if alarm.counts]
    return sorted(active, key=lambda alarm: (alarm.finding.severity != "fail", *alarm.finding.key))


def state(alarms: Iterable[Alarm]) -> State:
    """Return the node's state: failed if any alarm that counts is a failure, degraded if there are only warnings."""
    severities = {alarm.finding.severity for alarm in counting(alarms)}
    return "failed" if "fail" in severities else "degraded" if severities else "ok"
