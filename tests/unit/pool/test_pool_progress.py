"""One host's path through a run, record by record; and the counts that follow it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from image_builder.pool.plan.model import OK, Class, Joined, Outcome, ended, failed
from image_builder.pool.plan.plan import Plan
from image_builder.pool.plan.policy import Policy
from image_builder.pool.run.progress import apply, begin, replay
from image_builder.pool.run.records import Began, Intent, Opened, Record, Result
from image_builder.pool.run.resume import reconcile
from image_builder.pool.run.state import RUNNING, HostStatus, Progress
from image_builder.pool.show import report
from tests.support.pools.simulated.rollouts import Faults, make, make_hosts, simulate

PLAN = make(9, Policy(retries=1, retry_seconds=10.0))
NAME = PLAN.waves[0].hosts[0]


class Story:
    """A run of which only one host matters."""

    def __init__(self, plan: Plan = PLAN) -> None:
        self.progress = begin(plan)
        self.at = 100.0
        self.records: list[Record] = []
        self.tell(Opened(at=self.at, plan=plan.digest))
        self.tell(Began(at=self.at, wave=0))

    @property
    def host(self) -> HostStatus:
        return self.progress.hosts[NAME]

    def tell(self, record: Record) -> None:
        self.records.append(record)
        apply(self.progress, record)

    def open(self, *, retry: bool = False) -> str:
        """Reopen the journal; return the host's state."""
        self.tell(Opened(at=self.at, plan=PLAN.digest, retry=retry))
        return self.host.state

    def take(self, step: str, outcome: Outcome, joined: Joined = "unknown") -> str:
        """Take a step that ends with ``outcome``; return the host's state."""
        self.at = max(self.at, self.host.not_before) + 1
        self.tell(Intent(at=self.at, step=step, hosts=(NAME,)))  # type: ignore[arg-type]
        assert self.host.state == RUNNING[step]  # type: ignore[index]
        attempt = self.host.tries[step]  # type: ignore[index]
        self.tell(
            Result(at=self.at, host=NAME, step=step, attempt=attempt, outcome=outcome, joined=joined)  # type: ignore[arg-type]
        )
        return self.host.state


@pytest.fixture
def story() -> Story:
    return Story()


def test_a_healthy_host(story: Story) -> None:
    assert story.take("probe", OK, "no") == "ready"
    assert not story.host.unavailable
    assert story.take("bootstrap", OK, "yes") == "joined"
    assert story.progress.unavailable == 1
    assert story.take("verify", OK) == "ended"
    assert story.host.outcome == OK and story.progress.unavailable == 0


def test_a_member_already_is_only_verified(story: Story) -> None:
    assert story.take("probe", OK, "yes") == "joined"


def test_whose_image_does_it_all_has_the_time_for_it() -> None:
    story = Story(make(9, Policy(mode="verify", verify="0%")))
    assert story.take("probe", OK, "no") == "waiting"
    assert story.take("probe", OK, "no") == "waiting" and story.host.not_before > story.at
    story.at += 900
    assert story.take("probe", OK, "no") == "ended"
    assert story.host.outcome and story.host.outcome.signature == "failed bootstrap 5"
    assert story.open(retry=True) == "waiting"
    assert story.take("probe", OK, "no") == "waiting"
    assert story.take("probe", failed("credentials", 64), "no") == "ended"
    assert story.host.outcome == failed("credentials", 64)


@pytest.mark.parametrize("outcome", [OK, failed("credentials", 64)])
def test_to_be_checked_nobody_need_be_a_member(outcome: Outcome) -> None:
    story = Story(make(9, Policy(mode="check")))
    assert story.take("probe", outcome, "no") == "joined"


def test_who_may_be_a_member_is_left_alone(story: Story) -> None:
    assert story.take("probe", OK, "unknown") == "ended"
    assert story.host.outcome and story.host.outcome.kind == "unknown"


@pytest.mark.parametrize("kind", ["refused", "timeout", "dropped"])
def test_a_host_that_is_not_reached_is_asked_again_later(story: Story, kind: Class) -> None:
    assert story.take("probe", ended(kind)) == "waiting"
    assert story.host.not_before == story.at + 10
    assert story.take("probe", ended(kind)) == "ended"
    assert story.host.outcome and story.host.outcome.kind == kind
    assert story.progress.signatures == Counter({kind: 1})


@pytest.mark.parametrize(("phase", "state"), [("disk", "ready"), ("gpu", "ready"), ("bootstrap", "ended")])
def test_who_failed_before_its_kubelet_may_be_told(story: Story, phase: str, state: str) -> None:
    assert story.take("probe", failed(phase, 1), "no") == state


