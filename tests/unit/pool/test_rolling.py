"""Rolls in simulated time: what happens to hosts, and what holds at each moment whatever goes wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from image_builder.cli.pool import run as commands
from image_builder.errors import PoolError
from image_builder.pool.plan.model import OK, Joined, ended, rank
from image_builder.pool.plan.plan import Plan
from image_builder.pool.plan.policy import GateLimits, Policy, Roll, WaveDrain
from image_builder.pool.plan.waves import rest_wave
from image_builder.pool.run.driver import run
from image_builder.pool.run.journal import open_journal, read_journal
from image_builder.pool.run.progress import apply, begin, replay
from image_builder.pool.run.records import (
    Began,
    Chosen,
    Finished,
    Gated,
    Intent,
    Opened,
    Passed,
    Record,
    Rested,
    Result,
    Stopped,
    Turned,
)
from image_builder.pool.run.resume import take_up
from image_builder.pool.show import report as reports
from image_builder.pool.show.view import look
from tests.support.pools.simulated.rollouts import START
from tests.support.pools.simulated.rolls import (
    BOOT,
    BUSY,
    LATE,
    NEW,
    OLD,
    REIMAGE,
    SOON,
    Fate,
    World,
    check_end,
    mixed_jobs,
    plan,
    roll,
)

FATES: list[Fate] = [
    "well",
    "never back",
    "preflight",
    "checks",
    "answer lost",
    "request lost",
    "old once",
    "foreign cordon",
]
GENEROUS = {"wave_budget": "100%", "budget": "100%", "same_share": "100%", "max_unavailable": "30%"}


def test_an_idle_fleet_gets_its_image_wave_by_wave() -> None:
    world = World(plan(1200))
    progress, records = roll(world)
    assert progress.finished and not progress.stopped
    assert {node.build for node in world.nodes.values()} == {NEW}
    assert set(world.models.values()) == {NEW}
    assert world.most_unavailable <= 24
    assert all(world.nodes[name].reimages[NEW] == 1 for name in world.nodes)
    check_end(world, progress)
    assert replay(world.plan, records).hosts == progress.hosts
    document = reports.report(progress, records)
    assert document["counts"]["ok"] == 1200 and document["skipped"] == {} == document["restored"]
    assert set(document["results"]["gpu-00-000000"]["tries"]) == {
        "probe",
        "await",
        "drain",
        "reimage",
        "verify",
        "free",
        "restore",
    }
    view = look(progress)
    assert sum(wave.counts["ok"] for wave in view.waves) == 1200


DAY = 86400.0
# A control plane that is rarely read, because days pass.
CALM = GateLimits(interval_seconds=1800.0)


def test_busy_hosts_are_taken_in_the_last_wave_as_they_become_idle() -> None:
    """Jobs take three days: no early wave waits for them, and in the end each host has its image."""
    world = World(plan(300, gate=CALM), jobs=mixed_jobs(1, 3 * DAY))
    progress, records = roll(world)
    assert progress.finished
    assert reports.counts(progress.hosts.values())["ok"] == 300
    check_end(world, progress)
    *waves, last = progress.waves
    assert last.wave.is_rest and len(last.names("ended")) > 200 and 100 < world.most_fenced <= 150
    # The last wave takes as long as the jobs, and those before it as long as the patience with each host.
    assert last.passed and last.began and 2 * DAY < last.passed - START < 3.2 * DAY
    assert all(w.passed and w.began and w.passed - w.began < 3600 for w in waves)
    assert sum(wave["hosts"] for wave in reports.report(progress, records)["waves"]) == 300
    # No host in it was freed and reimaged later: each was taken between two jobs.
    assert replay(world.plan, records).hosts == progress.hosts


def test_a_host_that_only_seems_idle_is_skipped_in_the_end() -> None:
    """Each last look finds work there: it is retried, not too often, for as long as the last wave waits."""
    rolled = plan(300, gate=CALM, **GENEROUS, max_wait_seconds=DAY)
    name = rolled.waves[-1].hosts[0]
    world = World(rolled, {name: "busy late"})
    progress, records = roll(world)
    assert progress.finished and reports.report(progress, records)["skipped"] == {name: "a pod runs on it"}
    tries = progress.hosts[name].tries["reimage"]
    # A try lasts until the look that finds the work, and the next one comes when a drain's patience runs out.
    assert 10 < tries <= DAY / (LATE + WaveDrain().max_wait_seconds) + 2
    assert not world.nodes[name].cordoned and progress.unavailable == 0
    check_end(world, progress)


def test_who_is_never_idle_is_skipped_and_named() -> None:
    rolled = plan(300, gate=CALM, roll=Roll(max_unavailable="20%", max_wait_seconds=DAY))
    world = World(rolled, jobs=lambda name: 30 * DAY if name in rolled.waves[-1].hosts[:7] else 0.0)
    progress, records = roll(world)
    assert progress.finished and not progress.failed and world.time - START < 1.3 * DAY
    skipped = reports.report(progress, records)["skipped"]
    assert skipped == dict.fromkeys(rolled.waves[-1].hosts[:7], BUSY)
    assert all(world.nodes[name].build == OLD and not world.nodes[name].cordoned for name in skipped)
    check_end(world, progress)
    document = reports.report(progress, records)
    assert document["skip_budget"] == 6 and status_of(document) == PoolError.exit_code
    assert status_of({**document, "skip_budget": 7}) == 0
    failed = {**document["counts"], "skipped": 6, "failed": 1}
    assert status_of({**document, "counts": failed}) == PoolError.exit_code


def status_of(document: dict[str, Any]) -> int:
    return commands._show(document, 0, "", as_json=True)


def test_a_gang_that_ends_at_once_is_taken_as_far_as_hosts_may_be_away() -> None:
    """A host without room is released within seconds, works on, and is taken after its next job."""
    world = World(plan(300, gate=CALM, max_unavailable="5%"), jobs=lambda _: DAY)
    progress, _ = roll(world)
    assert progress.finished and world.most_unavailable == 15
    assert reports.counts(progress.hosts.values())["ok"] == 300
    check_end(world, progress)


@pytest.mark.parametrize("together", [False, True])
def test_a_gang_of_500_that_ends_leaves_too_many_hosts_empty_for_seconds(*, together: bool) -> None:
    """Of 7,500 hosts, 3,750 are cordoned at work; the gang's come one after another in the rotation, or anywhere."""
    rolled = plan(7500, gate=CALM, waves=("100%",), canaries=1)
    names = sorted((host.name for host in rolled.hosts), key=(lambda name: name) if together else rank)
    gang, end = tuple(names[:500]), 1800.0
    jobs = dict.fromkeys(gang, end) | dict.fromkeys(names[500:], DAY)
    world = World(rolled, jobs=jobs.__getitem__, gangs=dict.fromkeys(gang, gang))
    fenced: list[int] = []

    def stop() -> bool:
        fenced.append(sum(world.nodes[name].awaited for name in gang))
        return world.time > START + end + 300

    # All of them were busy in their waves.
    progress, last = begin(rolled), len(rolled.waves)
    past: list[Record] = [Opened(at=START, plan=rolled.digest)]
    for number in range(last):
        past += [Began(at=START, wave=number), Passed(at=START, wave=number, failed=0, stragglers=0)]
    past += [
        Rested(at=START, wave=rest_wave(last, names, rolled.policy, rolled.digest)),
        Began(at=START, wave=last),
    ]
    for record in past:
        apply(progress, record)
    run(progress, world, lambda _: None, stop)
    assert world.most_fenced == 3750 and max(fenced) > 200
    assert 0 < world.longest_over <= SOON


