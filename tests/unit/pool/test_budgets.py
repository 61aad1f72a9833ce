"""The limits at which a run stops or a wave is over, and one host on either side of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from image_builder.pool.plan.model import OK, Outcome
from image_builder.pool.plan.plan import Plan
from image_builder.pool.plan.policy import Policy
from image_builder.pool.run import budgets, rolling
from image_builder.pool.run.progress import begin
from image_builder.pool.run.state import Progress, State
from tests.support.pools.simulated import rolls
from tests.support.pools.simulated.rollouts import make

NOW = 10_000.0
BROKEN = Outcome(kind="failed", phase="disk", code=31)


@pytest.fixture
def plan() -> Plan:
    """Return two waves of 100 hosts, without canaries: 8 may fail in each, 10 in all; 6 alike in a wave, 9 in all."""
    planned = make(
        200, Policy(waves=("100", "100"), canaries=1, budget="5%", same_share="4.5%", straggler_factor=2.0)
    )
    names = [host.name for host in planned.hosts]
    first = planned.waves[0]
    waves = tuple(
        first.model_copy(
            update={
                "name": f"wave-{n}",
                "slices": (tuple(part),),
                "verify": tuple(part),
                "budget": 8,
                "same": 6,
            }
        )
        for n, part in enumerate((names[:100], names[100:]), 1)
    )
    return planned.model_copy(update={"waves": waves})


@pytest.fixture
def progress(plan: Plan) -> Progress:
    """Return a run whose first wave has begun, with hosts that were reached at 0."""
    progress = begin(plan)
    progress.began = 1
    progress.waves[0].began = 0.0
    return progress


def move(progress: Progress, names: Sequence[str], state: State, *, seconds: float | None = None) -> None:
    """Put hosts into a state; those in work have been in it for ``seconds``, those that ended took that long."""
    for name in names:
        host = progress.hosts[name]
        of_host = progress.waves[host.wave]
        of_host.remove(name, host.state)
        of_host.add(name, state)
        host.state, host.started = state, 0.0
        if seconds is not None:
            host.since = NOW - seconds
        if state == "ended":
            host.outcome, host.seconds = OK, {"bootstrap": seconds or 0.0}


def wave(progress: Progress, number: int = 0) -> list[str]:
    return list(progress.waves[number].wave.hosts)


def slow(progress: Progress, unfinished: int, *, durations: Sequence[float], seconds: float) -> list[str]:
    """End all but ``unfinished`` hosts of the first wave, left joining for ``seconds``; return their names."""
    names = wave(progress)
    done, rest = names[: len(names) - unfinished], names[len(names) - unfinished :]
    for number, name in enumerate(done):
        move(progress, [name], "ended", seconds=durations[number % len(durations)])
    move(progress, rest, "joining", seconds=seconds)
    return rest


# -- the run stops ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("failed", "stops"), [(10, False), (11, True)])
def test_the_runs_budget(progress: Progress, failed: int, stops: bool) -> None:
    progress.failed = failed
    assert (f"{failed} hosts failed, the run's budget is 10" == budgets.stop_reason(progress)) is stops


@pytest.mark.parametrize(("failed", "stops"), [(8, False), (9, True)])
def test_a_waves_budget(progress: Progress, failed: int, stops: bool) -> None:
    progress.waves[0].failed = failed
    assert ("budget is 8" in budgets.stop_reason(progress)) is stops


@pytest.mark.parametrize(("alike", "stops"), [(8, False), (9, True)])
def test_identical_failures_of_the_run(progress: Progress, alike: int, stops: bool) -> None:
    progress.signatures[BROKEN.signature] = alike
    assert ("hosts failed alike: failed disk 31" in budgets.stop_reason(progress)) is stops


@pytest.mark.parametrize(("alike", "stops"), [(5, False), (6, True)])
def test_identical_failures_of_a_wave(progress: Progress, alike: int, stops: bool) -> None:
    progress.waves[0].signatures[BROKEN.signature] = alike
    assert ("hosts of wave-1 failed alike: failed disk 31" in budgets.stop_reason(progress)) is stops


def test_a_wave_that_has_not_begun_stops_nothing(progress: Progress) -> None:
    progress.waves[1].failed = 99
    assert budgets.stop_reason(progress) == ""


# -- a wave is over without its stragglers ---------------------------------------------------------------------


def test_a_wave_is_over_when_all_its_hosts_ended(progress: Progress) -> None:
    move(progress, wave(progress), "ended", seconds=10.0)
    passed = budgets.decide(progress, 0, NOW)
    assert passed is not None and (passed.wave, passed.failed, passed.stragglers) == (0, 0, 0)


def test_stragglers_are_not_waited_for(progress: Progress) -> None:
    """95 % took up to 20 s, so the limit is twice that."""
    slow(progress, 4, durations=[20.0], seconds=40.1)
    passed = budgets.decide(progress, 0, NOW)
    assert passed is not None and passed.stragglers == 4


def test_who_is_not_yet_slow_enough_is_waited_for(progress: Progress) -> None:
    slow(progress, 4, durations=[20.0], seconds=39.9)
    assert budgets.decide(progress, 0, NOW) is None


def test_one_host_that_is_not_slow_holds_the_wave(progress: Progress) -> None:
    rest = slow(progress, 4, durations=[20.0], seconds=100.0)
    progress.hosts[rest[0]].since = NOW - 1
    assert budgets.decide(progress, 0, NOW) is None


def test_the_limit_is_of_the_95th_percentile_and_not_of_the_median(progress: Progress) -> None:
    """One in ten took 60 s: the 95th percentile. With the median, 10 s, 50 s would be too long."""
    slow(progress, 4, durations=[10.0] * 9 + [60.0], seconds=50.0)
    assert budgets.straggler_seconds(progress, progress.waves[0], "bootstrap") == 120.0
    assert budgets.decide(progress, 0, NOW) is None


def test_the_slot_before_a_join_is_no_time_of_the_hosts(progress: Progress) -> None:
    rest = slow(progress, 4, durations=[20.0], seconds=60.0)
    for name in rest:
        progress.hosts[name].delay = 30.0
    assert budgets.decide(progress, 0, NOW) is None


@pytest.mark.parametrize(("ended", "limit"), [(9, None), (10, 40.0)])
def test_of_fewer_than_ten_durations_nothing_follows(
    progress: Progress, ended: int, limit: float | None
) -> None:
    move(progress, wave(progress)[:ended], "ended", seconds=20.0)
    assert budgets.straggler_seconds(progress, progress.waves[0], "bootstrap") == limit


def test_how_long_failed_hosts_took_does_not_count(progress: Progress) -> None:
    names = wave(progress)
    move(progress, names[:20], "ended", seconds=20.0)
    move(progress, names[20:40], "ended", seconds=900.0)
    for name in names[20:40]:
        progress.hosts[name].outcome = BROKEN
    assert budgets.straggler_seconds(progress, progress.waves[0], "bootstrap") == 40.0


def test_stragglers_must_fit_into_the_waves_budget(progress: Progress) -> None:
    """All remaining hosts may fail: six remain, two have failed, eight may."""
    slow(progress, 6, durations=[20.0], seconds=100.0)
    progress.waves[0].failed = 2
    assert budgets.decide(progress, 0, NOW) is not None
    progress.waves[0].failed = 3
    assert budgets.decide(progress, 0, NOW) is None


def test_stragglers_must_fit_into_the_runs_budget(progress: Progress) -> None:
    """Hosts of earlier waves are still out: the run can't afford all of them."""
    slow(progress, 6, durations=[20.0], seconds=100.0)
    progress.failed = 4
    assert budgets.decide(progress, 0, NOW) is not None
    progress.failed = 5
    assert budgets.decide(progress, 0, NOW) is None


