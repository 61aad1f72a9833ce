"""The waves of a run over time, as coordinates of a drawing: only arithmetic, no markup.

A run may be resumed hours after it was killed. Spans in which it wasn't driven are cut out of the axis, since
otherwise the waves next to them would be too thin to see.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, Literal

from image_builder.pool.run.records import Gated, Opened, Record

WIDTH = 960.0
LABELS = 96.0
ROW = 24.0
TOP = 44.0
_RIGHT = 12.0
_CUT = 24.0
# The control plane is read every 30 s while a run is driven: a journal that is silent for longer had no driver.
_SILENCE = 120.0
_TICKS = 10
_ROUND = (1, 5, 10, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400)

# The least width in pixels; a verdict that stops a run is its last record.
_LEAST: Mapping[str, float] = {"work": 1.0, "hold": 2.0, "stop": 4.0}

Kind = Literal["work", "soak", "late", "go", "hold", "stop"]


@dataclass(frozen=True)
class Bar:
    """A stretch of time: where it is drawn, and what it is in words."""

    kind: Kind
    x: float
    width: float
    label: str


@dataclass(frozen=True)
class Row:
    """A wave. ``y`` is the top of its row."""

    name: str
    y: float
    bars: tuple[Bar, ...]
    note: str


@dataclass(frozen=True)
class Mark:
    """A moment on the axis (``text`` is its time of day), or the middle of a cut (``text`` is why it was cut)."""

    x: float
    text: str


@dataclass(frozen=True)
class Timeline:
    """A drawing of ``WIDTH`` x ``height``. ``gate`` shows the verdicts on the control plane over time."""

    height: float
    rows: tuple[Row, ...]
    gate: tuple[Bar, ...]
    ticks: tuple[Mark, ...]
    cuts: tuple[Mark, ...]


@dataclass(frozen=True)
class Axis:
    """``spans`` are the seconds since 1970 in which the run was driven, in order; ``scale`` is pixels per second."""

    spans: tuple[tuple[float, float], ...]
    scale: float

    def x(self, at: float) -> float:
        """Return where a moment is drawn; one in a cut is drawn at the cut's beginning."""
        x = LABELS
        for number, (start, end) in enumerate(self.spans):
            if number and at >= start:
                x += _CUT
            x += max(0.0, min(at, end) - start) * self.scale
        return round(x, 1)

    def end(self, at: float) -> float:
        """Return until when the run was driven without a break after a moment."""
        return next((end for _, end in self.spans if at <= end), self.spans[-1][1])


def axis(records: Sequence[Record]) -> Axis:
    """Return the axis for all records, of which there must be at least one."""
    spans = [[records[0].at, records[0].at]]
    for record in records[1:]:
        if isinstance(record, Opened) and record.at - spans[-1][1] > _SILENCE:
            spans.append([record.at, record.at])
        # If the clock was set back, no time passes.
        spans[-1][1] = max(spans[-1][1], record.at)
    seconds = sum(end - start for start, end in spans) or 1.0
    room = WIDTH - LABELS - _RIGHT - _CUT * (len(spans) - 1)
    return Axis(tuple((start, end) for start, end in spans), max(room, _CUT) / seconds)


def timeline(report: Mapping[str, Any], soaks: Sequence[float], records: Sequence[Record]) -> Timeline | None:
    """Return the drawing of a run's report, None before its first wave.

    ``soaks`` are the planned seconds between the end of each wave and the next one.
    """
    waves = [wave for wave in report["waves"] if wave["began"] is not None]
    if not waves:
        return None
    on = axis(records)
    last = on.spans[-1][1]
    rows = []
    for number, wave in enumerate(waves):
        following = waves[number + 1]["began"] if number + 1 < len(waves) else last
        y = TOP + ROW * (number + 1)
        rows.append(Row(wave["name"], y, _bars(on, wave, soaks[number], following, last), _note(wave)))
    return Timeline(
        height=TOP + ROW * (len(rows) + 1) + 8,
        rows=tuple(rows),
        gate=_gate(on, records, last),
        ticks=_ticks(on),
        cuts=tuple(
            Mark(on.x(start) - _CUT / 2, f"not driven from {clock(end)} to {clock(start)}")
            for (_, end), (start, _) in pairwise(on.spans)
        ),
    )


def _bars(on: Axis, wave: Mapping[str, Any], soak: float, following: float, last: float) -> tuple[Bar, ...]:
    began, passed = wave["began"], wave["passed"]
    until = last if passed is None else passed
    state = "in work since" if passed is None else "from"
    bars = [_bar(on, "work", began, until, f"{wave['name']}: {state}")]
    if passed is not None and passed < following:
        calm = min(passed + soak, following)
        bars.append(_bar(on, "soak", passed, calm, f"{wave['name']} soaks:"))
        if calm < following:
            bars.append(_bar(on, "late", calm, following, "waits for late hosts, the gate or the cadence:"))
    return tuple(bar for bar in bars if bar.width or bar.kind == "work")


def _bar(on: Axis, kind: Kind, start: float, end: float, label: str) -> Bar:
    x = on.x(start)
    # Bars that readers look for are never too short to see.
    width = max(_LEAST.get(kind, 0.0), round(on.x(end) - x, 1))
    return Bar(kind, x, width, f"{label} {clock(start)} to {clock(end)}")


def _note(wave: Mapping[str, Any]) -> str:
    """Return the text next to a wave: nothing if all is well."""
    parts = []
    if wave["failed"]:
        parts.append(f"{wave['failed']} failed")
    if wave["stragglers"]:
        parts.append(f"{wave['stragglers']} late")
    return ", ".join(parts)


def _gate(on: Axis, records: Sequence[Record], last: float) -> tuple[Bar, ...]:
    """Return the verdicts over time: each from the reading that changed it to the next change or its span's end."""
    bars: list[Bar] = []
    changes: list[Gated | Opened] = []
    for record in records:
        # A process that resumes the run has no verdict until its first reading.
        if isinstance(record, Opened) or (isinstance(record, Gated) and _differs(changes, record)):
            changes.append(record)
    for number, record in enumerate(changes):
        if isinstance(record, Gated):
            end = min(on.end(record.at), changes[number + 1].at if number + 1 < len(changes) else last)
            why = f" ({'; '.join(record.reasons)})" if record.reasons else ""
            bars.append(_bar(on, record.verdict, record.at, end, f"{record.verdict}{why}:"))
    return tuple(bar for bar in bars if bar.width)


def _differs(changes: Sequence[Gated | Opened], record: Gated) -> bool:
    before = changes[-1] if changes else None
    return not isinstance(before, Gated) or before.verdict != record.verdict


def _ticks(on: Axis) -> tuple[Mark, ...]:
    """Return round times of day, at most about ten."""
    seconds = sum(end - start for start, end in on.spans)
    step = next((s for s in _ROUND if seconds / s <= _TICKS), _ROUND[-1])
    marks = []
    for start, end in on.spans:
        at = -(-start // step) * step
        while at <= end:
            marks.append(Mark(on.x(at), clock(at, seconds=step < 60)))
            at += step
    return tuple(marks)


def clock(at: float, *, seconds: bool = True) -> str:
    """Return a moment's time of day in UTC: ``14:03:20``, or ``14:03``."""
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S" if seconds else "%H:%M")
