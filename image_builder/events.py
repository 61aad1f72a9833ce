"""The only progress channel: code that works emits, a renderer shows.

Nothing below the CLI prints. A renderer is any object with the methods of ``Monitor``; ``NullMonitor`` is
the one for tests and libraries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Part:
    """Something that a stage does beside others, such as one of many pulls; ``done`` and ``total`` are bytes."""

    name: str
    done: int
    total: int
    action: str


class Monitor(Protocol):
    """Receives the events of a running build. Every call returns at once; ``stage`` is the stage's name."""

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


class NullMonitor:
    """Shows nothing."""

    def stages_planned(self, stages: list[tuple[str, str, bool]]) -> None:
        pass

    def stage_started(self, stage: str) -> None:
        pass

    def stage_doing(self, stage: str, action: str) -> None:
        pass

    def stage_progress(self, stage: str, done: int, total: int, unit: str) -> None:
        pass

    def stage_parts(self, stage: str, parts: Sequence[Part]) -> None:
        pass

    def stage_finished(self, stage: str, seconds: float, cached: bool) -> None:
        pass

    def stage_failed(self, stage: str, seconds: float) -> None:
        pass

    def note(self, text: str) -> None:
        pass
