"""The live table: it shows the state, at any moment and up to the last change."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from rich.console import Console

from image_builder.cli.pool.table import ROLLING, LiveTable, lines, summary
from image_builder.pool.plan.model import STEPS, ended, failed, quantile
from image_builder.pool.run.driver import run
from image_builder.pool.run.progress import apply, begin, replay
from image_builder.pool.run.records import Began, Gated, Intent, Opened, Record, Result, Stopped
from image_builder.pool.run.state import Progress
from image_builder.pool.show import report
from image_builder.pool.show.view import STATES, look, slowest, wave_quantiles
from image_builder.text import human_seconds
from tests.support.pools.simulated import rolls
from tests.support.pools.simulated.rollouts import BAD_DAY, START, WIDE, Faults, World, make, simulate


def _drive(faults: Faults, changed: Callable[[Progress, World], None], hosts: int = 400) -> Progress:
    """Drive a simulated run, and report each change as the loop of a real one does."""
    plan = make(hosts, WIDE)
    world, progress = World(plan, faults), begin(plan)
    apply(progress, Opened(at=world.time, plan=plan.digest))
    run(progress, world, lambda _: changed(progress, world))
    return progress


def _console(width: int, *, terminal: bool) -> Console:
    return Console(
        file=io.StringIO(),
        width=width,
        height=80,
        force_terminal=terminal,
        color_system=None,
        legacy_windows=False,
    )


def _drawn(table: LiveTable, width: int) -> str:
    console = _console(width, terminal=False)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _row(text: str, wave: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if line.startswith(f"{wave} "))
    return line.split()


def test_every_host_is_counted_once_after_every_record() -> None:
    def check(progress: Progress, _: World) -> None:
        view = look(progress)
        for wave, status in zip(view.waves, progress.waves, strict=True):
            assert wave.hosts == sum(wave.counts.values()) == len(status.wave.hosts)
            assert wave.unfinished == status.unfinished
        assert sum(wave.counts["failed"] for wave in view.waves) == progress.failed == view.failed
        assert sum(view.signatures.values()) == progress.failed

    assert _drive(BAD_DAY, check).failed > 5


def test_quantiles_are_those_of_the_wave() -> None:
    plan = make(400, WIDE)
    progress, _, records = simulate(plan, Faults())
    for number, status in enumerate(progress.waves):
        names = set(plan.waves[number].hosts)
        results = [r for r in records if isinstance(r, Result) and r.host in names]
        for step in STEPS["bootstrap"]:
            seconds = [r.seconds for r in results if r.step == step]
            expected = (quantile(seconds, 0.5), quantile(seconds, 0.95))
            assert wave_quantiles(progress, status)[step] == expected


def test_phases_of_failed_hosts_do_not_count() -> None:
    plan = make(400, WIDE)
    first, second = plan.waves[0].hosts[:2]
    records: list[Record] = [
        Opened(at=START, plan=plan.digest),
        Began(at=START, wave=0),
        Intent(at=START, step="bootstrap", hosts=(first, second)),
    ]
    for name, outcome, disk in ((first, ended("ok"), 4.0), (second, failed("disk", 31), 300.0)):
        records.append(
            Result(
                at=START + 9,
                host=name,
                step="bootstrap",
                attempt=1,
                outcome=outcome,
                joined="yes",
                phases={"disk": disk},
            )
        )
    progress = replay(plan, records)
    assert wave_quantiles(progress, progress.waves[0])["disk"] == (4.0, 4.0)


def test_the_longest_phases_of_the_wave_in_work_are_drawn_longest_first() -> None:
    plan = make(400, WIDE)
    names = plan.waves[0].hosts[:3]
    # Of ten phases, the two shortest don't fit; each takes 1, 2 and 3 times its seconds on the three hosts.
    phases = {f"phase-{n}": 10.0 * (n + 1) for n in range(10)}
    records: list[Record] = [
        Opened(at=START, plan=plan.digest),
        Began(at=START, wave=0),
        Intent(at=START, step="bootstrap", hosts=names),
    ]
    for times, name in enumerate(names, start=1):
        took = {phase: times * seconds for phase, seconds in phases.items()}
        records.append(
            Result(
                at=START + 600,
                host=name,
                step="bootstrap",
                attempt=1,
                outcome=ended("ok"),
                joined="yes",
                phases=took,
            )
        )
    table = LiveTable(console=_console(150, terminal=True), live=True, clock=lambda: START + 600)
    table.changed(replay(plan, records))
    text = _drawn(table, 150).splitlines()
    (head,) = (n for n, line in enumerate(text) if line.split()[:1] == ["phase"])
    drawn = [line.split("  ") for line in text[head : head + 9]]
    assert [[cell.strip() for cell in row if cell.strip()] for row in drawn] == [
        ["phase", "p50", "p95"],
        *(
            [f"phase-{n}", human_seconds(2 * phases[f"phase-{n}"]), human_seconds(3 * phases[f"phase-{n}"])]
            for n in range(9, 1, -1)
        ),
    ]
    assert not any("phase-1 " in line or "phase-0 " in line for line in text)


def test_the_slowest_are_those_longest_in_work_not_counting_their_join_slot() -> None:
    plan = make(400, WIDE)
    early, late = plan.waves[1].hosts[:2]
    progress = replay(
        plan,
        [
            Opened(at=START, plan=plan.digest),
            Began(at=START, wave=0),
            Began(at=START, wave=1),
            Intent(at=START, step="bootstrap", hosts=(early, late), delays={early: 50.0}),
        ],
    )
    assert [(slow.host, slow.since - START) for slow in slowest(progress)] == [(late, 0.0), (early, 50.0)]


def test_a_plain_log_tells_each_wave_once_and_every_kind_of_failure() -> None:
    console = _console(200, terminal=False)
    world: list[World] = []
    with LiveTable(console=console, live=False, clock=lambda: world[-1].time if world else START) as table:

        def changed(progress: Progress, now: World) -> None:
            world[:] = [now]
            table.changed(progress)

        progress = _drive(BAD_DAY, changed)
    assert isinstance(console.file, io.StringIO)
    texts = [line[9:] for line in console.file.getvalue().splitlines()]
    names = [wave.wave.name for wave in progress.waves]
    assert [line.split(":")[0] for line in texts if ": began" in line] == names
    assert [line.split(":")[0] for line in texts if ": over" in line] == names
    signatures = [line.partition(" x ")[2] for line in texts if line.startswith("1 x ")]
    assert len(signatures) == len(set(signatures)) and set(progress.signatures) <= set(signatures)
    assert texts[0] == f"400 hosts in {len(names)} waves, 20 may fail, running"
    assert texts[-1].startswith(f"finished; {progress.failed} of 20 failed")
    assert any(line.startswith("gate: hold: ") and "429" in line for line in texts)
    # Fifteen minutes of soak are neither silence nor a flood.
    soak = [line for line in texts if line.startswith(f"{names[0]}: ") and "next wave in" in line]
    assert 10 <= len(soak) <= 20


def test_a_run_taken_up_again_is_not_told_from_its_beginning() -> None:
    plan = make(400, WIDE)
    records = simulate(plan, Faults())[2]
    second = next(n for n, r in enumerate(records) if isinstance(r, Began) and r.wave == 2)
    progress = replay(plan, [*records[: second + 40], Opened(at=records[-1].at, plan=plan.digest)])
    texts = list(lines(None, look(progress)))
    assert [line for line in texts if "began" in line] == ["wave 2: began, 20 hosts, 1 may fail"]
    assert not any(line.startswith(("canaries", "wave 1")) for line in texts)


def test_a_stop_is_told_with_its_reason() -> None:
    progress = begin(make(60))
    apply(progress, Opened(at=START, plan=progress.plan.digest))
    before = look(progress)
    apply(progress, Stopped(at=START, reason="2 hosts of canaries failed, its budget is 0"))
    (line,) = lines(before, look(progress))
    assert line.startswith("stopped: 2 hosts of canaries failed, its budget is 0; ")
    assert summary(look(progress), START) == ""


@contextmanager
def _half_way(
    clock: Callable[[], float], width: int = 150
) -> Iterator[tuple[LiveTable, Progress, list[Record]]]:
    """Yield the table of a run in the middle of its second wave, its progress, and the records that follow."""
    plan = make(400, WIDE)
    records = simulate(plan, Faults())[2]
    cut = [n for n, r in enumerate(records) if isinstance(r, Result) and r.step == "bootstrap"][15]
    progress = replay(plan, records[:cut])
    with LiveTable(console=_console(width, terminal=True), live=True, clock=clock) as table:
        table.changed(progress)
        yield table, progress, records[cut:]


def test_the_last_change_is_shown_although_the_rate_is_limited() -> None:
    with _half_way(lambda: START) as (table, progress, following):
        assert _drawn(table, 150)
        for record in following[:60]:
            apply(progress, record)
            table.changed(progress)
        shown = _drawn(table, 150)
    for wave in look(progress).waves[:12]:
        counts = [str(count) for name, count in wave.counts.items() if count and name != "failed"]
        expected = " ".join([str(wave.hosts), *counts, f"{wave.counts['failed']}/{wave.budget}"])
        assert f" {expected} " in f" {' '.join(_row(shown, wave.name))} "


def test_quantiles_follow_within_a_second() -> None:
    now = [START]
    with _half_way(lambda: now[0]) as (table, progress, following):
        for record in following:
            apply(progress, record)
        table.changed(progress)
        assert table._view is not None and table._view.quantiles[3] == {}
        now[0] += 1
        table.changed(progress)
        assert table._view.quantiles[3] == wave_quantiles(progress, progress.waves[3])


def test_the_end_stays_on_the_screen() -> None:
    with _half_way(lambda: START) as (table, progress, following):
        for record in following:
            apply(progress, record)
        console = table.console
    assert isinstance(console.file, io.StringIO)
    last = console.file.getvalue().rpartition("finished")[2]
    # All quantiles are present, too, though the clock stood still.
    assert _row(last, "wave 3")[2:4] == ["over", "40"] and "s" in _row(last, "wave 3")[-1]


@pytest.mark.parametrize("width", [80, 150])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    with _half_way(lambda: START + 100) as (table, _, _):
        text = _drawn(table, width)
    assert max(len(line) for line in text.splitlines()) <= width
    titles = next(line for line in text.splitlines() if line.startswith("wave ")).split()
    assert {"hosts", "waiting", "ok", "failed", "p50", "p95"} <= set(titles)
    assert ("verifying" in titles) == (width == 150)


@pytest.mark.parametrize("width", [80, 135])
def test_a_roll_is_shown_without_a_title_cut_off(width: int) -> None:
    progress, _ = rolls.roll(rolls.World(rolls.plan(300)))
    table = LiveTable(console=_console(width, terminal=True), live=True, clock=lambda: START)
    table.changed(progress)
    shown = _drawn(table, width)
    assert "…" not in shown and max(len(line) for line in shown.splitlines()) <= width
    titles = next(line for line in shown.splitlines() if line.startswith("wave ")).split()
    assert {"hosts", "waiting", "ok", "skipped", "failed"} <= set(titles)
    assert ("draining" in titles) == (width == 135)
    assert {state for _, states in ROLLING for state in states} == set(STATES["roll"])


def test_of_many_waves_those_about_the_current_one_are_shown() -> None:
    progress, _, _ = simulate(make(7500, WIDE.model_copy(update={"waves": ("1%",)})), Faults(hangs=1.0))
    while progress.began < 40:
        apply(progress, Began(at=START, wave=progress.began))
    table = LiveTable(console=_console(150, terminal=True), live=True, clock=lambda: START)
    table.changed(progress)
    shown = [line.split("  ")[0] for line in _drawn(table, 150).splitlines() if line.startswith("wave ")]
    assert shown == ["wave", *(f"wave {n}" for n in range(30, 42))]


@pytest.mark.parametrize("live", [False, True])
def test_a_reader_that_goes_away_is_no_end_of_the_run(live: bool) -> None:
    """A terminal disappears with its connection, but hosts are still in work, and the journal records them."""
    reading, writing = os.pipe()
    ended = ""
    with (
        suppress(BrokenPipeError),
        os.fdopen(writing, "w", 1, encoding="utf-8") as file,
    ):  # what it still holds
        with LiveTable(console=Console(file=file, force_terminal=live), live=live) as table:
            table.note("heard")
            os.close(reading)
            with pytest.raises(BrokenPipeError):
                os.write(writing, b"x")
            ended = report.state(_drive(BAD_DAY, lambda progress, _: table.changed(progress)), running=False)
        ended += ", and shown to its end"
    assert ended == "finished, and shown to its end"


def test_what_a_host_says_cannot_steer_the_terminal() -> None:
    plan = make(60)
    name = plan.waves[0].hosts[0]
    progress = simulate(plan, Faults(fates={name: failed("\x1b[2J[red]\x07", 1)}))[0]
    table = LiveTable(console=_console(150, terminal=False), live=False, clock=lambda: START)
    with table:
        table.changed(begin(plan))
        table.changed(progress)
        shown = _drawn(table, 150)
    assert isinstance(table.console.file, io.StringIO)
    for text in (shown, table.console.file.getvalue()):
        assert "[2J[red]" in text and "\x1b" not in text and "\x07" not in text


def test_it_is_drawn_while_the_state_changes() -> None:
    table = LiveTable(console=_console(150, terminal=True), live=True, clock=lambda: START)
    over = threading.Event()
    drawn, problems = [0], list[Exception]()

    def draw() -> None:
        try:
            while not over.is_set() or not drawn[0]:
                _drawn(table, 150)
                drawn[0] += 1
        except Exception as error:  # reported by the other thread, where a test can fail
            problems.append(error)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        _drive(BAD_DAY, lambda progress, _: table.changed(progress))
    finally:
        over.set()
        thread.join()
    assert problems == [] and drawn[0] > 1


def test_a_red_gate_is_told_in_the_heading() -> None:
    plan = make(400, WIDE)
    records = simulate(plan, Faults(throttled=[(0, 100)]))[2]
    red = next(n for n, r in enumerate(records) if isinstance(r, Gated) and r.verdict == "hold")
    table = LiveTable(console=_console(150, terminal=True), live=True, clock=lambda: START)
    table.changed(replay(plan, records[: red + 1]))
    text = _drawn(table, 150)
    assert "gate hold" in text and "3000 of 30000 requests answered with 429" in text