def test_a_host_that_works_while_it_is_cordoned_is_not_away() -> None:
    world = World(plan(300), jobs=lambda _: 300.0)
    seen: list[int] = []

    def look() -> bool:
        draining = sum(wave.count("draining") for wave in progress.waves)
        if draining and world.time < START + 200:
            seen.append(progress.unavailable)
        return False

    progress = begin(world.plan)
    world.is_red = look
    records: list[Record] = [Opened(at=world.time, plan=world.plan.digest)]
    apply(progress, records[0])
    run(progress, world, records.append)
    assert progress.finished and set(seen) == {0}


def test_canaries_are_idle_hosts() -> None:
    """Planned canaries are busy for days, and so is all of one cell: without a canary, one of its hosts goes first."""
    rolled = plan(300, gate=CALM, max_unavailable="30%")
    busy = set(rolled.waves[0].hosts)
    cell = rolled.host[rolled.waves[0].hosts[0]].cell
    jobs = {host.name: 2 * DAY for host in rolled.hosts if host.name in busy or host.cell == cell}
    world = World(rolled, jobs=lambda name: jobs.get(name, 0.0))
    progress, records = roll(world)
    assert progress.finished
    (chosen,) = [record for record in records if isinstance(record, Chosen)]
    assert set(chosen.places) == {name for name in busy if rolled.host[name].cell != cell}
    canaries = progress.waves[0].names("ended")
    assert set(canaries) == set(chosen.places.values()) and progress.waves[0].passed
    assert all(rolled.host[b].cell == rolled.host[i].cell for b, i in chosen.places.items())
    first = [at for at, step, name in world.log if step == "reimage" and rolled.host[name].cell == cell]
    assert first[0] > START + 2 * DAY and first[1] - first[0] >= REIMAGE + BOOT
    check_end(world, progress)


