"""Simulated runs that were stopped or killed are resumed: no host is told twice, and none waits in vain."""

from __future__ import annotations

from collections import Counter

import pytest

from image_builder.pool.plan.model import failed
from image_builder.pool.plan.plan import Plan
from image_builder.pool.plan.policy import Policy
from image_builder.pool.run.driver import run
from image_builder.pool.run.progress import apply, begin, replay
from image_builder.pool.run.records import Intent, Opened, Record
from image_builder.pool.run.state import Progress
from tests.support.pools.simulated.rollouts import Faults, World, make, simulate


def taken_up(plan: Plan, world: World, records: list[Record], *, retry: bool = False) -> Progress:
    """Resume a run from its records and drive it to its end, adding the records that follow."""
    progress = replay(plan, records)
    apply(progress, Opened(at=world.time, plan=plan.digest, retry=retry))
    run(progress, world, records.append)
    return progress


def test_asked_to_stop_it_finishes_what_is_in_work() -> None:
    world = World(make(600, Policy(soak_seconds=(0.0,))), Faults())
    progress, _, _ = simulate(world.plan, world.faults, world=world, stop_asked=lambda: len(world.fine) >= 20)
    assert progress.stopped == "a stop was requested"
    assert 20 <= len(world.fine) < 600
    assert world.touched == world.fine


def test_a_stopped_run_goes_on_where_it_was() -> None:
    """Stopped, repaired, resumed with a retry of what failed: each host joins once."""
    plan = make(500, Policy(soak_seconds=(0.0,)))
    broken = {name: failed("disk", 31) for name in plan.waves[1].hosts[:3]}
    world = World(plan, Faults(fates=dict(broken)))
    progress, _, records = simulate(plan, world.faults, world=world)
    assert progress.stopped and progress.failed == 3
    world.faults.fates.clear()
    again = taken_up(plan, world, records, retry=True)
    assert again.finished and again.failed == 0
    assert world.joins == Counter(dict.fromkeys(again.hosts, 1))


class Killed(Exception):  # noqa: N818 (nothing is wrong)
    """The driver's end, in the middle of anything."""


def killed_when_first_told(world: World) -> list[Record]:
    """Drive a run that is killed as soon as hosts were told to join; return its records."""

    def kill() -> None:
        if world.touched:
            raise Killed

    world.check = kill
    progress = begin(world.plan)
    records: list[Record] = [Opened(at=world.time, plan=world.plan.digest)]
    apply(progress, records[0])
    with pytest.raises(Killed):
        run(progress, world, records.append)
    world.check = lambda: None
    return records


def test_who_was_told_may_take_its_slot_and_its_time_after_a_kill_as_well() -> None:
    policy = Policy(canaries=10, max_unavailable="100%", join_rate=0.02, soak_seconds=(0.0,))
    world = World(make(60, policy), Faults())
    records = killed_when_first_told(world)
    assert max(world.over.values()) - world.time > 300, "a probe's own deadline, with all its repetitions"
    again = taken_up(world.plan, world, records)
    assert again.finished and again.failed == 0
    assert world.joins == Counter(dict.fromkeys(again.hosts, 1))


def test_a_run_on_workers_is_taken_up_as_soon_as_none_can_be_at_work_any_more() -> None:
    plan = make(100, Policy(workers=("ssh://worker",)))
    world = World(plan, Faults())
    records = killed_when_first_told(world)
    joined, killed = set(world.touched), len(records)
    began = world.time
    again = taken_up(plan, world, records)
    moments = [r.at for r in records[killed:] if isinstance(r, Intent) and joined & set(r.hosts)]
    assert again.finished and moments[0] == began + plan.policy.worker_gone_seconds == began + 24
    assert world.joins == Counter(dict.fromkeys(again.hosts, 1))


def test_without_another_chance_a_stopped_run_stops_again_and_touches_nobody() -> None:
    plan = make(500)
    names = plan.waves[1].hosts[:3]
    world = World(plan, Faults(fates={name: failed("disk", 31) for name in names}))
    progress, _, records = simulate(plan, world.faults, world=world)
    assert progress.stopped == "1 host of wave 1 failed, its budget is 0"
    touched = set(world.touched)
    again = taken_up(plan, world, records)
    # The hosts in work when it stopped failed as well.
    assert again.stopped == "3 hosts of wave 1 failed, its budget is 0" and world.touched == touched


def test_a_clock_that_was_set_back_makes_nobody_wait() -> None:
    plan = make(100)
    world = World(plan, Faults())
    progress, _, records = simulate(plan, world.faults, world=world, stop_asked=lambda: len(world.fine) > 8)
    assert progress.stopped
    day = 86400.0
    world.time -= day
    began = world.time
    again = taken_up(plan, world, records)
    assert again.finished and world.time - began < 3 * 3600