@pytest.mark.parametrize("kind", ["auth", "host key", "sudo"])
def test_what_stays_wrong_is_not_asked_again(story: Story, kind: Class) -> None:
    assert story.take("probe", ended(kind)) == "ended"


@pytest.mark.parametrize("kind", ["dropped", "timeout", "refused", "unknown"])
def test_after_a_partition_it_is_found_out_whether_the_host_joined(story: Story, kind: Class) -> None:
    story.take("probe", OK, "no")
    assert story.take("bootstrap", ended(kind)) == "waiting"
    assert story.host.unavailable
    assert story.take("probe", OK, "yes") == "joined"
    assert story.host.tries["bootstrap"] == 1


def test_a_host_that_did_not_join_may_be_told_again_so_often(story: Story) -> None:
    for _ in range(2):
        assert story.take("probe", OK, "no") == "ready"
        assert story.take("bootstrap", ended("dropped")) == "waiting"
    assert story.take("probe", OK, "no") == "ended"
    assert story.host.outcome and "was told to join 2 times" in story.host.outcome.detail


def test_touched_and_lost_is_unknown_and_not_what_the_probe_said(story: Story) -> None:
    story.take("probe", OK, "no")
    story.take("bootstrap", ended("timeout"))
    story.take("probe", ended("timeout"))
    assert story.take("probe", ended("refused")) == "ended"
    assert story.host.outcome and story.host.outcome.signature == "unknown"
    assert "refused" in story.host.outcome.detail


@pytest.mark.parametrize(
    ("outcome", "joined", "state"),
    [
        (failed("credentials", 71), "no", "waiting"),
        (failed("network", 21), "no", "waiting"),
        (ended("refused"), "no", "waiting"),
        (ended("dropped"), "yes", "waiting"),
        (failed("disk", 31), "no", "ended"),
        (failed("gpu", 61), "unknown", "ended"),
        # The host is a member: starting again would be a second join.
        (failed("join", 81), "yes", "ended"),
        (failed("join", 81), "unknown", "ended"),
        (ended("auth"), "unknown", "ended"),
        (ended("unknown"), "no", "ended"),
    ],
)
def test_what_follows_a_failed_bootstrap(story: Story, outcome: Outcome, joined: Joined, state: str) -> None:
    story.take("probe", OK, "no")
    assert story.take("bootstrap", outcome, joined) == state


def test_a_verification_that_got_no_answer_is_repeated_and_one_that_did_is_not(story: Story) -> None:
    story.take("probe", OK, "yes")
    assert story.take("verify", ended("dropped")) == "joined"
    assert story.take("verify", failed("verify", 101)) == "ended"
    assert story.progress.failed == 1


@pytest.mark.parametrize(
    ("steps", "before", "after"),
    [
        (["probe"], "probing", "waiting"),
        (["probe", "bootstrap"], "joining", "waiting"),
        (["probe", "bootstrap", "verify"], "verifying", "joined"),
    ],
)
def test_taken_up_after_a_kill_what_was_in_work_is_looked_at_anew(
    story: Story, steps: list[str], before: str, after: str
) -> None:
    for step in steps[:-1]:
        story.take(step, OK, "yes" if step == "bootstrap" else "no")
    story.tell(Intent(at=story.at, step=steps[-1], hosts=(NAME,)))  # type: ignore[arg-type]
    assert story.host.state == before
    story.tell(Opened(at=story.at, plan=PLAN.digest))
    assert story.host.state == after
    assert story.host.touched == (len(steps) > 1)


@pytest.mark.parametrize(("workers", "waits"), [((), 0.0), (("ssh://worker",), 34.0)])
def test_nobody_is_asked_while_a_worker_may_still_tell_hosts(workers: tuple[str, ...], waits: float) -> None:
    """Nor when the run is resumed meanwhile; and no longer than that if the clock was set back."""
    plan = make(9, Policy(workers=workers, worker_silent_seconds=30))
    first, other = plan.hosts[0].name, plan.hosts[1].name
    records: list[Record] = [
        Opened(at=100, plan=plan.digest),
        Began(at=100, wave=0),
        Intent(at=100, step="probe", hosts=(other,)),
        Intent(at=100, step="bootstrap", hosts=(first,)),
        Opened(at=200, plan=plan.digest),
    ]
    progress = replay(plan, records)
    assert progress.hosts[first].not_before == 200 + waits and progress.hosts[other].not_before == 0
    apply(progress, Opened(at=210, plan=plan.digest))
    assert progress.hosts[first].not_before == 200 + waits
    apply(progress, Opened(at=50, plan=plan.digest))
    assert progress.hosts[first].not_before == 50 + waits