@pytest.mark.parametrize(
    ("fate", "signature", "build"),
    [
        ("never back", "unknown", NEW),
        ("preflight", "failed preflight 61", NEW),
        ("checks", "failed verify 101", NEW),
        ("answer lost", "ok", NEW),
        ("request lost", "ok", NEW),
        ("old once", "ok", NEW),
        ("foreign cordon", "skipped", OLD),
    ],
)
def test_one_host_of_a_large_wave_has_a_fate(fate: Fate, signature: str, build: str) -> None:
    rolled = plan(300, **GENEROUS)
    name = rolled.waves[-1].hosts[0]
    world = World(rolled, {name: fate})
    progress, _ = roll(world)
    assert progress.finished
    outcome = progress.hosts[name].outcome
    assert outcome and outcome.signature == signature
    assert world.nodes[name].build == build
    assert Counter(s.outcome.kind for s in progress.hosts.values() if s.outcome)["ok"] >= 299
    check_end(world, progress)


def test_all_is_given_back_before_a_run_is_finished() -> None:
    """A driver that is killed in between still has a run to resume."""
    world = World(plan(30))
    progress = begin(world.plan)
    concluded: list[float | None] = []

    def write(record: Record) -> None:
        if isinstance(record, Finished):
            concluded.append(world.concluded_at)

    opened = Opened(at=world.time, plan=world.plan.digest)
    apply(progress, opened)
    run(progress, world, write)
    assert concluded == [world.time]


def test_a_canary_that_fails_stops_the_run_and_everything_goes_back() -> None:
    rolled = plan(300)
    canary = rolled.waves[0].hosts[0]
    world = World(rolled, {canary: "preflight"})
    progress, records = roll(world)
    assert progress.stopped and not progress.finished
    assert set(world.models.values()) == {OLD} and world.turned_at is not None
    (turned,) = [r for r in records if isinstance(r, Turned) and r.hosts]
    assert turned.hosts == (canary,)
    assert world.nodes[canary].build == OLD and not world.nodes[canary].cordoned
    assert progress.hosts[canary].restored is True
    document = reports.report(progress, records)
    assert document["cordoned"] == []
    assert f"  previous image again: {canary}" in reports.text(document).splitlines()
    assert not any(isinstance(r, Passed) for r in records)
    # Healthy new ones stay.
    assert all(
        world.nodes[n].build == NEW
        for n in rolled.waves[0].hosts
        if n != canary and world.nodes[n].reimages[NEW]
    )
    check_end(world, progress)


def test_a_host_that_was_not_empty_any_more_is_freed_after_a_stop() -> None:
    rolled = plan(300)
    broken, busy, *_ = rolled.waves[0].hosts
    world = World(rolled, {broken: "preflight", busy: "busy late"})
    progress, _ = roll(world)
    assert progress.stopped and not world.nodes[busy].cordoned
    outcome = progress.hosts[busy].outcome
    assert outcome and outcome.kind == "skipped" and world.nodes[busy].build == OLD
    check_end(world, progress)


