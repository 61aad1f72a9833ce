"""A roll with a deadline: which jobs are evicted after it, and which aren't."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import ValidationError

from image_builder.pool.plan.plan import Plan
from image_builder.pool.plan.policy import GateLimits, Roll
from image_builder.pool.run.driver import run
from image_builder.pool.run.progress import begin, replay
from image_builder.pool.run.records import Opened, Record
from image_builder.pool.show import report as reports
from tests.support.pools.simulated.rollouts import START
from tests.support.pools.simulated.rolls import BUSY, NEW, OLD, World, check_end, mixed_jobs, plan, roll

DAY = 86400.0
CALM = GateLimits(interval_seconds=1800.0)
DEADLINE = "2026-01-02T00:00:00Z"


def overdue(hosts: int, **policy: Any) -> Plan:
    """Return the plan of a roll of a busy fleet, with a deadline six hours after its start."""
    at = datetime.fromtimestamp(START + 6 * 3600.0, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return plan(
        hosts, gate=CALM, **{"deadline": at, "max_unavailable": "10", "max_wait_seconds": DAY, **policy}
    )


def test_after_its_deadline_a_roll_waits_for_nobody() -> None:
    world = World(overdue(100), jobs=mixed_jobs(4, 10 * DAY))
    progress, records = roll(world)
    assert progress.finished and {node.build for node in world.nodes.values()} == {NEW}
    assert world.evicted and min(world.evicted.values()) >= START + 6 * 3600.0
    assert world.most_unavailable <= world.plan.max_unavailable
    assert reports.report(progress, records)["evicted"] == {name: [BUSY] for name in sorted(world.evicted)}
    check_end(world, progress)


def test_without_a_deadline_no_job_is_evicted() -> None:
    world = World(overdue(100, deadline=""), jobs=mixed_jobs(4, 10 * DAY))
    progress, _ = roll(world)
    assert progress.finished and not world.evicted and OLD in {node.build for node in world.nodes.values()}


def test_gangs_are_evicted_whole_or_not_at_all() -> None:
    """A gang of four hosts fits within the number that may be away; one of twelve never does."""
    rolled = overdue(100)
    names = [host.name for host in sorted(rolled.hosts, key=lambda host: host.zone)]
    gangs = [tuple(names[first : first + 4]) for first in range(0, 80, 4)]
    huge = tuple(names[80:92])
    world = World(rolled, jobs=lambda _: 10 * DAY)
    world.gangs = {name: gang for gang in (*gangs, huge) for name in gang}
    progress, _ = roll(world)
    assert progress.finished
    for gang in gangs:
        assert len({world.evicted[name] for name in gang}) == 1
    assert not world.evicted.keys() & set(huge)
    details = {progress.hosts[name].outcome.detail for name in huge}  # type: ignore[union-attr]
    assert details == {f"its gang runs on 12 hosts, of which {rolled.max_unavailable} may be unavailable"}
    check_end(world, progress)


def test_a_disruption_budget_holds_after_the_deadline() -> None:
    rolled = overdue(100)
    held = {host.name: "disruption budget" for host in rolled.hosts[:5]}
    world = World(rolled, dict(held), jobs=lambda _: 10 * DAY)  # type: ignore[arg-type]
    progress, _ = roll(world)
    outcomes = {name: progress.hosts[name].outcome for name in held}
    assert {outcome.kind for outcome in outcomes.values() if outcome} == {"skipped"}
    assert world.evicted.keys() == world.nodes.keys() - held.keys()
    check_end(world, progress)


def test_a_driver_that_goes_on_after_the_deadline_evicts_the_rest() -> None:
    rolled = overdue(100)
    world, records = World(rolled, jobs=lambda _: 10 * DAY), list[Record]()
    progress = begin(rolled)

    def write(record: Record) -> None:
        if len(world.evicted) >= 20:
            raise KeyboardInterrupt
        records.append(record)

    for writer in (write, records.append):
        opened = Opened(at=world.time, plan=rolled.digest, evicts=rolled.deadline)
        records.append(opened)
        progress = replay(rolled, records)
        with suppress(KeyboardInterrupt):
            run(progress, world, writer)
        world.kill()
    assert progress.finished and world.evicted.keys() == world.nodes.keys()
    check_end(world, progress)


def test_a_deadline_is_a_time_with_its_zone() -> None:
    assert Roll(deadline=DEADLINE).deadline_at == datetime.fromisoformat(DEADLINE).timestamp()
    assert Roll().deadline_at > 1e12 and "deadline" not in Roll().model_dump()
    for text in ("soon", "2026-01-02", "2026-01-02T00:00:00"):
        with pytest.raises(ValidationError):
            Roll(deadline=text)
