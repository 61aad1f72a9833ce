"""The progress of a run: the state that results from applying its records in order.

The driver never changes the state itself. It appends a record to the journal and applies it here, as a replay does:
that is why a resumed run knows exactly what the killed one knew. The state is changed in place, since 7,500 hosts
produce some 50,000 records.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from image_builder.pool.plan.model import OK, UNREACHED, Host, Outcome, ended, failed
from image_builder.pool.plan.plan import Plan
from image_builder.pool.plan.waves import Wave
from image_builder.pool.run import rolling
from image_builder.pool.run.moves import again, count_unavailable, end, move, set_empty
from image_builder.pool.run.records import (
    Began,
    Changed,
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
    Surveyed,
    Turned,
    Unplanned,
)
from image_builder.pool.run.state import RUNNING, HostStatus, Progress, State, WaveStatus

# Phases whose failure may be transient: the network, the runtime's start, an expired token. A disk or a GPU stays
# broken.
TRANSIENT_PHASES = frozenset({"identity", "network", "runtime", "credentials", "join"})
# A failure of `bootstrap`; it continues the numbers of provision.py.
_NO_MEMBER = 5


# States that only the driving process knew of; they are unknown after it has ended.
_UNKNOWN: tuple[State, ...] = (
    "probing",
    "ready",
    "resting",
    "awaiting",
    "joining",
    "draining",
    "drained",
    "reimaging",
)


def begin(plan: Plan) -> Progress:
    """Return the state before the first record."""
    progress = Progress(plan)
    _add(progress, plan.hosts, plan.waves)
    return progress


def replay(plan: Plan, records: Iterable[Record]) -> Progress:
    """Return the state after these records."""
    progress = begin(plan)
    for record in records:
        apply(progress, record)
    return progress


def apply(progress: Progress, record: Record) -> None:
    """Apply a record to the state."""
    progress.records += 1
    match record:
        case Opened():
            _open(progress, record)
        case Changed():
            _change(progress, record)
        case Surveyed():
            rolling.survey(progress, record)
        case Chosen():
            rolling.choose(progress, record)
        case Rested():
            rolling.rest(progress, record)
        case Began():
            progress.began = record.wave + 1
            progress.waves[record.wave].began = record.at
        case Intent():
            _intend(progress, record)
        case Result():
            _result(progress, record)
        case Gated():
            _gate(progress, record)
        case Passed():
            progress.waves[record.wave].passed = record.at
        case Stopped():
            progress.stopped, progress.stop_asked = record.reason, record.asked
            if progress.plan.policy.mode == "roll":
                rolling.stop(progress, record.at)
                return
            for wave in progress.waves:
                for name in wave.names("ready"):
                    _settle(progress, progress.hosts[name], record.at)
        case Turned():
            rolling.turn(progress, record.hosts)
        case Unplanned():
            pass  # about no host of the run
        case Finished():
            progress.finished = True
        case _:
            assert_never(record)


def _add(progress: Progress, hosts: Iterable[Host], waves: Iterable[Wave]) -> None:
    by_name = {host.name: host for host in hosts}
    for wave in waves:
        number = len(progress.waves)
        progress.waves.append(WaveStatus(wave, frozenset(wave.verify)))
        for name in wave.hosts:
            status = HostStatus(by_name[name], number)
            progress.hosts[name] = status
            progress.waves[number].add(name, "waiting")


def _open(progress: Progress, record: Opened) -> None:
    """Resume a journal: what was in progress is unknown now, and has to be found out by a probe."""
    progress.opened += 1
    progress.stopped, progress.stop_asked, progress.finished = "", False, False
    progress.surveyed = False
    progress.reading, progress.read_at, progress.verdict, progress.reasons = None, None, "hold", ()
    progress.red_at = progress.red_since = progress.unread_at = None
    progress.elsewhere = []
    # If the clock was set back, recorded times may be far in the future: don't wait for them.
    window = progress.plan.policy.slice_hosts / progress.plan.policy.join_rate
    progress.next_join = min(progress.next_join, record.at + window)
    for wave in progress.waves:
        wave.began = None if wave.began is None else min(wave.began, record.at)
        wave.passed = None if wave.passed is None else min(wave.passed, record.at)
    # A worker that has lost contact with a killed driver goes on until its patience is over: until then, no host is
    # probed and then told to join.
    free = record.at + progress.plan.policy.worker_gone_seconds
    for name in record.unsent:
        status = progress.hosts[name]
        count_unavailable(progress, status, -1)
        status.unsent = status.tries["reimage"]
        count_unavailable(progress, status, 1)
    for name, status in progress.hosts.items():
        status.starts, status.row = 0, 0
        longest = record.at + window + progress.plan.policy.changing_seconds
        status.until = 0.0 if progress.plan.policy.mode == "verify" else min(status.until, longest)
        status.not_before = free if status.state == "joining" else min(status.not_before, free)
        status.idle_by = min(status.idle_by, record.at + progress.plan.policy.deadline("await"))
        was_awaited, status.awaited = status.awaited, False
        if status.state == "draining":
            # It has our cordon and may be empty by now.
            set_empty(progress, status, empty=True)
        if status.state in _UNKNOWN:
            move(progress, name, "waiting")
        elif status.state == "verifying":
            move(progress, name, "joined")
        elif status.state in ("freeing", "settled"):
            # An awaited host is freed to work until it can be taken, not since it has ended.
            move(progress, name, "waiting" if was_awaited else "settled")
        elif status.state == "restoring":
            move(progress, name, "broken")
        elif _is_retried(status.outcome, retry=record.retry):
            status.restored, status.empty, status.idle_by = None, False, 0.0
            move(progress, name, "waiting")


def _is_retried(outcome: Outcome | None, *, retry: bool) -> bool:
    if outcome is None or outcome.ok:
        return False
    return retry or outcome.kind == "unknown" or outcome.detail == rolling.STOPPED


def _change(progress: Progress, record: Changed) -> None:
    for name in record.gone:
        move(progress, name, "gone")
    for host in record.updated:
        progress.hosts[host.name].host = host
    _add(progress, record.new, record.waves)


def _intend(progress: Progress, record: Intent) -> None:
    for name in record.hosts:
        status = progress.hosts[name]
        changes = record.step in ("bootstrap", "reimage")
        count_unavailable(progress, status, -1)
        status.tries[record.step] += 1
        status.starts += changes
        count_unavailable(progress, status, 1)
        status.since, status.delay = record.at, record.delays.get(name, 0.0)
        # If hosts join without being told, the time of each one counts from its first probe.
        if changes or (progress.plan.policy.mode == "verify" and not status.until):
            status.until = record.at + status.delay + progress.plan.policy.changing_seconds
        if record.step == "await" and not status.idle_by:
            status.idle_by = record.at + progress.plan.policy.deadline("await")
        if status.started is None:
            status.started = record.at
        if record.step == "free" and status.state in ("drained", "draining", "awaiting"):
            # The control plane is red: until it isn't, the host works. One that waits for its jobs starts over.
            if progress.waves[status.wave].wave.is_rest:
                status.last = ended("busy", "the control plane was red")
            else:
                status.awaited = True
        move(progress, name, RUNNING[record.step])
    if record.step == "bootstrap":
        first = max(progress.next_join, record.at)
        progress.next_join = first + len(record.hosts) / progress.plan.policy.join_rate


def _gate(progress: Progress, record: Gated) -> None:
    progress.reading, progress.verdict, progress.reasons = record.reading, record.verdict, record.reasons
    progress.read_at = record.at
    if record.reading.unread:
        progress.unread_at = record.at
    else:
        since = record.at - progress.plan.policy.gate.patience_seconds
        progress.elsewhere = [(at, count) for at, count in progress.elsewhere if at >= since]
        progress.elsewhere.append((record.at, record.reading.elsewhere))
    if record.verdict == "go":
        progress.red_since = None
    else:
        progress.red_at = record.at
        progress.red_since = record.at if progress.red_since is None else progress.red_since


def _result(progress: Progress, record: Result) -> None:
    status = progress.hosts[record.host]
    status.seconds[record.step] = record.seconds
    if record.phases:
        status.phases = dict(record.phases)
    match record.step:
        case "probe":
            _after_probe(progress, status, record)
        case "bootstrap":
            _after_bootstrap(progress, status, record)
        case "verify":
            _after_verify(progress, status, record)
        case "await":
            rolling.after_await(progress, status, record)
        case "drain":
            rolling.after_drain(progress, status, record)
        case "reimage":
            rolling.after_reimage(progress, status, record)
        case "free":
            rolling.after_free(progress, status, record)
        case "restore":
            rolling.after_restore(progress, status, record)
        case _:
            assert_never(record.step)


def _after_probe(progress: Progress, status: HostStatus, record: Result) -> None:
    policy, outcome = progress.plan.policy, record.outcome
    # If a phase of its own failed before the kubelet started, it was reached and isn't a member.
    is_reached = outcome.ok or (record.joined == "no" and outcome.phase not in ("", "bootstrap"))
    if not is_reached:
        if outcome.kind in UNREACHED and again(progress, status, record.at, "waiting"):
            return
        if status.touched:
            told = "told to take another image" if policy.mode == "roll" else "told to join"
            outcome = ended("unknown", f"{told}, then {outcome.signature}: {outcome.detail}")
        _conclude(progress, status, outcome, record.at)
        return
    status.row = 0
    if policy.mode == "roll":
        rolling.after_look(progress, status, record)
        return
    if policy.mode == "verify" and record.joined == "no":
        _by_itself(progress, status, record)
        return
    if record.joined == "yes" or policy.mode == "check":
        _joined(progress, status, record.at)
    elif record.joined == "unknown":
        end(progress, status, ended("unknown", "whether it joined is unknown"), record.at)
    elif status.starts <= policy.retries:
        move(progress, status.host.name, "ready")
        if progress.stopped:
            _settle(progress, status, record.at)
    else:
        detail = f"was told to join {status.starts} times, but didn't"
        end(progress, status, ended("unknown", detail), record.at)


def _by_itself(progress: Progress, status: HostStatus, record: Result) -> None:
    """Judge a host that joins without being told and isn't a member: it failed, or may still have time to join."""
    if not record.outcome.ok:
        end(progress, status, record.outcome, record.at)
    elif record.at >= status.until:
        detail = "its image should have made it a member, but didn't"
        end(progress, status, failed("bootstrap", _NO_MEMBER, detail), record.at)
    else:
        policy = progress.plan.policy
        passed = record.at - (status.until - policy.changing_seconds)
        status.not_before = record.at + max(policy.retry_seconds, passed / 5)
        move(progress, status.host.name, "waiting")