@pytest.mark.parametrize("state", ["ready", "joined"])
def test_a_host_that_nobody_has_told_or_verified_keeps_the_wave(progress: Progress, state: State) -> None:
    rest = slow(progress, 4, durations=[20.0], seconds=100.0)
    move(progress, rest[:1], state, seconds=100.0)
    assert budgets.decide(progress, 0, NOW) is None


def test_a_host_that_nothing_was_begun_on_keeps_the_wave(progress: Progress) -> None:
    rest = slow(progress, 4, durations=[20.0], seconds=100.0)
    progress.hosts[rest[0]].started = None
    assert budgets.decide(progress, 0, NOW) is None


def test_a_host_that_is_to_be_repeated_straggles(progress: Progress) -> None:
    rest = slow(progress, 4, durations=[20.0], seconds=100.0)
    move(progress, rest[:1], "waiting", seconds=1.0)
    assert budgets.decide(progress, 0, NOW) is not None


def test_hosts_of_a_gang_are_admitted_together() -> None:
    planned = rolls.plan(400, max_unavailable="5")
    progress = begin(planned)
    names = [host.name for host in planned.hosts if host.zone == planned.hosts[0].zone][:8]
    unit = tuple(names[2:6])
    for name in unit:
        progress.hosts[name].unit = unit
    assert budgets.admitted(progress, names) == [*names[:2], *names[6:8]]
    assert budgets.admitted(progress, [*unit, names[0], names[1]]) == [*unit, names[0]]
    # One host of the gang is on its way.
    progress.hosts[unit[0]].state = "freeing"
    assert budgets.admitted(progress, [*unit[1:], names[0]]) == [names[0]]
    # It no longer is.
    progress.hosts[unit[0]].state = "ended"
    assert budgets.admitted(progress, unit[1:]) == list(unit[1:])


def test_a_gang_that_never_fits_is_known() -> None:
    planned = rolls.plan(400, max_unavailable="50%")
    progress = begin(planned)
    zone = [host.name for host in planned.hosts if host.zone == planned.hosts[0].zone]
    half = len(zone) // 2
    assert not budgets.too_many(progress, zone[:half])
    assert f"{half + 1} hosts of zone" in budgets.too_many(progress, zone[: half + 1])
    assert "400 hosts, of which 200 may be unavailable" in budgets.too_many(progress, list(planned.host))


@pytest.mark.parametrize("restored", [True, False])
def test_a_host_is_restored_once(progress: Progress, *, restored: bool) -> None:
    name = progress.waves[0].wave.hosts[0]
    move(progress, [name], "ended")
    status = progress.hosts[name]
    status.tries["reimage"], status.outcome = 1, BROKEN
    assert rolling.to_restore(progress) == [name]
    status.restored = restored
    assert rolling.to_restore(progress) == []