def test_hosts_that_no_api_server_frees_any_more_are_reported_as_cordoned() -> None:
    """It is away when a person asks the run to stop, which waits for nothing beyond its deadlines."""
    world = World(plan(60), jobs=mixed_jobs(1, 12 * 3600.0))
    world.outage = (START + 3000.0, START + 20_000.0)
    progress, records = roll(world, lambda: world.time > START + 9000)
    left = [name for name, node in world.nodes.items() if node.cordoned == "us"]
    assert left and reports.report(progress, records)["cordoned"] == sorted(left)
    assert not any(progress.hosts[name].touched for name in left)


@pytest.mark.parametrize("back_after", [1800.0, inf])
def test_hosts_are_freed_at_once_though_azure_is_away_when_a_roll_stops(back_after: float) -> None:
    """Who never got the image goes back to work. Models and failed hosts wait until Azure answers, if it does."""
    rolled = plan(300, drain=WaveDrain(max_wait_seconds=7200.0), max_unavailable="30%")
    bad = rolled.waves[0].hosts[0]
    world = World(rolled, {bad: "preflight"}, jobs=lambda name: 0.0 if name == bad else DAY)
    world.azure_away_until = START + REIMAGE + BOOT + back_after
    progress, records = roll(world)
    at = next(record.at for record in records if isinstance(record, Stopped))
    freed = [when for when, step, _ in world.log if step == "free" and when >= at]
    assert freed and max(freed) - at < 60
    document = reports.report(progress, records)
    assert bool(document["unturned"]) is (back_after == inf)
    assert (world.turned_at is None) is (back_after == inf)
    left = [name for name, node in world.nodes.items() if node.cordoned == "us"]
    assert left == document["cordoned"]
    check_end(world, progress)


def test_what_can_not_be_restored_stays_cordoned() -> None:
    rolled = plan(300)
    canary = rolled.waves[0].hosts[0]
    world = World(rolled, {canary: "never back"})
    progress, records = roll(world)
    assert progress.hosts[canary].restored is False and world.nodes[canary].cordoned == "us"
    document = reports.report(progress, records)
    assert document["restored"] == {canary: False} and document["cordoned"] == [canary]
    assert f"  still cordoned: {canary}" in reports.text(document).splitlines()
    assert world.nodes[canary].reimages[OLD] == 1, "never a third time"


def test_nothing_is_restored_where_the_policy_says_never() -> None:
    rolled = plan(300, roll=Roll(restore="never"))
    world = World(rolled, {rolled.waves[0].hosts[0]: "preflight"})
    progress, records = roll(world)
    assert progress.stopped and world.turned_at is None
    assert not [r for r in records if isinstance(r, Turned)]


def test_the_third_alike_failure_turns_all_scale_sets_back_at_once() -> None:
    rolled = plan(1200, wave_budget="50%", budget="50%", max_unavailable="10%")
    bad: dict[str, Fate] = dict.fromkeys(rolled.waves[-1].hosts[:20], "checks")
    world = World(rolled, bad)
    progress, records = roll(world)
    assert "failed alike: failed verify 101" in progress.stopped
    stopped = next(r.at for r in records if r.kind == "stopped")
    assert world.turned_at is not None and world.turned_at - stopped <= 30
    check_end(world, progress)


def test_half_of_a_zone_stays_whatever_may_be_unavailable() -> None:
    world = World(plan(200, max_unavailable="100%", waves=("100%",)), jobs=lambda _: 300.0)
    progress, _ = roll(world)
    assert progress.finished and world.most_unavailable == 100
    check_end(world, progress)


