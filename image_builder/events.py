"""The only progress channel: working code emits events, and a renderer shows them.

Nothing below the CLI prints.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One of several things that a stage does at once, such as one of many pulls; ``done`` and ``total`` are bytes."""

    name: str
    done: int
    total: int
    action: str


class Monitor:
    """Receives the events of a running build and shows nothing; a renderer overrides the events that it shows.

    Every call returns immediately; ``stage`` is the stage's name.
    """

    def stages_planned(self, stages: list[tuple[str, str, bool]]) -> None:
        """Announce the stages to come, in order: (name, id, cached)."""

    def stage_started(self, stage: str) -> None: ...

    def stage_doing(self, stage: str, action: str) -> None:
        """Report in a few words what the stage is doing now (the current task, package or file)."""

    def stage_progress(self, stage: str, done: int, total: int, unit: str) -> None:
        """Report measurable progress; ``unit`` is ``B`` for bytes, else a plural noun."""

    def stage_parts(self, stage: str, parts: Sequence[Part]) -> None:
        """Report the progress of each part of a stage, replacing the previous report."""

    def stage_finished(self, stage: str, seconds: float, cached: bool) -> None: ...

    def stage_failed(self, stage: str, seconds: float) -> None: ...

    def note(self, text: str) -> None:
        """Report something that deserves its own line."""


@contextmanager
def shown_stage(monitor: Monitor, stage: str) -> Iterator[None]:
    """Show the work of the block as a stage, with its duration and outcome."""
    started = time.monotonic()
    monitor.stage_started(stage)
    try:
        yield
    except BaseException:
        monitor.stage_failed(stage, time.monotonic() - started)
        raise
    monitor.stage_finished(stage, time.monotonic() - started, cached=False)
