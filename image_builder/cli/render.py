"""Progress for people: on a terminal a live tree of stages, elsewhere plain lines with the time.

All progress goes to standard error; results go to standard output, printed by the commands.
``NO_COLOR`` is left to rich; a dumb terminal and ``CI`` turn redrawing off.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from image_builder.events import Monitor, Part
from image_builder.text import human_bytes, human_seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

State = Literal["waiting", "cached", "running", "done", "failed"]
# A plain log gets a line for a change of task at most this often, and for progress less often.
_TASK_SECONDS = 1.0
_PROGRESS_SECONDS = 15.0
_PART_SECONDS = 5.0
_BAR_WIDTH = 20
_REDRAWS_PER_SECOND = 8
# Wide enough for `container_runtime`.
_NAME_WIDTH = 17
_TIME_WIDTH = 8
_MARKS: Mapping[State, tuple[str, str]] = {
    "waiting": ("·", "dim"),
    "cached": ("=", "dim"),
    "running": ("▶", "cyan"),
    "done": ("✓", "green"),
    "failed": ("✗", "red"),
}


def progress_text(done: int, total: int, unit: str, seconds: float) -> str:
    """Return how far along something is, and how fast: ``120 MB of 800 MB, 12 MB/s``."""
    if unit == "B":
        rate = f", {human_bytes(done / seconds)}/s" if seconds > 1 and done else ""
        return f"{human_bytes(done)} of {human_bytes(total)}{rate}"
    return f"{done} of {total} {unit}"


def part_text(part: Part, rate: float) -> str:
    """Return how far along a part is: ``120 MB of 800 MB, 12 MB/s, 3/5 layers, extracting 4f2a…``."""
    speed = f", {human_bytes(rate)}/s" if rate >= 1 else ""
    return f"{human_bytes(part.done)} of {human_bytes(part.total)}{speed}, {part.action}"


def bar(part: Part) -> str:
    """Return a part's name and a bar of fixed width."""
    filled = _BAR_WIDTH * part.done // part.total if part.total else _BAR_WIDTH
    return f"{part.name.rpartition('/')[2][:24]:24} {'━' * filled}{'─' * (_BAR_WIDTH - filled)}"