def test_hosts_that_were_emptied_before_a_stop_are_freed() -> None:
    """The control plane turns red while jobs are awaited: emptied hosts keep their image, and somebody stops."""
    world = World(plan(300, max_unavailable="20%"), jobs=lambda _: 500.0)
    world.is_red = lambda: world.time > START + 400
    progress, records = roll(world, lambda: world.time > START + 900)
    stopped = next(r.at for r in records if isinstance(r, Stopped))
    freed = [name for at, step, name in world.log if step == "free" and at >= stopped]
    assert freed and all(world.nodes[name].build == OLD for name in freed)
    assert not [name for name, node in world.nodes.items() if node.cordoned == "us"]
    check_end(world, progress)


def test_who_asks_it_to_stop_goes_on_later() -> None:
    world = World(plan(300, max_unavailable="20%"), jobs=mixed_jobs(2, 3000.0))
    begun: list[float] = []

    def stop() -> bool:
        return len([entry for entry in world.log if entry[1] == "reimage"]) > 20

    progress, records = roll(world, stop)
    assert progress.stop_asked and world.turned_at is None
    assert not [n for n, node in world.nodes.items() if node.cordoned == "us"]
    check_end(world, progress)
    records.append(Opened(at=world.time, plan=world.plan.digest))
    apply(progress, records[-1])
    run(progress, world, records.append)
    begun.append(world.time)
    assert progress.finished
    assert reports.counts(progress.hosts.values())["ok"] == 300
    check_end(world, progress)


@settings(max_examples=10, deadline=None)
@given(
    fates=st.lists(st.sampled_from(FATES), min_size=40, max_size=40),
    seed=st.integers(0, 1000),
    moment=st.integers(1, 400),
)
def test_whatever_happens_and_whenever_the_driver_is_killed(
    fates: list[Fate], seed: int, moment: int
) -> None:
    """One driver ends at any record, and another one resumes from its journal."""
    rolled = plan(40, **GENEROUS)
    world = World(
        rolled,
        {host.name: fate for host, fate in zip(rolled.hosts, fates, strict=True)},
        jobs=mixed_jobs(seed, 4000.0),
    )

    class KilledError(Exception):
        pass

    records: list[Record] = []

    def write(record: Record) -> None:
        records.append(record)
        if len(records) == moment:
            raise KilledError

    records.append(Opened(at=world.time, plan=rolled.digest))
    progress = replay(rolled, records)
    try:
        run(progress, world, write)
    except KilledError:
        # What it started goes on; the events that it waited for reach no driver.
        world.kill()
        records.append(Opened(at=world.time, plan=rolled.digest))
        progress = replay(rolled, records)
        run(progress, world, records.append)
    assert progress.finished or progress.stopped
    check_end(world, progress)
    assert replay(rolled, records).hosts == progress.hosts


# Killed while a host is freed that was idle, since no more hosts may be unavailable: it didn't get the new image.
_FREED_IDLE: list[Fate] = [
    "preflight" if n in {2, 10, 23} else "never back" if n in {0, 9, 19, 20, 21} else "well"
    for n in range(24)
]


@settings(max_examples=8, deadline=None)
@example(seed=434, share=0.8203125, fates=_FREED_IDLE)
@given(
    seed=st.integers(0, 1000), share=st.floats(0.0, 1.0), fates=st.lists(st.sampled_from(FATES), min_size=24)
)
def test_whenever_the_driver_is_killed_in_the_last_wave(seed: int, share: float, fates: list[Fate]) -> None:
    """Jobs take a day; a driver ends at any record of the last wave, with hosts cordoned while at work."""
    rolled = plan(24, gate=CALM, **GENEROUS)
    chosen = {host.name: fate for host, fate in zip(rolled.hosts, fates, strict=False)}

    class KilledError(Exception):
        pass

    def drive(last: int) -> tuple[World, list[Record], int]:
        """Drive until ``last`` records after the last wave's first; return the world, records and how many followed."""
        world, records, began = World(rolled, dict(chosen), jobs=mixed_jobs(seed, DAY)), list[Record](), [0]

        def write(record: Record) -> None:
            records.append(record)
            if record.kind == "rested" and not began[0]:
                began[0] = len(records)
            if began[0] and len(records) == began[0] + last:
                raise KilledError

        records.append(Opened(at=world.time, plan=rolled.digest))
        try:
            run(replay(rolled, records), world, write)
        except KilledError:
            world.kill()
            records.append(Opened(at=world.time, plan=rolled.digest))
            run(replay(rolled, records), world, records.append)
        return world, records, len(records) - began[0]

    _, _, number = drive(10**6)
    world, records, _ = drive(int(share * (number - 1)))
    progress = replay(rolled, records)
    assert progress.finished or progress.stopped
    check_end(world, progress)
    if progress.finished:
        assert not [n for n, node in world.nodes.items() if node.awaited]


