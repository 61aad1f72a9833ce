"""The loop that brings pools up: it decides from the state what to do next, and does it through ``Steps``.

One thread, one journal. ``Steps`` begins work and reports its end; this code is the same for a real fleet and a
simulated one. Everything that is learned becomes a record first, and only then changes the state.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from image_builder.pool.plan.model import Host, Joined, Outcome, Step, ended
from image_builder.pool.plan.policy import DRAIN_ENDS_SECONDS
from image_builder.pool.plan.waves import join_delays, rest_wave
from image_builder.pool.run import budgets, gates, rolling
from image_builder.pool.run.gates import Reading
from image_builder.pool.run.progress import apply
from image_builder.pool.run.records import (
    Began,
    Chosen,
    Emptied,
    Finished,
    Gated,
    Intent,
    Record,
    Rested,
    Result,
    Stopped,
    Surveyed,
    Turned,
    Unplanned,
)
from image_builder.pool.run.state import RUNNING, HostStatus, Progress, WaveStatus

# Hosts that are retried, or for which there was no room, are started once they make up one in this many hosts of a
# slice, or when nothing else is in progress: each slice costs an Ansible process.
_WORTH_A_SLICE = 10
# A control plane that takes longer than this for one reading must not get more nodes.
_READING_SECONDS = 15.0
# Steps that end when a host's jobs do.
_WAITING_FOR_JOBS: tuple[Step, ...] = ("await", "drain")


class Work(NamedTuple):
    """A step on a host. ``delay`` is the join slot: the seconds that pass before the host joins.

    ``until`` is when to stop waiting for a host that isn't idle.
    """

    host: Host
    attempt: int
    delay: float = 0.0
    until: float = 0.0


class Event(NamedTuple):
    """The end of a step on a host. ``seconds`` exclude the join slot; ``phases`` are those that the host reported."""

    host: str
    step: Step
    attempt: int
    outcome: Outcome
    joined: Joined
    seconds: float
    phases: tuple[tuple[str, float], ...] = ()
    emptied: Emptied = Emptied()


class Steps(Protocol):
    """What a fleet does. Steps return immediately; ``wait`` reports how they ended.

    An event that isn't `ok` has `no` as ``joined`` only if it is certain that the host isn't a member of the cluster
    and that nothing on it is still trying to join.
    """

    def now(self) -> float:
        """Return seconds since 1970; never less than before."""

    def wait(self, until: float) -> Sequence[Event]:
        """Return the steps that ended, as soon as there are any, at ``until`` at the latest."""

    def begin(self, step: Step, work: Sequence[Work]) -> None:
        """Begin a step on hosts.

        `probe` finds out whether they answer, and whether they have joined or run the new image; `verify` checks them:
        neither changes anything. `bootstrap` makes hosts of one slice join, `reimage` gives them the new image: neither
        is idempotent. `drain` keeps new work off a host and waits until it is empty, `await` waits until it is idle
        and then keeps new work off it, `free` undoes both: all three may be repeated. `restore` gives a failed host its
        previous image and frees it.
        """

    def turn(self) -> str | None:
        """Make the scale sets name the previous image again after the run stopped, before any host is restored.

        Return why that isn't possible now, empty if it is done; None while it is in progress: ``wait`` returns then.
        """

    def missing(self, hosts: Sequence[Host]) -> Mapping[str, str] | None:
        """Return which hosts can't take jobs, for reasons other than a roll, and why.

        None while that is being found out; ``wait`` returns once it is known.
        """

    def idle(self, cells: Sequence[Sequence[Host]], each: int) -> Collection[str] | None:
        """Return the first ``each`` idle hosts of each cell.

        None while they are being looked for; ``wait`` returns once they are known.
        """

    def give_up(self, host: str, step: Step, attempt: int) -> Joined:
        """Abandon a step, such as one whose deadline has passed: its result is no longer waited for.

        Return whether its host has joined or got the new image: `no` only if nothing was sent for it, nor will be.
        """

    def conclude(self) -> None:
        """Release what was held for hosts, none of which is still in progress; an exception here ends the process."""

    def unplanned(self, hosts: Sequence[Host]) -> Mapping[str, str]:
        """Return the instances of a roll's scale sets that aren't among these hosts, and their versions, by id.

        A set that can't be read is included by its own id, without a version.
        """

    def room(self, step: Step) -> int:
        """Return on how many more hosts that step can run now; hosts that wait for room have no deadline yet."""

    def gate(self) -> Reading | None:
        """Return a reading of the control plane, None while it is being read; ``wait`` returns once it has been."""


@dataclass
class _Run:
    progress: Progress
    steps: Steps
    write: Callable[[Record], None]
    # (when, host, step, attempt): the deadlines of steps and, with an empty host, the ends of pauses.
    alarms: list[tuple[float, str, Step, int]] = field(default_factory=list)
    # Whether a stopped roll has been undone in this process.
    turned: bool = False
    # Whether that is in progress.
    turning: bool = False
    # Why the scale sets couldn't be made to name the previous image again.
    unturned: str = ""
    # When the reading in progress was requested.
    reading_since: float | None = None

    def note(self, record: Record) -> None:
        self.write(record)
        apply(self.progress, record)


def run(
    progress: Progress,
    steps: Steps,
    write: Callable[[Record], None],
    stop_asked: Callable[[], bool] = lambda: False,
) -> None:
    """Bring the waves up until all are over or the run is stopped; ``progress`` shows which.

    ``progress`` is the state after all records so far, including those of opening the journal. ``write`` saves a
    record before it returns. ``stop_asked`` is polled all the time: once true, nothing more is started.
    """
    r = _Run(progress, steps, write)
    # In a resumed run, hosts that were being told to join when the last driver ended aren't probed at once.
    pauses = sorted({status.not_before for status in progress.hosts.values() if status.not_before})
    r.alarms += [(at, "", "probe", 0) for at in pauses]
    while True:
        now = steps.now()
        _expire(r, now)
        _read_gate(r, now)
        _survey(r, now)
        if not progress.stopped:
            asked = stop_asked()
            if reason := "a stop was requested" if asked else budgets.stop_reason(progress):
                r.note(Stopped(at=now, reason=reason, asked=asked))
        if progress.stopped:
            _turn(r, now)
            if not budgets.in_work(progress) and not r.turning:
                _find_unplanned(r, now)
                return
        else:
            _turn_waves(r, now)
            if progress.finished:
                return
        _dispatch(r, now)
        for event in steps.wait(_wake(r, now)):
            _observe(r, event, steps.now())


def _observe(r: _Run, event: Event, at: float) -> None:
    """Record how a step ended, unless it is no longer waited for."""
    status = r.progress.hosts.get(event.host)
    if status is None or status.state != RUNNING[event.step] or status.tries[event.step] != event.attempt:
        return
    r.note(
        Result(
            at=at,
            host=event.host,
            step=event.step,
            attempt=event.attempt,
            outcome=event.outcome,
            joined=event.joined,
            seconds=event.seconds,
            phases=dict(event.phases),
            emptied=event.emptied,
        )
    )
    if status.not_before > at:
        heapq.heappush(r.alarms, (status.not_before, "", "probe", 0))


def _expire(r: _Run, now: float) -> None:
    """End the steps whose deadline has passed. Whether the host has joined in the meantime is then unknown."""
    while r.alarms and r.alarms[0][0] <= now:
        _, name, step, attempt = heapq.heappop(r.alarms)
        if not name:
            continue
        status = r.progress.hosts[name]
        if status.state == RUNNING[step] and status.tries[step] == attempt:
            if (until := _after_outage(r, status, step)) > now:
                heapq.heappush(r.alarms, (until, name, step, attempt))
                continue
            seconds = now - status.since - status.delay
            joined = r.steps.give_up(name, step, attempt)
            outcome = ended("timeout", f"{step} did not end within {seconds:.0f} s")
            _observe(r, Event(name, step, attempt, outcome, joined, seconds), now)


def _after_outage(r: _Run, status: HostStatus, step: Step) -> float:
    """Return until when a step may take that began before the control plane was last away: as long as one that begins
    when it is back. A run that stopped waits for nothing beyond its deadlines.
    """
    progress = r.progress
    away_at = progress.unread_at
    if progress.stopped or step in ("probe", "await") or away_at is None or away_at < status.since:
        return 0.0
    return away_at + progress.plan.policy.deadline(step)


def _read_gate(r: _Run, now: float) -> None:
    progress = r.progress
    limits = progress.plan.policy.gate
    if progress.read_at is not None and now < progress.read_at + limits.interval_seconds:
        return
    asked_at = now if r.reading_since is None else r.reading_since
    reading = r.steps.gate()
    r.reading_since = asked_at if reading is None else None
    if reading is None:
        if now < asked_at + _READING_SECONDS:
            return  # hosts and their deadlines don't wait for it
        reading = Reading(unread=f"no answer for {now - asked_at:.0f} s")
    reading = gates.count(reading, limits, progress.role)
    # Without earlier readings there is nothing to compare with: this one is the baseline.
    before = min([count for at, count in progress.elsewhere] or [reading.elsewhere])
    verdict, reasons = gates.judge(reading, limits, hosts=len(progress.plan.hosts), elsewhere_before=before)
    r.note(Gated(at=now, reading=reading, verdict=verdict, reasons=reasons))


def _survey(r: _Run, now: float) -> None:
    """Check all nodes, once in each process of a roll and before it takes any out of service."""
    progress = r.progress
    if progress.plan.policy.mode != "roll" or progress.surveyed:
        return
    hosts = [status.host for status in progress.hosts.values() if status.state != "gone"]
    missing = r.steps.missing(hosts)
    if missing is not None:
        r.note(Surveyed(at=now, missing=missing))


def _turn_waves(r: _Run, now: float) -> None:
    """End the current wave when it is over, and begin the next one when it may begin."""
    progress = r.progress
    current = progress.current
    if current and current.passed is None and (passed := budgets.decide(progress, progress.began - 1, now)):
        r.note(passed)
    due = budgets.next_wave_at(progress)
    if due is None or now < due:
        return
    if progress.began < len(progress.waves):
        if _canaries_chosen(r, now):
            r.note(Began(at=now, wave=progress.began))
    elif not any(wave.unfinished for wave in progress.waves):
        if names := rolling.deferred(progress):
            plan = progress.plan
            r.note(Rested(at=now, wave=rest_wave(len(progress.waves), names, plan.policy, plan.digest)))
            r.note(Began(at=now, wave=progress.began))
        else:
            # If this process is killed before the record is written, the next one resumes and concludes the run again.
            r.steps.conclude()
            _find_unplanned(r, now)
            r.note(Finished(at=now))


def _find_unplanned(r: _Run, now: float) -> None:
    """Record the instances that aren't among a roll's hosts, such as those that were scaled out meanwhile."""
    if r.progress.plan.policy.mode == "roll":
        hosts = [status.host for status in r.progress.hosts.values() if status.state != "gone"]
        if instances := r.steps.unplanned(hosts):
            r.note(Unplanned(at=now, instances=instances))


def _canaries_chosen(r: _Run, now: float) -> bool:
    """Return whether a roll's canaries have been chosen: hosts that were idle a moment ago, if there are any."""
    progress = r.progress
    if progress.plan.policy.mode != "roll" or progress.began or progress.chosen:
        return True
    if not progress.surveyed:
        return False
    idle = r.steps.idle(rolling.cells(progress), progress.plan.policy.canaries)
    if idle is None:
        return False
    r.note(Chosen(at=now, places=rolling.busy_canaries(progress, idle)))
    return True


