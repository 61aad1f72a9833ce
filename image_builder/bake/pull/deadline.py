"""The judge of stalled and slow pulls, without a clock and without I/O.

Three things are measured, each on a clock of its own that stops at times:

* Progress and the total time count the seconds in which the image could move: while nothing is known about its
  layers, while a layer is downloading, downloaded, extracting or retrying, and once all layers are done.
  They stop while everything unfinished is ``waiting`` (queued in the runtime behind other images).
* The rate counts the seconds in which a layer is downloading and has bytes left to download.

Progress means one byte more than the same layer had in the same phase, or a later phase. A number that fell
means that the layer started over, so what it has by then was downloaded again. Retries, repeated numbers and a layer
leaving the queue aren't progress. Reaching a limit is allowed; the first to be exceeded is the verdict.

A download that received nothing in the last ``rate_seconds`` isn't slow: only ``progress_seconds`` applies to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Literal

from image_builder.bake.pull.model import Event, Limits, Phase, Verdict

_RANK: Mapping[Phase, int] = {"waiting": 0, "downloading": 1, "downloaded": 2, "extracting": 3, "done": 4}

_Kind = Literal["stalled", "too slow", "too long"]

# The history of bytes is thinned when it has this many points. Thinned, it has about 1 + ln(seconds / 64) times
# _FINENESS of them: 400 for four hours of downloading, less than 1000 for a year.
_MOST_POINTS = 1024
_FINENESS = 64


@dataclass(frozen=True)
class Layer:
    """The remembered state of one layer.

    ``phase`` and ``text`` are those last reported. ``reached`` is the last phase other than waiting and retrying
    (``waiting`` if there was none), ``current`` and ``total`` are its bytes. ``moved`` is the reading of
    ``State.counted`` when the layer last made progress, -1 if it never did.
    """

    phase: Phase = "waiting"
    reached: Phase = "waiting"
    current: int = 0
    total: int | None = None
    text: str = ""
    moved: float = -1.0

    @property
    def queued(self) -> bool:
        return self.phase == "waiting"

    @property
    def finished(self) -> bool:
        return self.phase == "done"

    @property
    def downloading(self) -> bool:
        """Return whether bytes are missing: a runtime that checks or writes what it has isn't slow to download."""
        return self.phase == "downloading" and (self.total is None or self.current < self.total)


@dataclass(frozen=True)
class State:
    """The remembered state of a pull; its size depends on the number of layers, not on that of events.

    ``at`` is the time of the last event, on the events' clock. ``counted`` is the number of seconds until then in which
    the image could move, ``progress`` the reading of ``counted`` at the last progress. ``downloading`` is the number of
    seconds in which a layer was downloading, ``received`` the bytes downloaded; ``points`` are pairs of the two when
    bytes arrived, in order. ``layers`` maps ids to layers, including the image as a whole, with an empty id, once
    something was reported about it.
    """

    at: float
    counted: float = 0.0
    progress: float = 0.0
    downloading: float = 0.0
    received: int = 0
    points: tuple[tuple[float, int], ...] = ((0.0, 0),)
    layers: Mapping[str, Layer] = field(default_factory=lambda: MappingProxyType({}))


def begin(at: float) -> State:
    """Return the state of a pull requested at ``at`` (seconds of the events' monotonic clock)."""
    return State(at)


def observe(state: State, event: Event) -> State:
    """Return the state after an event. One that is older than the last counts as if it came at the same time."""
    state = _at(state, event.at)
    before = state.layers.get(event.layer, Layer())
    layer, moved, received = _step(before, event)
    if moved:
        layer = replace(layer, moved=state.counted)
    total = state.received + received
    return replace(
        state,
        progress=state.counted if moved else state.progress,
        received=total,
        points=_added(state.points, (state.downloading, total)) if received else state.points,
        layers=MappingProxyType({**state.layers, event.layer: layer}),
    )


def judge(state: State, now: float, limits: Limits) -> Verdict | None:
    """Return what is wrong with a pull at ``now``, or None if nothing is.

    A limit is exceeded only by more than its seconds, not by exactly as many. Of several limits, the first exceeded
    counts, so that the verdict doesn't depend on how often it is requested. ``overall_seconds`` doesn't count time in
    which the whole image is queued, either.
    """
    state = _at(state, now)
    idle = state.counted - state.progress
    # By how many seconds each limit is exceeded; on a tie, the first is taken.
    over: dict[_Kind, float] = {
        "stalled": idle - limits.progress_seconds,
        "too slow": _slow_over(state, limits),
        "too long": state.counted - limits.overall_seconds,
    }
    kind = max(over, key=lambda kind: over[kind])
    if over[kind] <= 0:
        return None
    if kind == "too slow":
        layer = _suspect(state, [name for name, layer in state.layers.items() if layer.downloading])
        last = f"{_last(state, layer)} at {_bytes(_recent(state, limits) / limits.rate_seconds)}/s"
        return Verdict(kind, layer, last, over[kind] + limits.rate_seconds)
    layer = _suspect(state, _unfinished(state))
    return Verdict(kind, layer, _last(state, layer), idle if kind == "stalled" else state.counted)


