"""The only progress channel: code that works emits, a renderer shows.

Nothing below the CLI prints.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """Something that a stage does beside others, such as one of many pulls; ``done`` and ``total`` are bytes."""

    name: str
    done: int
    total: int
    action: str


class Monitor:
    """Receives the events of a running build, and shows nothing: a renderer overrides what it shows.

    Every call returns at once; ``stage`` is the stage's name.
    """

    def stages_planned(self, stages: list[tuple[str, str, bool]]) -> None:
        """Announce the stages to come, in order: (name, id, cached)."""

    def stage_started(self, stage: str) -> None: ...

    def stage_doing(self, stage: str, action: str) -> None:
        """Report in a few words what the stage does now (the current task, package or file)."""

    def stage_progress(self, stage: str, done: int, total: int, unit: str) -> None:
        """Report measurable progress; ``unit`` is ``B`` for bytes, else a plural noun."""

    def stage_parts(self, stage: str, parts: Sequence[Part]) -> None:
        """Report how far each part of a stage is; replaces the previous report."""

    def stage_finished(self, stage: str, seconds: float, cached: bool) -> None: ...

    def stage_failed(self, stage: str, seconds: float) -> None: ...

    def note(self, text: str) -> None:
        """Report something that is worth a line of its own."""


@contextmanager
def shown_stage(monitor: Monitor, stage: str) -> Iterator[None]:
    """Show the work of the block as a stage, with the time that it takes and how it ends."""
    started = time.monotonic()
    monitor.stage_started(stage)
    try:
        yield
    except BaseException:
        monitor.stage_failed(stage, time.monotonic() - started)
        raise
    monitor.stage_finished(stage, time.monotonic() - started, cached=False)