def _dispatch(r: _Run, now: float) -> None:
    """Begin every step that may begin; in a stopped run, only those that finish what is in progress."""
    is_away = r.progress.is_unread and not r.progress.stopped
    for wave in r.progress.open_waves:
        _begin(r, "probe", _fitting(r, "probe", wave.names("waiting"), now), now)
        # Without its API server a node can't be what its checks want it to be.
        if not is_away:
            _begin(r, "verify", _fitting(r, "verify", wave.names("joined"), now), now)
        _begin(r, "free", _fitting(r, "free", wave.names("settled"), now), now)
        _begin(r, "restore", _fitting(r, "restore", wave.names("broken"), now), now)
        may_start = not r.progress.stopped and r.progress.verdict == "go"
        if r.progress.plan.policy.mode == "roll":
            if may_start and r.progress.surveyed:
                _roll(r, wave, now)
            elif not is_away and budgets.is_red_for_long(r.progress):
                _let_work(r, wave, now)
            if wave.wave.is_rest and not r.progress.stopped:
                # An idle host that can't be taken now may work until it can.
                awaited = [name for name in wave.names("ready") if r.progress.hosts[name].awaited]
                _begin(r, "free", _fitting(r, "free", awaited, now), now)
        elif may_start:
            for part in wave.wave.slices:
                _start_slice(r, wave, part, now)