def _at(state: State, now: float) -> State:
    """Return the state with its clocks at ``now``, or at the last event if ``now`` is earlier."""
    seconds = max(0.0, now - state.at)
    return replace(
        state,
        at=max(state.at, now),
        counted=state.counted + (seconds if _could_move(state) else 0.0),
        downloading=state.downloading + (seconds if _downloading(state) else 0.0),
    )


def _could_move(state: State) -> bool:
    """Return whether nothing is known about the layers, all are done, or something is neither queued nor done."""
    queued = any(layer.queued for name, layer in state.layers.items() if name)
    return not queued or any(not layer.queued and not layer.finished for layer in state.layers.values())


def _downloading(state: State) -> bool:
    return any(layer.downloading for layer in state.layers.values())


def _step(before: Layer, event: Event) -> tuple[Layer, bool, int]:
    """Return a layer after an event, whether it made progress, and how many bytes were downloaded."""
    if event.phase in ("waiting", "retrying"):
        # Keep what it had: a download that resumes where it broke off doesn't make progress by reporting it.
        return replace(before, phase=event.phase, text=event.text), False, 0
    same = event.phase == before.reached
    fresh = event.current - before.current if same and event.current >= before.current else event.current
    onward = _RANK[event.phase] > max(_RANK[before.reached], _RANK["downloading"])
    received = 0
    if event.phase == "downloading":
        received = fresh
    elif onward and before.reached == "downloading" and before.total is not None:
        received = max(0, before.total - before.current)  # the rest arrived, though no event reported it
    total = before.total if same and event.total is None else event.total
    after = Layer(event.phase, event.phase, event.current, total, event.text, before.moved)
    return after, fresh > 0 or onward, received


def _added(points: tuple[tuple[float, int], ...], new: tuple[float, int]) -> tuple[tuple[float, int], ...]:
    """Return the history with one more point, thinned out if it is long.

    A dropped point leaves its bytes to the next one kept, as if they had arrived later, which never makes a download
    look slower than it was.
    """
    if points[-1][0] == new[0]:
        return (*points[:-1], new)
    if len(points) < _MOST_POINTS:
        return (*points, new)
    thinned = [points[0]]
    for point, following in pairwise(points[1:]):
        # The older, the sparser: gaps grow with age, so that any window has about the same relative accuracy.
        if following[0] - thinned[-1][0] > max(1.0, (new[0] - thinned[-1][0]) / _FINENESS):
            thinned.append(point)
    return (*thinned, points[-1], new)


def _slow_over(state: State, limits: Limits) -> float:
    """Return for how many seconds of downloading the mean rate has been too low; 0 or less if it isn't."""
    least = limits.min_rate * limits.rate_seconds
    # If nothing arrived at all, it isn't slow but stalled, which is for progress_seconds to judge.
    if least <= 0 or not _downloading(state) or not _recent(state, limits):
        return -math.inf
    # The window has held too few bytes since those up to here left it or, if there are too few in all, since it was
    # full.
    poor_since = next(
        (clock for clock, so_far in state.points if so_far > state.received - least), state.downloading
    )
    return state.downloading - poor_since - limits.rate_seconds


def _recent(state: State, limits: Limits) -> int:
    """Return the bytes downloaded in the last ``rate_seconds`` of downloading."""
    since = state.downloading - limits.rate_seconds
    return state.received - max((so_far for clock, so_far in state.points if clock < since), default=0)


def _unfinished(state: State) -> list[str]:
    """Return the ids of the layers that should be moving or, if there are none, of those that wait for others."""
    unfinished = [name for name, layer in state.layers.items() if name and not layer.finished]
    running = [name for name in unfinished if not state.layers[name].queued]
    # A downloaded layer may wait for the one below it, which may be the one that doesn't arrive.
    coming = [name for name in running if state.layers[name].phase != "downloaded"]
    return coming or running or unfinished


def _suspect(state: State, names: Iterable[str]) -> str:
    """Return which of these layers last made progress, or the whole image if there are none."""
    return max(names, key=lambda name: state.layers[name].moved, default="")


def _last(state: State, name: str) -> str:
    """Return, in words, the last known state of a layer or of the whole image."""
    count = len(state.layers) - ("" in state.layers)
    if not name and count:
        return f"all {count} layers are done" if count > 1 else "its only layer is done"
    if name not in state.layers:
        return "nothing was reported yet"
    layer = state.layers[name]
    if not name and layer.reached == "waiting":
        return layer.text or "nothing was reported yet"
    size = f" of {_bytes(layer.total)}" if layer.total is not None else ""
    done = f"{_bytes(layer.current)}{size}" if layer.current or size else ""
    between = " after " if layer.phase != layer.reached else ", "
    return f"{layer.phase}{between}{done}" if done else layer.phase


def _bytes(count: float) -> str:
    """Return a number of bytes in decimal units with three digits: ``1.23 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