def test_only_a_roll_has_its_settings() -> None:
    assert Policy().max_unavailable == "10%" and Policy().roll is None
    rolled = Policy(mode="roll")
    assert rolled.most_unavailable == "2%" and rolled.deadline("drain") == 1230.0
    partly = Policy.model_validate_json('{"mode": "roll", "roll": {"drain": {"mode": "ask"}}}')
    assert partly.roll and partly.roll.drain.max_wait_seconds == 600.0
    with pytest.raises(ValidationError, match="mode `roll`"):
        Policy(roll=Roll())


def test_who_already_runs_the_version_is_freed() -> None:
    """The roll that is being undone, or one whose journal is lost, left the host cordoned."""
    world = World(plan(8))
    node = world.nodes["gpu-00-000003"]
    node.build, node.cordoned = NEW, "us"
    world.cordoned_before.add("gpu-00-000003")
    progress, _ = roll(world)
    assert progress.finished and not node.reimages and not node.cordoned
    check_end(world, progress)


def _until_drained(rolled: Plan, name: str) -> list[Record]:
    """Return a journal up to the drain of its first host."""
    return [
        Opened(at=1, plan=rolled.digest),
        Began(at=1, wave=0),
        Intent(at=1, step="probe", hosts=(name,)),
        Result(at=2, host=name, step="probe", attempt=1, outcome=OK, joined="no"),
        Intent(at=2, step="drain", hosts=(name,)),
    ]


def test_a_host_that_was_drained_when_the_driver_ended_keeps_its_place() -> None:
    """It has our cordon, and it is unknown whether it is empty by now."""
    rolled = plan(8)
    name = rolled.waves[0].hosts[0]
    records = _until_drained(rolled, name)
    assert replay(rolled, records).unavailable == 0
    progress = replay(rolled, [*records, Opened(at=3, plan=rolled.digest)])
    assert progress.hosts[name].state == "waiting" and progress.unavailable == 1


@pytest.mark.parametrize(("joined", "is_touched"), [("no", False), ("unknown", True)])
def test_a_host_for_which_nothing_was_sent_is_not_touched(joined: Joined, is_touched: bool) -> None:
    rolled = plan(8)
    name = rolled.waves[0].hosts[0]
    records = [
        *_until_drained(rolled, name),
        Result(at=3, host=name, step="drain", attempt=1, outcome=OK),
        Intent(at=4, step="reimage", hosts=(name,)),
        Result(at=5, host=name, step="reimage", attempt=1, outcome=ended("timeout"), joined=joined),
    ]
    assert replay(rolled, records).hosts[name].touched is is_touched


@pytest.mark.parametrize("sent", [False, True])
def test_a_driver_that_was_killed_before_it_sent_anything_has_not_touched_a_host(
    tmp_path: Path, *, sent: bool
) -> None:
    """It is freed, not left cordoned, when the run is stopped."""
    rolled = plan(8)
    name = rolled.waves[0].hosts[0]
    path, host = tmp_path / "journal", rolled.host[name]
    with open_journal(path) as journal:
        for record in (
            *_until_drained(rolled, name),
            Result(at=3, host=name, step="drain", attempt=1, outcome=OK),
            Intent(at=4, step="reimage", hosts=(name,)),
        ):
            journal.append(record)
    instances = {(host.scale_set_id, host.instance)} if sent else set()
    with open_journal(path) as journal:
        progress = take_up(rolled, journal, rolled.hosts, at=5, sent=instances)
    assert progress.hosts[name].touched is sent and progress.unavailable == 1
    assert replay(rolled, read_journal(path)).hosts[name].touched is sent
    for record in (
        Intent(at=6, step="probe", hosts=(name,)),
        Stopped(at=7, reason="SIGTERM", asked=True),
        Result(at=8, host=name, step="probe", attempt=2, outcome=OK, joined="no"),
    ):
        apply(progress, record)
    assert progress.hosts[name].state == ("ended" if sent else "settled")