def _roll(r: _Run, wave: WaveStatus, now: float) -> None:
    """Begin the steps that take hosts out of service, as far as allowed."""
    progress = r.progress
    _begin(r, "reimage", _fitting(r, "reimage", budgets.proven(progress, wave.names("drained")), now), now)
    _begin(r, "drain", budgets.admitted(progress, _fitting(r, "drain", wave.names("ready"), now)), now)
    _begin(r, "await", _fitting(r, "await", wave.names("resting"), now), now)


def _let_work(r: _Run, wave: WaveStatus, now: float) -> None:
    """Free the hosts that are or become empty: nothing is sent for them as long as the control plane is red."""
    names = _fitting(r, "free", wave.names("drained", "draining", "awaiting"), now)
    for name in names:
        status = r.progress.hosts[name]
        for step in _WAITING_FOR_JOBS:
            if status.state == RUNNING[step]:
                r.steps.give_up(name, step, status.tries[step])
    _begin(r, "free", names, now)


def _turn(r: _Run, now: float) -> None:
    """Undo a stopped roll: first what is being drained, then scale sets, then hosts that failed."""
    progress = r.progress
    roll = progress.plan.policy.rolls
    if roll is None:
        return
    for wave in progress.open_waves:
        for step in _WAITING_FOR_JOBS:
            for name in wave.names(RUNNING[step]):
                status = progress.hosts[name]
                attempt, outcome = status.tries[step], ended("skipped", rolling.STOPPED)
                r.steps.give_up(name, step, attempt)
                _observe(r, Event(name, step, attempt, outcome, "unknown", now - status.since), now)
    # A user who asks a run to stop intends to resume it.
    if progress.stop_asked or roll.restore == "never":
        return
    if r.unturned or not (rolling.to_restore(progress) or not r.turned or r.turning):
        return
    # Hosts are freed meanwhile: Azure may be away for long.
    problem = r.steps.turn()
    r.turning = problem is None
    if problem is not None:
        r.turned, r.unturned = True, problem
        # No host goes back before its scale set does.
        hosts = () if problem else tuple(rolling.to_restore(progress))
        r.note(Turned(at=now, hosts=hosts, problem=problem))