class _Rates:
    """How fast each part of a stage moves, over the last few seconds."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], list[tuple[float, int]]] = {}

    def rate(self, stage: str, part: Part, now: float) -> float:
        seen = self._seen.setdefault((stage, part.name), [])
        seen.append((now, part.done))
        while len(seen) > 2 and now - seen[1][0] >= _PART_SECONDS:
            seen.pop(0)
        (then, before), (_, done) = seen[0], seen[-1]
        return max(0.0, (done - before) / (now - then)) if now > then else 0.0


@dataclass
class _Row:
    """What is known about one stage."""

    name: str
    state: State = "waiting"
    doing: str = ""
    started: float = 0.0
    seconds: float = 0.0
    progress_since: float | None = None
    parts: Sequence[tuple[Part, float]] = ()


class PlainMonitor(Monitor):
    """Writes one line, with the time of day, for each event that is worth one."""

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._write = write
        self._clock = clock
        self._last: dict[str, float] = {}
        self._since: dict[str, float] = {}
        self._rates = _Rates()
        self._whats: dict[tuple[str, str], str] = {}

    def _line(self, stage: str, text: str) -> None:
        self._write(f"{time.strftime('%H:%M:%S')} {stage:{_NAME_WIDTH}} {text}".rstrip())

    def _is_due(self, key: str, seconds: float) -> bool:
        now = self._clock()
        if now - self._last.get(key, -seconds) < seconds:
            return False
        self._last[key] = now
        return True

    def stages_planned(self, stages: list[tuple[str, str, bool]]) -> None:
        cached = [name for name, _, done in stages if done]
        todo = [name for name, _, done in stages if not done]
        self._line("plan", f"{len(stages)} stages, to do: {', '.join(todo) or 'nothing'}")
        if cached and todo:
            self._line("plan", f"nothing changed for {', '.join(cached)}")

    def stage_started(self, stage: str) -> None:
        self._since[stage] = self._clock()
        self._line(stage, "started")

    def stage_doing(self, stage: str, action: str) -> None:
        if self._is_due(f"{stage} task", _TASK_SECONDS):
            self._line(stage, action)

    def stage_progress(self, stage: str, done: int, total: int, unit: str) -> None:
        self._last.setdefault(f"{stage} progress", self._clock())
        if self._is_due(f"{stage} progress", _PROGRESS_SECONDS):
            seconds = self._clock() - self._since.get(stage, self._clock())
            self._line(stage, progress_text(done, total, unit, seconds))

    def stage_parts(self, stage: str, parts: Sequence[Part]) -> None:
        for part in parts:
            rate = self._rates.rate(stage, part, self._clock())
            ended = part.done == part.total and part.action == "done"
            key = (stage, part.name)
            if ended and self._whats.get(key) == "done":
                continue
            if ended or self._is_due(f"{stage} {part.name}", _PART_SECONDS):
                self._whats[key] = part.action
                self._line(stage, f"{part.name}: {part_text(part, rate)}")

    def stage_finished(self, stage: str, seconds: float, cached: bool) -> None:
        self._line(stage, "there already" if cached else f"done in {human_seconds(seconds)}")

    def stage_failed(self, stage: str, seconds: float) -> None:
        self._line(stage, f"failed after {human_seconds(seconds)}")

    def note(self, text: str) -> None:
        self._line("note", text)


class LiveMonitor(Monitor):
    """A tree of stages that redraws itself. Calls may come from any thread."""

    def __init__(self, title: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._title = title
        self._clock = clock
        self._rows: dict[str, _Row] = {}
        self._lock = threading.RLock()
        self._started = clock()
        self._rates = _Rates()
        self.print: Callable[[str], object] = print
        self.live: Live | None = None

    def _row(self, stage: str) -> _Row:
        return self._rows.setdefault(stage, _Row(stage))

    def stages_planned(self, stages: list[tuple[str, str, bool]]) -> None:
        with self._lock:
            for name, _, cached in stages:
                self._row(name).state = "cached" if cached else "waiting"

    def stage_started(self, stage: str) -> None:
        with self._lock:
            row = self._row(stage)
            row.state, row.started, row.doing, row.progress_since = "running", self._clock(), "", None

    def stage_doing(self, stage: str, action: str) -> None:
        with self._lock:
            row = self._row(stage)
            row.doing, row.progress_since = action, None

    def stage_progress(self, stage: str, done: int, total: int, unit: str) -> None:
        with self._lock:
            row = self._row(stage)
            row.progress_since = row.progress_since or self._clock()
            row.doing = progress_text(done, total, unit, self._clock() - row.progress_since)

    def stage_parts(self, stage: str, parts: Sequence[Part]) -> None:
        with self._lock:
            now = self._clock()
            self._row(stage).parts = [(part, self._rates.rate(stage, part, now)) for part in parts]

    def stage_finished(self, stage: str, seconds: float, cached: bool) -> None:
        self._end(stage, "cached" if cached else "done", seconds)

    def stage_failed(self, stage: str, seconds: float) -> None:
        self._end(stage, "failed", seconds)

    def _end(self, stage: str, state: State, seconds: float) -> None:
        with self._lock:
            row = self._row(stage)
            row.state, row.seconds, row.parts = state, seconds, ()
            if state != "failed":
                row.doing = ""

    def note(self, text: str) -> None:
        self.print(text)

    def __rich__(self) -> Table:
        from rich.markup import escape
        from rich.table import Table

        table = Table.grid(padding=(0, 1))
        # Only the last column shrinks on a narrow terminal.
        table.add_column(no_wrap=True, min_width=1)
        table.add_column(no_wrap=True, min_width=_NAME_WIDTH)
        table.add_column(justify="right", no_wrap=True, min_width=_TIME_WIDTH)
        table.add_column(no_wrap=True, overflow="ellipsis")
        with self._lock:
            total = human_seconds(self._clock() - self._started)
            table.add_row("", f"[bold]{escape(self._title)}[/]", total, "")
            for row in self._rows.values():
                mark, style = _MARKS[row.state]
                taken = self._clock() - row.started if row.state == "running" else row.seconds
                shown = human_seconds(taken) if row.state in ("running", "done", "failed") else ""
                what = "there already" if row.state == "cached" else row.doing
                table.add_row(
                    f"[{style}]{mark}[/]", f"[{style}]{escape(row.name)}[/]", shown, f"[dim]{escape(what)}[/]"
                )
                for part, rate in row.parts:
                    table.add_row("", "", "", f"[dim]{escape(bar(part))} {escape(part_text(part, rate))}[/]")
        return table


def is_live(stream_is_terminal: bool, environment: Mapping[str, str]) -> bool:
    """Return whether redrawing is wanted: on a terminal that supports it, and not in a CI's log."""
    return (
        stream_is_terminal
        and environment.get("TERM", "dumb") not in ("dumb", "unknown", "")
        and environment.get("CI", "").lower() in ("", "0", "false")
    )


@contextmanager
def monitor(title: str) -> Iterator[Monitor]:
    """Show on standard error what the monitor is told, until the block ends."""
    if not is_live(sys.stderr.isatty(), os.environ):
        # Each line is written in one piece, because stages in other threads write too.
        yield PlainMonitor(lambda line: print(f"{line}\n", end="", file=sys.stderr, flush=True))
        return
    from rich.live import Live

    shown = LiveMonitor(title)
    console = stderr_console()
    shown.print = lambda text: console.print(text, markup=False, highlight=False)
    # Redirecting would send a result that is printed in the meantime to standard error.
    with Live(shown, console=console, refresh_per_second=_REDRAWS_PER_SECOND, redirect_stdout=False) as live:
        shown.live = live
        yield shown


@contextmanager
def paused(shown: Monitor) -> Iterator[None]:
    """Leave the terminal to other output until the block ends."""
    live = shown.live if isinstance(shown, LiveMonitor) else None
    if live:
        live.stop()
    try:
        yield
    finally:
        if live:
            live.start()


def stderr_console() -> Console:
    """Return a console for people. If standard error isn't a terminal, lines aren't wrapped at a guessed width."""
    from rich.console import Console

    return Console(stderr=True, soft_wrap=not sys.stderr.isatty(), highlight=False)


def stdout_console() -> Console:
    """Return a console for results, 200 columns wide if standard output isn't a terminal."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else 200)
