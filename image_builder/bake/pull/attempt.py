"""One attempt at one pull: its events so far, and the way to end it from outside."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from image_builder.bake.pull import deadline
from image_builder.bake.pull.model import Event, Limits, Verdict
from image_builder.errors import PullError


@dataclass
class LayerRecord:
    """A layer's way through its phases: when each was first and last seen, in seconds, and the layer's bytes."""

    phases: dict[str, list[float]]
    bytes: int = 0


class Attempt:
    """An attempt, fed by the thread that pulls and judged by the one that watches."""

    def __init__(self, started: float) -> None:
        self.started = started
        self.layers: dict[str, LayerRecord] = {}
        self.last: dict[str, Event] = {}
        self._lock = threading.Lock()
        self._state = deadline.begin(started)
        self._end: Callable[[], None] | None = None
        self._why: str | None = None

    def observe(self, event: Event) -> None:
        """Process an event of the runtime."""
        with self._lock:
            self._state = deadline.observe(self._state, event)
            self.last[event.layer] = event
            if event.layer:
                record = self.layers.setdefault(event.layer, LayerRecord({}))
                times = record.phases.setdefault(event.phase, [event.at, event.at])
                times[1] = event.at
                if event.phase == "downloading":
                    record.bytes = max(record.bytes, event.current)
        self.check()

    def queued(self, *, behind_others: bool) -> None:
        """Note whether this runtime downloads anything: if not, queued layers wait only for the registry."""
        if behind_others:
            event = Event(now(), "", "waiting")
        else:
            event = Event(now(), "", "retrying", text="requested, nothing received yet")
        with self._lock:
            self._state = deadline.observe(self._state, event)

    @property
    def downloads(self) -> bool:
        """Return whether one of its layers is downloading."""
        with self._lock:
            return any(event.phase == "downloading" for event in self.last.values())

    def judge(self, now: float, limits: Limits) -> Verdict | None:
        """Return why the attempt must end now, or None while all is well."""
        with self._lock:
            return deadline.judge(self._state, now, limits)

    def ended_by(self, end: Callable[[], None]) -> None:
        """Set the function that ends this attempt from another thread."""
        with self._lock:
            self._end = end
            gone = self._why is not None
        if gone:
            _quietly(end)

    def give_up(self, why: str) -> None:
        """End the attempt, from any thread; the pulling thread then raises PullError."""
        with self._lock:
            if self._why is not None:
                return
            self._why = why
            end = self._end
        if end:
            _quietly(end)

    def check(self) -> None:
        """Raise PullError if the attempt was ended."""
        if self._why is not None:
            raise PullError(self._why)

    @property
    def given_up(self) -> str | None:
        """Return why it was ended from outside, if it was."""
        return self._why

    def latest(self) -> dict[str, Event]:
        """Return the last event of each layer."""
        with self._lock:
            return dict(self.last)


def _quietly(end: Callable[[], None]) -> None:
    # The pull may have just ended by itself.
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        end()


def now() -> float:
    """Return the time on the clock that all pulls use."""
    return time.monotonic()