def _fitting(r: _Run, step: Step, names: Iterable[str], now: float) -> list[str]:
    """Return the hosts on which a step is due and can start now, first come, first served."""
    due = _due(r, names, now)
    return due[: max(0, r.steps.room(step))] if due else due


def _due(r: _Run, names: Iterable[str], now: float) -> list[str]:
    statuses = r.progress.hosts
    stopped = bool(r.progress.stopped)
    return [
        name
        for name in names
        if statuses[name].not_before <= now
        and (not stopped or statuses[name].touched or statuses[name].state != "waiting")
    ]


def _start_slice(r: _Run, wave: WaveStatus, part: Sequence[str], now: float) -> None:
    """Start the hosts of a slice that are ready, as far as the join rate and the limit on unavailable hosts allow."""
    progress = r.progress
    if now < progress.next_join or not wave.count("ready"):
        return
    states = [(name, progress.hosts[name].state) for name in part]
    ready = [name for name, state in states if state == "ready"]
    # A host that is being probed for the first time, or waits for room to be probed, will be ready soon.
    soon = [name for name, state in states if state in ("waiting", "probing")]
    if not ready or not all(progress.hosts[name].row for name in soon):
        return
    untouched = [name for name in ready if not progress.hosts[name].touched]
    admitted = set(untouched[: budgets.room(progress)])
    chosen = [name for name in ready if progress.hosts[name].touched or name in admitted]
    few = len(chosen) < min(len(ready), -(-len(part) // _WORTH_A_SLICE))
    if chosen and not (few and wave.count("probing", "joining", "verifying")):
        _begin(r, "bootstrap", chosen, now)


def _begin(r: _Run, step: Step, names: Sequence[str], now: float) -> None:
    if not names:
        return
    policy = r.progress.plan.policy
    delays = join_delays(names, policy.join_rate) if step == "bootstrap" else {}
    r.note(Intent(at=now, step=step, hosts=tuple(names), delays=delays))
    work = []
    for name in names:
        status = r.progress.hosts[name]
        attempt, delay = status.tries[step], delays.get(name, 0.0)
        ends = status.idle_by - DRAIN_ENDS_SECONDS if step == "await" else 0.0
        work.append(Work(status.host, attempt, delay, ends))
        until = now + delay + policy.deadline(step)
        if step == "probe":
            # A host that was told to join may still be trying, and gets as much time as if contact had never been
            # lost; so does a host that joins without being told.
            until = max(until, status.until)
        elif step == "await":
            until = status.idle_by
        heapq.heappush(r.alarms, (until, name, step, attempt))
    r.steps.begin(step, work)


def _wake(r: _Run, now: float) -> float:
    """Return when there is something to do even if no event arrives before that."""
    progress = r.progress
    due = []
    if progress.read_at is not None:
        due.append(progress.read_at + progress.plan.policy.gate.interval_seconds)
    if r.reading_since is not None:
        # The result wakes us; without one the gate turns red then, and stays red from reading to reading.
        due = [max([r.reading_since + _READING_SECONDS, *due])]
    if r.alarms:
        due.append(r.alarms[0][0])
    if progress.next_join > now:
        due.append(progress.next_join)
    if (begins := budgets.next_wave_at(progress)) is not None and begins > now:
        due.append(begins)
    return max(now, min(due))