def _settle(progress: Progress, status: HostStatus, at: float) -> None:
    """End a host that was waiting to be told to join again, in a run that no longer tells any host to."""
    if status.touched:
        end(progress, status, status.last or ended("unknown", "told to join, but didn't"), at)


def _after_bootstrap(progress: Progress, status: HostStatus, record: Result) -> None:
    outcome = status.last = record.outcome
    if outcome.ok:
        status.row = 0
        _joined(progress, status, record.at)
        return
    if record.joined == "no":
        transient = outcome.kind in UNREACHED or outcome.phase in TRANSIENT_PHASES
        if transient:
            status.row = status.starts - 1
            if again(progress, status, record.at, "waiting"):
                return
    elif outcome.kind in (*UNREACHED, "unknown"):
        status.row = 0
        move(progress, status.host.name, "waiting")
        return
    end(progress, status, outcome, record.at)


def _after_verify(progress: Progress, status: HostStatus, record: Result) -> None:
    if record.outcome.kind in UNREACHED and again(progress, status, record.at, "joined"):
        return
    _conclude(progress, status, record.outcome, record.at)


def _conclude(progress: Progress, status: HostStatus, outcome: Outcome, at: float) -> None:
    if progress.plan.policy.mode == "roll":
        rolling.conclude(progress, status, outcome, at)
    else:
        end(progress, status, outcome, at)


def _joined(progress: Progress, status: HostStatus, at: float) -> None:
    # A host that was already a member isn't one of those that the wave's sample stands for.
    was_member = progress.plan.policy.verify is None and not status.touched
    if was_member or status.host.name in progress.waves[status.wave].sample:
        move(progress, status.host.name, "joined")
    else:
        end(progress, status, OK, at)
