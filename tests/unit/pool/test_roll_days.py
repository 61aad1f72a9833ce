"""A roll of a fleet whose jobs take days, in simulated time: the benchmark's figures for 7,500 hosts, with 400."""

from __future__ import annotations

from pathlib import Path

import pytest

from image_builder.pool.plan.policy import Roll
from image_builder.pool.show.report import counts
from tests.bench.roll_days import measure, requests_of_hosts
from tests.support.pools.simulated.days import Days
from tests.support.pools.simulated.rolls import plan, roll

HOSTS = 400


def test_jobs_of_days_cost_days_and_hardly_any_host_hours() -> None:
    figures = measure(HOSTS)
    assert (figures["ok"], figures["skipped"], figures["throttled"]) == (HOSTS, 0, 0)
    # A host is without a job while it is drained, gets its image and is verified: half an hour of three days.
    assert figures["gpu_hours_idle_percent"] <= 1 and figures["throttle_share"] <= 0.5
    assert 3 <= figures["roll_days"] <= 4.5 and figures["rest_hosts"] > HOSTS / 2
    assert figures["most_unavailable"] <= HOSTS * 0.02 and figures["most_fenced"] == HOSTS / 2


def test_a_host_takes_three_requests_and_the_lists_of_its_scale_set(tmp_path: Path) -> None:
    _, other = requests_of_hosts(tmp_path)
    assert len([path for _, _, path in other if not path.endswith("/virtualMachines")]) == 3


@pytest.mark.parametrize(("gap", "share"), [(600.0, 0.9), (0.0, 0.2)])
def test_without_cordons_at_work_only_gaps_between_jobs_are_taken(gap: float, share: float) -> None:
    """If a queue fills each host at once, none is idle when it is looked at, and nearly all are skipped."""
    world = Days(plan(200, roll=Roll(max_fenced="0")), gap=gap)
    progress, _ = roll(world)
    totals = counts(progress.hosts.values())
    assert totals["ok"] + totals["skipped"] == 200
    assert (totals["ok"] / 200 >= share) == (gap > 0)
