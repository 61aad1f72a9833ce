"""The live progress of a run: a table on a terminal, elsewhere lines with the time of day.

Whenever the state changes, the driver's thread extracts what is to be shown (``view.look``, plain and frozen); another
thread draws it. So nothing is ever drawn from a state that is being changed, and the last change is shown even if no
other one follows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Any, Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from image_builder.cli.render import is_live, stderr_console
from image_builder.pool.plan.model import STEPS
from image_builder.pool.run.gates import Verdict
from image_builder.pool.run.state import Progress, State
from image_builder.pool.show.view import (
    STATES,
    Quantiles,
    Slow,
    View,
    WaveView,
    look,
    slowest,
    wave_quantiles,
)
from image_builder.text import human_seconds, printable, short_list

_REDRAWS_PER_SECOND = 2
# Quantiles and the slowest hosts are computed at most this often: they take milliseconds, the rest microseconds.
_SEEK_SECONDS = 1.0
# A plain log gets a line about the wave in progress at most this often, and this often while nothing happens.
_LINE_SECONDS = 15.0
_SILENT_SECONDS = 60.0
_WAVES = 12
_UPCOMING = 2
_PHASES = 8
_SIGNATURES = 8
# Columns that a terminal needs to show all states of a wave side by side.
_WIDE, _WIDE_ROLL = 110, 135
# A roll has more states than fit: consecutive states share one column.
ROLLING: tuple[tuple[str, tuple[State, ...]], ...] = (
    ("waiting", ("waiting",)),
    ("busy", ("deferred", "resting", "awaiting")),
    ("draining", ("probing", "ready", "draining", "drained")),
    ("reimaging", ("reimaging",)),
    ("verifying", ("joined", "verifying")),
    ("freeing", ("settled", "freeing")),
    ("restoring", ("broken", "restoring")),
)
_VERDICT_STYLES: Mapping[Verdict, str] = {"go": "green", "hold": "yellow", "stop": "red"}


def lines(before: View | None, after: View) -> Iterator[str]:
    """Yield the events between two views that are worth a line of a plain log."""
    if before is None:
        hosts = sum(wave.hosts for wave in after.waves)
        yield f"{hosts} hosts in {len(after.waves)} waves, {after.budget} may fail, {after.state}"
    for number, wave in enumerate(after.waves):
        previous = before.waves[number] if before and number < len(before.waves) else None
        if wave.began is None or (before is None and wave.passed is not None):
            continue
        if previous is None or previous.began is None:
            yield f"{wave.name}: began, {wave.hosts} hosts, {wave.budget} may fail"
        if wave.passed is not None and (previous is None or previous.passed is None):
            took = human_seconds(max(0.0, wave.passed - wave.began))
            yield f"{wave.name}: {wave.state} after {took}, {_counted(wave)}"
    compared = before or after
    for signature, count in after.signatures.items():
        if before is not None and signature not in before.signatures:
            yield f"{count} x {signature}"
    if (after.verdict, bool(after.reasons)) != (compared.verdict, bool(compared.reasons)):
        yield f"gate: {after.verdict}{_because(after.reasons)}"
    if after.state != compared.state or (before is None and after.reason):
        yield f"{after.state}{_because([after.reason] if after.reason else [])}; {_totals(after)}"


def summary(view: View, now: float) -> str:
    """Return the progress of the latest wave, and what the next one waits for; an empty string before the first one."""
    if not view.current:
        return ""
    wave = view.waves[view.current - 1]
    parts = [f"{wave.name}: {_counted(wave)}", _totals(view)]
    if view.verdict != "go":
        parts.append(f"gate {view.verdict}")
    elif view.next_at is not None and view.next_at > now:
        parts.append(f"next wave in {human_seconds(view.next_at - now)}")
    return "; ".join(parts)


def _counted(wave: WaveView) -> str:
    return ", ".join(f"{count} {name}" for name, count in wave.counts.items() if count)


def _because(reasons: Sequence[str]) -> str:
    return f": {'; '.join(reasons)}" if reasons else ""


def _totals(view: View) -> str:
    return f"{view.failed} of {view.budget} failed, {view.unavailable} of {view.max_unavailable} unavailable"


def heading(view: View, now: float) -> Text:
    """Return the first line: state, totals, gate, and what the run waits for."""
    since = f" {human_seconds(max(0.0, now - view.began_at))}" if view.began_at is not None else ""
    text = Text.assemble(
        (f"{view.state}{since}", "bold"),
        f"  {_totals(view)}  gate ",
        (view.verdict, _VERDICT_STYLES[view.verdict]),
    )
    if view.reason or view.reasons:
        text.append(
            f"\n{printable(view.reason or '; '.join(view.reasons))}", "red" if view.reason else "yellow"
        )
    elif view.next_at is not None and view.next_at > now:
        text.append(f"  next wave in {human_seconds(view.next_at - now)}")
    return text


def waves_table(view: View, now: float, *, wide: bool) -> Table:
    """Return the waves around the current one, with all states, or with fewer columns unless ``wide``."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("wave", no_wrap=True)
    table.add_column("", no_wrap=True)
    states: list[tuple[str, tuple[str, ...]]] = [(state, (state,)) for state in STATES[view.mode]]
    if view.mode == "roll":
        states = list(ROLLING)
    if not wide:
        states = [("waiting", ("waiting",)), ("in work", STATES[view.mode][1:])]
    skipped: list[tuple[str, tuple[str, ...]]] = [("skipped", ("skipped",))] if view.mode == "roll" else []
    states += [("ok", ("ok",)), *skipped, ("failed", ("failed",))]
    spans = [("join", "bootstrap"), ("verify", "verify")] if wide else [("join", "bootstrap")]
    if view.mode == "roll":
        spans = [("reimage", "reimage")] if wide else []
    for title in (
        "hosts",
        *(name for name, _ in states),
        *(t for n, _ in spans for t in (f"{n} p50", "p95")),
    ):
        table.add_column(title, justify="right", no_wrap=True)
    first = max(0, min(view.current + _UPCOMING, len(view.waves)) - _WAVES)
    for number, wave in list(enumerate(view.waves))[first : first + _WAVES]:
        quantiles = view.quantiles[number] if number < len(view.quantiles) else {}
        counts = [_cell(sum(wave.counts[s] for s in group), name, wave) for name, group in states]
        took = [_seconds(quantiles, step, n) for _, step in spans for n in (0, 1)]
        style = "dim" if wave.began is None else ""
        table.add_row(printable(wave.name), _state(wave, now), str(wave.hosts), *counts, *took, style=style)
    return table