def test_hosts_for_which_nothing_can_be_sent_are_freed_and_not_said_to_be_reimaged() -> None:
    rolled = plan(8)
    name = rolled.waves[0].hosts[0]
    world = World(rolled, {name: "late looks"})
    progress, _ = roll(world)
    outcome = progress.hosts[name].outcome
    assert outcome and outcome.kind == "timeout" and "reimaged" not in outcome.detail
    assert not world.nodes[name].cordoned and not world.nodes[name].reimages
    check_end(world, progress)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_an_idle_host_that_could_not_be_freed_yet_is_probed_after_a_kill(*, is_stopped: bool) -> None:
    """It was to work until there is room, or until the stopped run goes on: it still runs the previous image."""
    rolled = plan(8)
    name = rolled.waves[0].hosts[0]
    records = [
        *_until_drained(rolled, name),
        Result(at=3, host=name, step="drain", attempt=1, outcome=ended("busy", BUSY)),
        Rested(at=4, wave=rest_wave(len(rolled.waves), [name], rolled.policy, rolled.digest)),
        Began(at=4, wave=len(rolled.waves)),
        Intent(at=5, step="await", hosts=(name,)),
        Result(at=6, host=name, step="await", attempt=1, outcome=OK),
        *([Stopped(at=7, reason="SIGTERM", asked=True)] if is_stopped else []),
        Intent(at=8, step="free", hosts=(name,)),
        Result(at=9, host=name, step="free", attempt=1, outcome=ended("timeout")),
    ]
    assert replay(rolled, records).hosts[name].state == "settled"
    progress = replay(rolled, [*records, Opened(at=10, plan=rolled.digest)])
    assert progress.hosts[name].state == "waiting"


def test_who_is_missing_before_a_roll_is_left_alone_and_counts() -> None:
    """Canaries among them swap places with hosts that are present; the limits include all missing hosts."""
    rolled = plan(300, max_unavailable="10%")
    canaries = rolled.waves[0].hosts
    canary, others = canaries[0], [h.name for h in rolled.hosts if h.name not in canaries][:19]
    world = World(rolled, missing_before={canary, *others})
    progress, records = roll(world)
    assert progress.finished and world.most_unavailable == 30
    assert reports.report(progress, records)["skipped"] == dict.fromkeys([canary, *others], "NotReady")
    assert progress.unavailable == 20 and progress.failed == 0
    assert not [entry for entry in world.log if entry[2] in world.missing_before]
    (chosen,) = [record for record in records if isinstance(record, Chosen)]
    assert chosen.places.keys() == {canary}
    assert replay(rolled, records).unavailable == 20
    check_end(world, progress)


def test_nothing_begins_where_more_are_missing_than_may_be_away() -> None:
    """R34: a third of the nodes is NotReady for another reason."""
    rolled = plan(300)
    world = World(rolled, missing_before={host.name for host in rolled.hosts[::3]})
    progress, _ = roll(world)
    assert progress.stopped == (
        "100 hosts unavailable, 100 of them before the run, which is the maximum: nothing can be started"
    )
    assert not {step for _, step, _ in world.log} & {"drain", "reimage"}
    check_end(world, progress)


def test_who_is_back_after_a_stop_counts_no_more() -> None:
    rolled = plan(300, max_unavailable="10%")
    world = World(rolled, missing_before={host.name for host in rolled.hosts[::15]})
    progress, records = roll(world, lambda: "reimage" in {step for _, step, _ in world.log})
    assert progress.stop_asked and progress.unavailable == 20
    world.missing_before.clear()
    world.surveyed_at = world.time + DAY
    records.append(Opened(at=world.time, plan=rolled.digest, retry=True))
    apply(progress, records[-1])
    begun = len(world.log)
    run(progress, world, records.append)
    taken = [at for at, step, _ in world.log[begun:] if step in ("drain", "reimage")]
    assert min(taken) >= world.surveyed_at, "nobody is taken out before it is known who is missing"
    assert progress.finished and progress.unavailable == 0
    assert reports.counts(progress.hosts.values())["ok"] == 300
    check_end(world, progress)


