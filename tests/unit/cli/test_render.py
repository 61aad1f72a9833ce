"""Progress, for a terminal and for a log."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from image_builder.cli.render import LiveMonitor, PlainMonitor, is_live, progress_text
from image_builder.events import Part
from image_builder.text import columns, human_bytes, human_seconds


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (123_456, "123 kB"),
        (1_234_000_000, "1.23 GB"),
        (9e15, "9e+03 TB"),
    ],
)
def test_bytes(count: float, text: str) -> None:
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (99, "99 s"), (187, "3:07 min"), (3723, "1:02:03 h")],
)
def test_seconds(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text


def test_progress_has_a_rate_when_it_is_bytes() -> None:
    assert progress_text(120_000_000, 800_000_000, "B", 10) == "120 MB of 800 MB, 12 MB/s"
    assert progress_text(3, 70, "checks", 10) == "3 of 70 checks"


def test_a_log_has_plain_lines_with_the_time() -> None:
    lines: list[str] = []
    clock = Clock()
    monitor = PlainMonitor(lines.append, clock)
    monitor.stages_planned([("tools", "a", True), ("base", "b", False)])
    monitor.stage_started("base")
    monitor.stage_doing("base", "installing packages")
    monitor.stage_doing("base", "too soon for a line")
    clock.now += 2
    monitor.stage_doing("base", "committing")
    monitor.stage_finished("base", 61.5, cached=False)
    monitor.stage_failed("seal", 1.0)
    assert all(re.match(r"\d\d:\d\d:\d\d \S", line) for line in lines)
    assert [re.sub(r" +", " ", line[9:]) for line in lines] == [
        "plan 2 stages, to do: base",
        "plan nothing changed for tools",
        "base started",
        "base installing packages",
        "base committing",
        "base done in 62 s",
        "seal failed after 1.0 s",
    ]
    assert not any("\x1b" in line or "\r" in line for line in lines)


def test_a_log_is_not_flooded_by_progress() -> None:
    lines: list[str] = []
    clock = Clock()
    monitor = PlainMonitor(lines.append, clock)
    monitor.stage_started("fetch")
    for done in range(600):
        clock.now += 0.1
        monitor.stage_progress("fetch", done, 600, "B")
    assert 3 <= len(lines) <= 6


def _drawn(monitor: LiveMonitor) -> str:
    console = Console(file=io.StringIO(), width=80, force_terminal=False)
    with console.capture() as capture:
        console.print(monitor)
    return capture.get()


def test_the_tree_tells_what_each_stage_does_now() -> None:
    clock = Clock()
    monitor = LiveMonitor("build worker", clock)
    monitor.stages_planned([("tools", "a", True), ("base", "b", False), ("seal", "c", False)])
    monitor.stage_started("base")
    clock.now += 5
    monitor.stage_doing("base", "[unpacking] libc6")
    drawn = [re.sub(r" +", " ", line).strip() for line in _drawn(monitor).splitlines()]
    assert drawn == [
        "build worker 5.0 s",
        "= tools there already",
        "▶ base 5.0 s [unpacking] libc6",
        "· seal",
    ]
    monitor.stage_finished("base", 5.2, cached=False)
    monitor.stage_started("seal")
    monitor.stage_failed("seal", 0.3)
    drawn = [re.sub(r" +", " ", line).strip() for line in _drawn(monitor).splitlines()]
    assert drawn[2:] == ["✓ base 5.2 s", "✗ seal 0.3 s"]


@pytest.mark.parametrize(
    ("terminal", "environment", "live"),
    [
        (True, {"TERM": "xterm"}, True),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, True),
        (False, {"TERM": "xterm"}, False),
        (True, {"TERM": "dumb"}, False),
        (True, {}, False),
        (True, {"TERM": "xterm", "CI": "true"}, False),
        (True, {"TERM": "xterm", "CI": "false"}, True),
    ],
)
def test_redrawing_is_for_terminals(terminal: bool, environment: dict[str, str], live: bool) -> None:
    assert is_live(terminal, environment) is live


def test_columns_are_aligned_and_never_cut() -> None:
    assert columns([("a", "b"), ("longer", "c")]) == "a       b\nlonger  c"
    assert columns([]) == ""


def test_a_cell_is_no_row_of_its_own_and_controls_no_terminal() -> None:
    assert columns([("a", "b\nc"), ("d\x1b[2J", "e")]) == "a      b\ufffdc\nd\ufffd[2J  e"


def _pulls(done: int, what: str = "1/5 layers") -> list[Part]:
    return [Part("registry.example/large:1", done, 800_000_000, what)]


def test_a_log_has_a_line_a_part_every_few_seconds() -> None:
    lines: list[str] = []
    clock = Clock()
    monitor = PlainMonitor(lines.append, clock)
    for second in range(11):
        monitor.stage_parts("preload", _pulls(second * 10_000_000))
        clock.now += 1
    monitor.stage_parts("preload", _pulls(800_000_000, "done"))
    monitor.stage_parts("preload", _pulls(800_000_000, "done"))
    texts = [line.partition(" preload ")[2].strip() for line in lines]
    assert texts == [
        "registry.example/large:1: 0 B of 800 MB, 1/5 layers",
        "registry.example/large:1: 50 MB of 800 MB, 10 MB/s, 1/5 layers",
        "registry.example/large:1: 100 MB of 800 MB, 10 MB/s, 1/5 layers",
        texts[3],
    ]
    assert texts[3].startswith("registry.example/large:1: 800 MB of 800 MB") and texts[3].endswith(", done")


def test_a_terminal_shows_a_bar_for_each_part_while_the_stage_runs() -> None:
    clock = Clock()
    monitor = LiveMonitor("build worker", clock)
    monitor.stage_started("preload")
    monitor.stage_parts("preload", [*_pulls(400_000_000), Part("registry.example/pause:3.10", 9, 9, "done")])
    out = io.StringIO()
    Console(file=out, width=120).print(monitor)
    assert re.search(r"large:1 +━{10}─{10} 400 MB of 800 MB, 1/5 layers", out.getvalue())
    assert re.search(r"pause:3\.10 +━{20} 9 B of 9 B, done", out.getvalue())
    monitor.stage_finished("preload", 3.0, cached=False)
    out = io.StringIO()
    Console(file=out, width=120).print(monitor)
    assert "━" not in out.getvalue()
