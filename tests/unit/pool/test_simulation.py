"""7,500 simulated hosts in simulated time: every one is classified, and no limit is exceeded at any moment."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from image_builder.pool.plan.model import CLASSES, OK, Outcome, ended, failed
from image_builder.pool.plan.policy import Policy
from image_builder.pool.run.driver import Work
from image_builder.pool.run.gates import Reading
from image_builder.pool.run.progress import apply, begin, replay
from image_builder.pool.run.records import Gated, Intent, Passed, Record, Result
from image_builder.pool.run.state import Progress
from image_builder.pool.show import report as reports
from tests.support.pools.simulated.rollouts import BAD_DAY, START, WIDE, Faults, World, make, simulate


@pytest.fixture(scope="module")
def bad_day() -> tuple[Progress, World, list[Record]]:
    """Return a run of 7,500 hosts: 2 % fail and 0.5 % hang, tokens expire, and the control plane is throttled."""
    return simulate(make(7500, WIDE), BAD_DAY)


def _overlap(moments: Sequence[float], seconds: float) -> int:
    """Return the most moments within any span of this many seconds, its end excluded."""
    most = first = 0
    for last, at in enumerate(moments):
        while moments[first] <= at - seconds + 1e-9:
            first += 1
        most = max(most, last - first + 1)
    return most


def test_every_host_ends_in_exactly_one_class(bad_day: tuple[Progress, World, list[Record]]) -> None:
    progress, world, _ = bad_day
    assert progress.finished and not progress.stopped
    counts = reports.counts(progress.hosts.values())
    assert sum(counts[kind] for kind in CLASSES) == len(progress.hosts) == 7500
    for name, status in progress.hosts.items():
        assert status.outcome is not None
        match BAD_DAY.fate(name):
            case "well":
                expected = "ok"
            case Outcome(phase="verify") if name not in world.sample:
                expected = "ok"
            case Outcome() as fault:
                expected = fault.signature
            case _:
                expected = "unknown"
        assert status.outcome.signature == expected, name
    assert progress.failed == 7500 - counts["ok"] > 150
    assert world.fine == {n for n, s in progress.hosts.items() if s.outcome and s.outcome.ok}


def test_no_budget_is_exceeded(bad_day: tuple[Progress, World, list[Record]]) -> None:
    progress, world, _ = bad_day
    plan = progress.plan
    assert world.fine <= world.touched and 0 < world.most_unavailable <= plan.max_unavailable
    assert 0 < progress.failed <= plan.budget
    assert all(wave.failed <= wave.wave.budget for wave in progress.waves)


def test_none_joins_twice(bad_day: tuple[Progress, World, list[Record]]) -> None:
    progress, world, _ = bad_day
    assert set(world.joins.values()) == {1}
    well = {n for n in progress.hosts if BAD_DAY.fate(n) == "well"}
    assert well <= world.joins.keys()


def test_a_token_that_ran_out_costs_another_attempt_and_no_host(
    bad_day: tuple[Progress, World, list[Record]],
) -> None:
    progress, world, _ = bad_day
    assert world.refused_tokens > 20
    assert "failed credentials 71" not in progress.signatures
    again = [s for s in progress.hosts.values() if s.tries["bootstrap"] == 2 and s.outcome and s.outcome.ok]
    assert len(again) > 20


def test_the_join_rate_holds_in_every_second(bad_day: tuple[Progress, World, list[Record]]) -> None:
    slots = sorted(bad_day[1].slots)
    assert _overlap(slots, 1.0) <= 5
    assert _overlap(slots, 60.0) <= 300


def test_slices_are_of_at_most_500_hosts_and_few(bad_day: tuple[Progress, World, list[Record]]) -> None:
    world = bad_day[1]
    assert max(world.slices) <= 500
    # Each costs an Ansible process: 29 planned slices, and some for hosts that came back.
    assert len(world.slices) < 3 * sum(len(wave.slices) for wave in world.plan.waves)


def test_nothing_is_started_while_the_control_plane_is_red(
    bad_day: tuple[Progress, World, list[Record]],
) -> None:
    _, world, records = bad_day
    red = [r for r in records if isinstance(r, Gated) and r.verdict == "hold"]
    assert red and all("429" in r.reasons[0] for r in red)
    first, last = red[0].at, red[-1].at
    during = [r for r in records if isinstance(r, Intent) and r.step == "bootstrap" and first <= r.at <= last]
    assert during == []
    # It is read every 30 s, so it may be red for that long before the driver knows.
    assert world.red_starts <= 30 * 5 + 500


def test_a_wave_begins_after_the_one_before_it_was_decided_and_soaked(
    bad_day: tuple[Progress, World, list[Record]],
) -> None:
    progress = bad_day[0]
    for earlier, other in pairwise(progress.waves):
        assert earlier.passed is not None and earlier.began is not None and other.began is not None
        assert other.began >= earlier.passed + earlier.wave.soak_seconds
        assert other.began >= earlier.began + earlier.wave.cadence_seconds


def test_hosts_that_hang_hold_up_nobody(bad_day: tuple[Progress, World, list[Record]]) -> None:
    progress = bad_day[0]
    hung = [n for n in progress.hosts if str(BAD_DAY.fate(n)).startswith("hangs")]
    assert len(hung) > 20
    # Each of them takes its full 15 minutes; the run would take two hours longer if waves waited for that.
    for wave in progress.waves[3:]:
        assert wave.passed is not None and wave.began is not None
        assert wave.passed - wave.began < progress.plan.policy.deadlines.bootstrap


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("unavailable", ["3%", "40"])
@pytest.mark.parametrize("pools", [("gpu",), ("gpu-a", "gpu-b")], ids=len)
def test_what_is_unavailable_is_never_more_than_allowed(
    seed: int, unavailable: str, pools: tuple[str, ...]
) -> None:
    """Whichever pools the hosts belong to: the limit applies to all of them together."""
    policy = Policy(wave_budget="20%", budget="20%", max_unavailable=unavailable, same_share="20%")
    plan = make(800, policy, pools)
    world = World(plan, Faults(failures=0.02, hangs=0.005, seed=seed))
    at_once: set[int] = set()

    def check() -> None:
        missing = world.touched - world.fine
        assert len(missing) <= plan.max_unavailable
        at_once.add(len({pool_of[name] for name in missing}))

    pool_of = {host.name: host.pool for host in plan.hosts}
    world.check = check
    progress, _, _ = simulate(plan, world.faults, world=world)
    assert 0 < world.most_unavailable <= plan.max_unavailable
    assert max(at_once) == len(pools), "no two pools were in work at once"
    assert progress.finished or "unavailable" in progress.stopped


@pytest.mark.parametrize("seed", range(6))
def test_no_host_is_started_once_a_budget_is_spent(seed: int) -> None:
    plan = make(2000, Policy())
    progress, _, records = simulate(plan, Faults(failures=0.08, hangs=0.01, token_gap=60.0, seed=seed))
    assert progress.stopped and not progress.finished
    counted = begin(plan)
    spent = False
    for record in records:
        starts = isinstance(record, Intent) and record.step == "bootstrap"
        assert not (spent and starts)
        apply(counted, record)
        spent = counted.failed > plan.budget or any(w.failed > w.wave.budget for w in counted.waves)
    assert spent or "alike" in progress.stopped
    # In a stopped run, every touched host is classified, and no other was touched.
    for status in progress.hosts.values():
        assert status.state == "ended" or not status.touched
    assert sum(reports.counts(progress.hosts.values()).values()) == 2000


def test_a_replay_gives_exactly_the_state(bad_day: tuple[Progress, World, list[Record]]) -> None:
    progress, _, records = bad_day
    assert replay(progress.plan, records) == progress


def test_a_wave_is_over_only_when_what_is_left_may_fail(
    bad_day: tuple[Progress, World, list[Record]],
) -> None:
    progress, _, records = bad_day
    passed = [r for r in records if isinstance(r, Passed)]
    assert len(passed) == len(progress.waves) and any(r.stragglers for r in passed)
    for record in passed:
        assert record.failed + record.stragglers <= progress.waves[record.wave].wave.budget


def test_a_host_that_hangs_is_waited_for_where_its_failure_would_stop_the_run() -> None:
    plan = make(
        300, Policy(waves=("60",), max_unavailable="60", wave_budget="0", budget="50%", same_least=99)
    )
    progress, world, _ = simulate(plan, Faults(fates={plan.waves[1].hosts[5]: "hangs before"}))
    assert progress.stopped == "1 host of wave 1 failed, its budget is 0"
    assert not world.touched & set(plan.waves[2].hosts)


def test_what_an_earlier_attempt_says_late_is_not_taken_for_the_answer_of_this_one() -> None:
    plan = make(60)
    name = plan.waves[0].hosts[0]

    class Late(World):
        def probe(self, work: Sequence[Work]) -> None:
            for w in work:
                if w.host.name == name and w.attempt <= 2:
                    # After its deadline of 60 s; the second attempt is in progress by then.
                    self._later(75.0, w, "probe", ended("auth") if w.attempt == 1 else OK, "no")
                else:
                    super().probe([w])

    progress, world, _ = simulate(plan, Faults(), world=Late(plan, Faults()))
    assert progress.finished and world.joins[name] == 1
    assert progress.hosts[name].tries["probe"] == 3


def test_a_red_control_plane_holds_the_rest_of_a_wave() -> None:
    policy = Policy(
        waves=("100%",),
        slice_hosts=20,
        join_rate=0.5,
        max_unavailable="100%",
        soak_seconds=(0.0,),
        cadence_seconds=0,
    )
    faults = Faults(throttled=[(300.0, 420.0)])
    progress, _, records = simulate(make(300, policy), faults)
    starts = [r.at - START for r in records if isinstance(r, Intent) and r.step == "bootstrap"]
    red = [r.at - START for r in records if isinstance(r, Gated) and r.verdict == "hold"]
    assert progress.finished
    assert any(at < red[0] for at in starts) and any(at > red[-1] for at in starts)
    assert not [at for at in starts if red[0] <= at <= red[-1]] and red[-1] - red[0] > 60


def test_it_is_the_same_every_time() -> None:
    first, again = (simulate(make(300, WIDE), Faults(failures=0.02, token_gap=60.0))[2] for _ in range(2))
    assert first == again


def test_a_bad_image_reaches_only_the_canaries() -> None:
    plan = make(7500)
    fates = {host.name: failed("image", 11) for host in plan.hosts if host.image == "image-1"}
    progress, world, _ = simulate(plan, Faults(fates=dict(fates)))
    assert progress.stopped.startswith(("1 host of canaries failed", "4 hosts of canaries failed"))
    assert world.touched == set(plan.waves[0].hosts)


@pytest.mark.parametrize("kind", ["refused", "timeout", "auth"])
def test_hosts_that_are_not_reached_count_as_failed(kind: str) -> None:
    """With too many unreachable hosts in a wave, no host of the next one is touched."""
    plan = make(1000)
    fates = {name: ended(kind) for name in plan.waves[1].hosts[:3]}  # type: ignore[arg-type]
    progress, world, records = simulate(plan, Faults(fates=dict(fates)))
    assert progress.began == 2 and "wave 1 failed" in progress.stopped
    later = {name for wave in plan.waves[2:] for name in wave.hosts}
    assert not world.touched & later
    assert not {r.host for r in records if isinstance(r, Result)} & later


def test_equal_failures_stop_a_run_below_its_budget() -> None:
    plan = make(1000, Policy(wave_budget="50%", budget="50%"))
    names = plan.waves[2].hosts[:3]
    progress, _, _ = simulate(plan, Faults(fates={name: failed("gpu", 61) for name in names}))
    assert progress.stopped == "3 hosts of wave 2 failed alike: failed gpu 61"
    others = {n: failed("gpu", 61 + k) for k, n in enumerate(names)}
    progress, _, _ = simulate(plan, Faults(fates=dict(others)))
    assert progress.finished


def test_a_control_plane_that_stays_red_stops_the_run() -> None:
    progress, world, _ = simulate(make(300), Faults(throttled=[(0.0, 1e9)]))
    assert progress.stopped.startswith("the control plane has been red for more than 600 s: 3000 of 30000")
    assert not world.touched and world.time - START < 700


def test_a_red_reading_makes_the_soak_begin_anew() -> None:
    # The canaries are done after a minute; red at 500 s delays the next wave by another 900 s.
    progress, _, _ = simulate(make(300), Faults(throttled=[(500.0, 530.0)]))
    began = progress.waves[1].began
    assert began is not None and began - START >= 500 + 900


def test_nodes_that_fall_stop_the_run_at_once() -> None:
    world = World(make(300), Faults())
    waves = [{*wave.hosts} for wave in world.plan.waves[:3]]

    def fall() -> None:
        if world.fine >= waves[0] | waves[1]:
            world.reading = Reading(fallen=tuple(world.fine), nodes=300)

    world.check = fall
    progress, _, _ = simulate(world.plan, world.faults, world=world)
    assert "6 hosts of this run that were fine are NotReady, limit 3" in progress.stopped
    assert world.touched == waves[0] | waves[1]


def test_of_a_bring_up_the_sample_is_verified_and_whoever_was_a_member_before() -> None:
    world = World(make(600, Policy(soak_seconds=(0.0,))), Faults())
    members = world.plan.waves[2].hosts[:5]
    world.joins.update(members)
    progress, _, records = simulate(world.plan, world.faults, world=world)
    verified = {name for name, status in progress.hosts.items() if status.verified}
    assert verified == world.sample | set(members) and len(verified) < 300
    report = reports.report(progress, records)
    assert report["verified"] == len(verified) == sum(wave["verified"] for wave in report["waves"])
    assert f"600 hosts: 600 ok; {len(verified)} verified" in reports.text(report)
    # A resume is a replay: it draws nothing again.
    assert {n for n, s in replay(world.plan, records).hosts.items() if s.verified} == verified


def test_a_failed_sample_stops_the_run() -> None:
    plan = make(600, Policy(soak_seconds=(0.0,)))
    sampled = plan.waves[2].verify[:5]
    progress, _, _ = simulate(plan, Faults(fates=dict.fromkeys(sampled, failed("verify", 1))))
    assert progress.stopped and progress.signatures == {"failed verify 1": 5}


def test_where_the_image_does_it_all_nothing_is_pushed() -> None:
    policy = Policy(mode="verify", verify="10%", soak_seconds=(0.0,))
    world = World(make(400, policy), Faults())
    world.joins.update(host.name for host in world.plan.hosts)
    progress, _, _ = simulate(world.plan, world.faults, world=world)
    assert progress.finished and not world.touched
    verified = [s for s in progress.hosts.values() if s.tries["verify"]]
    assert len(verified) == sum(len(wave.verify) for wave in progress.plan.waves)
    assert 40 <= len(verified) < 60


def test_where_the_image_does_it_all_it_is_waited_for_and_who_is_no_member_is_not_fine() -> None:
    world = World(
        make(100, Policy(mode="verify", budget="5%", wave_budget="50%", soak_seconds=(0.0,))), Faults()
    )
    never = world.plan.waves[-1].hosts[0]

    def join() -> None:
        if world.time > START + 400:
            world.joins.update({host.name: 1 for host in world.plan.hosts if host.name != never})
            world.check = lambda: None

    world.check = join
    progress, _, _ = simulate(world.plan, world.faults, world=world)
    assert progress.finished and not world.touched
    assert progress.signatures == {"failed bootstrap 5": 1} and not progress.hosts[never].tries["verify"]


_FAULTS = st.builds(
    Faults,
    failures=st.floats(0, 0.3),
    hangs=st.floats(0, 0.1),
    token_gap=st.sampled_from([0.0, 30.0, 450.0]),
    throttled=st.lists(st.integers(0, 3000).map(lambda n: (float(n), n + 90.0)), max_size=2),
    seed=st.integers(0, 10**6),
)
_POLICIES = st.builds(
    Policy,
    waves=st.sampled_from([("10%", "40"), ("5",), ("100%",)]),
    slice_hosts=st.sampled_from([3, 20, 500]),
    join_rate=st.sampled_from([0.5, 5.0]),
    max_unavailable=st.sampled_from(["2", "10%", "100%"]),
    wave_budget=st.sampled_from(["0", "10%", "100%"]),
    budget=st.sampled_from(["2%", "100%"]),
    same_least=st.sampled_from([2, 60]),
    soak_seconds=st.sampled_from([(0.0,), (300.0, 0.0)]),
    retries=st.integers(0, 2),
    verify=st.sampled_from(["0", "10%", "100%"]),
)


@settings(max_examples=60, deadline=None)
@given(_FAULTS, _POLICIES)
def test_whatever_goes_wrong_the_limits_hold(faults: Faults, policy: Policy) -> None:
    plan = make(60, policy)
    progress, world, records = simulate(plan, faults)
    assert progress.finished != bool(progress.stopped)
    assert not world.joins or max(world.joins.values()) == 1
    for status in progress.hosts.values():
        assert status.state == "ended" or not (progress.finished or status.touched)
    counted, spent = begin(plan), False
    for record in records:
        starts = isinstance(record, Intent) and record.step == "bootstrap"
        assert not (starts and spent)
        apply(counted, record)
        assert sum(s.unavailable and s.touched for s in counted.hosts.values()) <= plan.max_unavailable
        spent = counted.failed > plan.budget or any(w.failed > w.wave.budget for w in counted.waves)
    assert counted == progress
    assert _overlap(sorted(world.slots), 20.0) <= 20 * policy.join_rate + 1