# Troubles of the cluster that aren't the roll's, by when they begin after its start.
TROUBLES: dict[str, Callable[[World], None]] = {
    "nodes of others fall, and stay so": lambda w: setattr(w, "foreign", lambda: 5 * (w.time > START + 600)),
    "a request that nobody decides on": lambda w: setattr(
        w, "pending", lambda: [w.time - START - 600] if w.time > START + 600 else []
    ),
    "no API server": lambda w: setattr(w, "outage", (START + 1200, START + 2400)),
    "no API server for hours": lambda w: setattr(w, "outage", (START + 1200, START + 6 * 3600)),
    "429 for an hour": lambda w: setattr(w, "is_red", lambda: START + 1200 < w.time < START + 4800),
    "others fall again and again": lambda w: setattr(w, "foreign", lambda: 3 * int((w.time - START) // 3600)),
}


@pytest.mark.parametrize("hours", [0.0, 4.0], ids=["idle", "busy"])
@pytest.mark.parametrize("troubles", [*([name] for name in TROUBLES), [*TROUBLES][:3]], ids="; ".join)
def test_trouble_elsewhere_turns_no_image_back(troubles: list[str], hours: float) -> None:
    """Hundred well hosts: whatever happens to the cluster around them, each one has the new image in the end."""
    world = World(plan(100), jobs=mixed_jobs(1, hours * 3600.0))
    for name in troubles:
        TROUBLES[name](world)
    progress, records = roll(world)
    assert progress.finished and not progress.failed and world.turned_at is None
    assert reports.counts(progress.hosts.values())["ok"] == 100
    # Each of them was noticed.
    assert any(isinstance(record, Gated) and record.verdict == "hold" for record in records)
    check_end(world, progress)
    assert replay(world.plan, records).hosts == progress.hosts


@pytest.mark.parametrize("is_rest", [False, True], ids=["in a wave", "in the last wave"])
def test_a_control_plane_that_stays_red_keeps_no_host_from_work(*, is_rest: bool) -> None:
    """It turns red when hosts are fenced: once the policy's patience is over, none is, until it is green again."""
    rolled = plan(300, gate=GateLimits(patience_seconds=300.0))
    # In a wave of many, hosts are drained together and wait for a job's end.
    jobs = (
        mixed_jobs(1, 2 * DAY) if is_rest else lambda name: 6000.0 if name in rolled.waves[3].hosts else 0.0
    )
    world = World(rolled, jobs=jobs)
    fenced: dict[float, int] = {}
    began: list[float] = []

    def look() -> bool:
        held = [n for n in world.nodes.values() if n.cordoned == "us" and not n.away and not n.reimages]
        fenced[world.time] = len(held)
        if not began and len(held) >= 5 and bool(world.rested) == is_rest:
            began.append(world.time)
        return bool(began) and world.time < began[0] + 7200

    world.is_red = look
    progress, records = roll(world)
    (red,) = began
    late = [number for at, number in fenced.items() if red + 300 + 120 < at < red + 7200]
    assert len(late) > 200 and not any(late)
    assert progress.finished and world.turned_at is None
    assert reports.counts(progress.hosts.values())["ok"] == 300
    check_end(world, progress)
    assert replay(world.plan, records).hosts == progress.hosts


def test_hosts_that_fall_with_their_new_image_turn_it_back() -> None:
    world = World(plan(300))

    def fall() -> bool:
        fine = [name for name, status in progress.hosts.items() if status.outcome and status.outcome.ok]
        world.not_ready.update(fine if len(fine) > 20 else ())
        return False

    progress = begin(world.plan)
    world.is_red = fall
    records: list[Record] = [Opened(at=world.time, plan=world.plan.digest)]
    apply(progress, records[0])
    run(progress, world, records.append)
    assert "that were fine are NotReady, limit 3" in progress.stopped and set(world.models.values()) == {OLD}