def test_unknown_is_looked_at_anew_and_failed_only_when_asked_for(story: Story) -> None:
    story.take("probe", OK, "unknown")
    assert story.open() == "waiting"
    story.take("probe", ended("auth"))
    assert story.open() == "ended" and story.progress.failed == 1
    assert story.open(retry=True) == "waiting" and story.progress.failed == 0
    assert story.progress.signatures == Counter() == story.progress.waves[0].signatures


def test_vanished_hosts_are_dropped_and_new_ones_get_waves() -> None:
    progress, _, _ = simulate(make(60), Faults())
    hosts = make_hosts(64)
    gone = {hosts[5].name, hosts[20].name}
    hosts[7] = hosts[7].model_copy(update={"address": "10.99.0.1"})
    hosts[8] = hosts[8].model_copy(update={"zone": "3", "scale_set": "other"})
    record = reconcile(progress, [h for h in hosts if h.name not in gone], at=1.0)
    assert record is not None
    # Without an id, another address means another machine: one is dropped, one is new.
    assert set(record.gone) == gone | {hosts[7].name}
    assert {h.name for h in record.new} == {h.name for h in hosts[60:]} | {hosts[7].name}
    assert [h.name for h in record.updated] == [hosts[8].name]
    assert record.waves[0].name == f"wave {len(progress.plan.waves)}"  # their cell has had its canaries
    before = len(progress.waves)
    apply(progress, record)
    assert len(progress.waves) == before + len(record.waves)
    placed = Counter(name for wave in progress.waves for name in wave.names("waiting", "ended"))
    assert placed == Counter(h.name for h in hosts if h.name not in gone)
    assert reconcile(progress, [h for h in hosts if h.name not in gone], at=2.0) is None
    result = report.report(progress, [])
    assert sum(result["counts"].values()) == len(hosts) - len(gone)
    assert sum(sum(wave["counts"].values()) for wave in result["waves"]) == len(hosts) - len(gone)


def test_a_new_kind_of_host_gets_a_canary_in_a_resumed_run() -> None:
    progress, _, _ = simulate(make(60), Faults())
    new = [h.model_copy(update={"vm_size": "new"}) for h in make_hosts(70)[60:]]
    record = reconcile(progress, [*make_hosts(60), *new], at=1.0)
    assert record is not None
    assert record.waves[0].name.startswith("canaries") and len(record.waves[0].hosts) == 1


def _recounted(progress: Progress) -> tuple[int, int, Counter[str]]:
    """Recount what is counted incrementally."""
    statuses = progress.hosts.values()
    bad = [s.outcome for s in statuses if s.state == "ended" and s.outcome and not s.outcome.ok]
    return sum(s.unavailable for s in statuses), len(bad), Counter(o.signature for o in bad)


_OUTCOMES = st.sampled_from(
    [OK, OK, OK, ended("timeout"), ended("dropped"), ended("auth"), ended("unknown"), failed("disk", 31)]
)


_JOINED: tuple[Joined, ...] = ("yes", "no", "unknown")


@settings(max_examples=60)
@given(st.data())
def test_counts_agree_with_the_hosts_whatever_happens(data: st.DataObject) -> None:
    plan = make(6, Policy(retries=1))
    progress = begin(plan)
    records: list[Record] = [Opened(at=0, plan="x")]
    apply(progress, records[0])
    steps = {"waiting": "probe", "ready": "bootstrap", "joined": "verify"}
    for n in range(data.draw(st.integers(0, 40))):
        name = data.draw(st.sampled_from(sorted(progress.hosts)))
        status = progress.hosts[name]
        record: Record
        if status.state in steps:
            record = Intent(at=n, step=steps[status.state], hosts=(name,))  # type: ignore[arg-type]
        elif status.state in RUNNING.values():
            step = next(s for s, running in RUNNING.items() if running == status.state)
            joined = data.draw(st.sampled_from(_JOINED))
            outcome = data.draw(_OUTCOMES)
            record = Result(
                at=n, host=name, step=step, attempt=status.tries[step], outcome=outcome, joined=joined
            )
        else:
            hosts = [h for h in make_hosts(8) if data.draw(st.booleans())]
            record = (data.draw(st.booleans()) and reconcile(progress, hosts, at=n)) or Opened(
                at=n, plan="x", retry=data.draw(st.booleans())
            )
        records.append(record)
        apply(progress, record)
        assert _recounted(progress) == (progress.unavailable, progress.failed, progress.signatures)
        placed = Counter(n for w in progress.waves for s, names in w.at.items() if s != "gone" for n in names)
        assert placed == Counter(s.host.name for s in progress.hosts.values() if s.state != "gone")
    assert replay(plan, records) == progress