def _cell(count: int, name: str, wave: WaveView) -> Text:
    if name == "failed":
        style = "bold red" if count > wave.budget else "red" if count else ""
        return Text(f"{count}/{wave.budget}", style)
    return Text(str(count) if count else "", "green" if name == "ok" else "")


def _state(wave: WaveView, now: float) -> str:
    if wave.began is None or wave.passed is not None:
        return wave.state
    return f"{wave.state} {human_seconds(max(0.0, now - wave.began))}"


def _seconds(quantiles: Quantiles, name: str, place: int) -> str:
    return human_seconds(quantiles[name][place]) if name in quantiles else ""


def details(view: View, now: float) -> Iterator[Table]:
    """Yield small tables: the longest phases of the wave in progress, the slowest hosts, and similar failures."""
    quantiles = view.quantiles[view.current - 1] if 0 < view.current <= len(view.quantiles) else {}
    phases = {name: values for name, values in quantiles.items() if name not in STEPS[view.mode]}
    longest = sorted(phases.items(), key=lambda item: -item[1][1])[:_PHASES]
    yield from _small(
        ("phase", "p50", "p95"), [(w, human_seconds(a), human_seconds(b)) for w, (a, b) in longest]
    )
    slow = [(s.host, s.step, human_seconds(max(0.0, now - s.since))) for s in view.slowest if s.since <= now]
    yield from _small(("slowest", "step", "since"), slow)
    frequent = sorted(view.signatures.items(), key=lambda item: (-item[1], item[0]))
    where = [
        (str(count), signature, short_list([w.name for w in view.waves if signature in w.signatures]))
        for signature, count in frequent[:_SIGNATURES]
    ]
    if len(frequent) > _SIGNATURES:
        where.append(("", f"and {len(frequent) - _SIGNATURES} other kinds", ""))
    yield from _small(("failed", "alike", "in"), where)


def _small(titles: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[Table]:
    if not rows:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for title in titles:
        table.add_column(title, no_wrap=True)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    yield table


class _Lossy:
    """A stream that may lose what is written: a run doesn't end because its output is lost.

    A terminal may go away with its connection, the reader of a pipe may exit, a log's disk may be full.
    """

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@dataclass
class LiveTable:
    """Shows a run on standard error until the block ends. ``changed`` is called by the thread that changes it."""

    console: Console = field(default_factory=stderr_console)
    live: bool | None = None
    clock: Callable[[], float] = time.time
    _file: IO[str] = field(init=False)
    _shown: Live | None = field(default=None, init=False)
    _progress: Progress | None = field(default=None, init=False)
    _view: View | None = field(default=None, init=False)
    _sought: tuple[list[Quantiles], tuple[Slow, ...]] = field(default=([], ()), init=False)
    _keys: list[tuple[int, ...]] = field(default_factory=list, init=False)
    _seek_at: float = field(default=0.0, init=False)
    _line_at: float = field(default=0.0, init=False)
    _reported: Mapping[str, int] = field(default_factory=dict, init=False)

    def __enter__(self) -> Self:
        self._file = self.console.file
        self.console.file = _Lossy(self._file)  # type: ignore[assignment]  # all that rich asks of a file
        if self.live is None:
            self.live = is_live(self.console.is_terminal, os.environ)
        if self.live:
            # Redirecting would send a result that is printed in the meantime to standard error.
            self._shown = Live(
                self, console=self.console, refresh_per_second=_REDRAWS_PER_SECOND, redirect_stdout=False
            )
            self._shown.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._seek_at = 0.0
            self.changed(self._progress)
        if self._shown is not None:
            self._shown.stop()
        self.console.file = self._file

    def changed(self, progress: Progress) -> None:
        """Show a state; may be called for every record."""
        self._progress = progress
        now = self.clock()
        if now >= self._seek_at:
            self._seek_at = now + _SEEK_SECONDS
            self._sought = (self._quantiles(progress), slowest(progress))
        before, self._view = self._view, look(progress, *self._sought)
        if not self.live:
            for line in lines(before, self._view):
                self.note(line)
            self._summarise(self._view, now)

    def _summarise(self, view: View, now: float) -> None:
        """Print the run's progress, soon if something has changed, and now and then if nothing has."""
        counts = view.waves[view.current - 1].counts if view.current else {}
        wait = _SILENT_SECONDS if counts == self._reported else _LINE_SECONDS
        if view.state == "running" and now >= self._line_at + wait and (text := summary(view, now)):
            self._line_at, self._reported = now, counts
            self.note(text)

    def _quantiles(self, progress: Progress) -> list[Quantiles]:
        """Return each wave's quantiles, recomputed only for waves in which something happened."""
        keys = [tuple(w.count(s) for s in ("joined", "verifying", "ended")) for w in progress.waves]
        previous = self._sought[0]
        quantiles = [
            previous[n] if n < len(previous) and self._keys[n] == key else wave_quantiles(progress, wave)
            for n, (key, wave) in enumerate(zip(keys, progress.waves, strict=True))
        ]
        self._keys = keys
        return quantiles

    def note(self, text: str) -> None:
        """Print a permanent line, with the time of day."""
        line = f"{time.strftime('%H:%M:%S', time.localtime(self.clock()))} {printable(text)}"
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        view, now = self._view, self.clock()
        if view is None:
            return
        yield heading(view, now)
        columns = _WIDE_ROLL if view.mode == "roll" else _WIDE
        yield waves_table(view, now, wide=options.max_width >= columns)
        for table in details(view, now):
            yield Text()
            yield table
