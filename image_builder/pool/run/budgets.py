"""Pure decisions on whether a run goes on, from its state: budgets, identical failures, stragglers, soak.

There are two kinds of limits. Room among the hosts that may be *unavailable* at once is reserved before a host is
touched, so this limit is never exceeded, whatever happens. How many hosts *fail* is only known afterwards: the first
failure beyond a budget stops the run, nothing is started from then on, and the hosts in progress by then are at most
as many as may be unavailable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from image_builder.pool.plan.model import STEPS, Cell, Step, quantile
from image_builder.pool.run.records import Passed
from image_builder.pool.run.state import IN_WORK, OPEN, RUNNING, Progress, State, WaveStatus

# The 95th percentile of fewer durations says nothing.
_MIN_DURATIONS = 10
_STRAGGLER = 0.95
# States of hosts of a unit that will be ready to be drained soon, or are ready but weren't passed in.
_ON_THEIR_WAY: tuple[State, ...] = ("awaiting", "ready", "settled", "freeing")


def room(progress: Progress) -> int:
    """Return how many more hosts may be made unavailable now."""
    return max(0, progress.plan.max_unavailable - progress.unavailable)


def admitted(progress: Progress, names: Iterable[str]) -> list[str]:
    """Return the hosts of a roll that may be drained now: as many as may be unavailable, and at most half of a zone.

    If more of a zone is NotReady, Kubernetes itself considers the zone broken (node-monitor's 55 %). Hosts of a unit
    are admitted together.
    """
    names = list(names)
    if not names:
        return names
    most = _most_of_zones(progress)
    # Hosts that are being drained may become empty at any moment.
    emptying = Counter(
        status.host.zone
        for wave in progress.open_waves
        for status in map(progress.hosts.__getitem__, wave.names("draining"))
        if not status.unavailable
    )
    away = progress.zones + emptying
    left = room(progress) - emptying.total()
    chosen = []
    for unit in _units(progress, names):
        zones = Counter(
            status.host.zone for status in map(progress.hosts.__getitem__, unit) if not status.unavailable
        )
        fits = all(away[zone] + count <= most(zone) for zone, count in zones.items())
        # A host that is already unavailable takes no room.
        if not zones or (zones.total() <= left and fits):
            left -= zones.total()
            away += zones
            chosen += unit
    return chosen


def _most_of_zones(progress: Progress) -> Callable[[str], int]:
    """Return a function that gives the number of hosts of a zone that may be unavailable."""
    of_zone = progress.plan.zones
    return lambda zone: max(1, of_zone[zone] // 2)


def _units(progress: Progress, names: Iterable[str]) -> Iterator[list[str]]:
    """Yield the hosts that are drained together, except while one of them has yet to become ready."""
    remaining = dict.fromkeys(names)
    for name in list(remaining):
        if name not in remaining:
            continue
        partners = [p for p in progress.hosts[name].unit if p in progress.hosts] or [name]
        unit = [partner for partner in partners if partner in remaining]
        others = [progress.hosts[partner].state for partner in partners if partner not in remaining]
        for partner in unit:
            del remaining[partner]
        if not any(state in _ON_THEIR_WAY for state in others):
            yield unit


def too_many(progress: Progress, unit: Iterable[str]) -> str:
    """Return why hosts can never be drained together; an empty string if they can."""
    zones = Counter(progress.hosts[name].host.zone for name in unit if name in progress.hosts)
    most, most_of = progress.plan.max_unavailable, _most_of_zones(progress)
    if zones.total() > most:
        return f"its gang runs on {zones.total()} hosts, of which {most} may be unavailable"
    for zone, count in zones.items():
        if count > most_of(zone):
            return (
                f"its gang runs on {count} hosts of zone {zone}, of which {most_of(zone)} may be unavailable"
            )
    return ""


def proven(progress: Progress, names: Iterable[str]) -> list[str]:
    """Return those of a roll's empty hosts that may get the new image now.

    Until a host of a cell is fine with it, no more hosts of that cell may get it than the cell has canaries: those
    that were planned may have been busy.
    """
    in_trial: Counter[Cell] | None = None
    chosen = []
    for name in names:
        cell = progress.hosts[name].host.cell
        if cell not in progress.proven:
            if in_trial is None:
                in_trial = Counter(
                    s.host.cell for s in progress.hosts.values() if s.touched and s.state in OPEN
                )
            if not progress.hosts[name].touched:
                if in_trial[cell] >= progress.plan.policy.canaries:
                    continue
                in_trial[cell] += 1
        chosen.append(name)
    return chosen


def in_work(progress: Progress) -> int:
    """Return how many hosts are in progress: a step has begun, or must follow before anything is known about them."""
    count = sum(w.count(*IN_WORK) for w in progress.open_waves)
    return count + sum(
        progress.hosts[name].unavailable for w in progress.open_waves for name in w.names("waiting")
    )


def stop_reason(progress: Progress) -> str:
    """Return why nothing more may be started; an empty string if it may."""
    plan = progress.plan
    if progress.failed > plan.budget:
        return f"{_hosts(progress.failed)} failed, the run's budget is {plan.budget}"
    for signature, count in progress.signatures.items():
        if count >= plan.same:
            return f"{_hosts(count)} failed alike: {signature}"
    for status in progress.waves[: progress.began]:
        wave = status.wave
        if status.failed > wave.budget:
            return f"{_hosts(status.failed)} of {wave.name} failed, its budget is {wave.budget}"
        for signature, count in status.signatures.items():
            if count >= wave.same:
                return f"{_hosts(count)} of {wave.name} failed alike: {signature}"
    if progress.verdict == "stop":
        return "; ".join(progress.reasons)
    # A roll waits: its hosts work meanwhile, and a stop would turn good images back.
    if plan.policy.rolls is None and is_red_for_long(progress):
        patience = plan.policy.gate.patience_seconds
        return f"the control plane has been red for more than {patience:.0f} s: {'; '.join(progress.reasons)}"
    if not in_work(progress) and _to_start(progress) and not _can_start(progress):
        missing = sum(status.missing for status in progress.hosts.values())
        before = f", {missing} of them before the run" if missing else ""
        return f"{_hosts(progress.unavailable)} unavailable{before}, which is the maximum: nothing can be started"
    return ""


def is_red_for_long(progress: Progress) -> bool:
    """Return whether the control plane has been red for longer than the policy's patience, from reading to reading."""
    since, at = progress.red_since, progress.red_at
    return since is not None and at is not None and at - since > progress.plan.policy.gate.patience_seconds


def _can_start(progress: Progress) -> bool:
    ready = [name for wave in progress.waves for name in wave.names("ready")]
    if progress.plan.policy.mode == "roll" and ready:
        return bool(admitted(progress, ready))
    return room(progress) > 0


def _hosts(count: int) -> str:
    return f"{count} host{'' if count == 1 else 's'}"


def _to_start(progress: Progress) -> int:
    return sum(wave.count("waiting", "ready", "resting") for wave in progress.waves)


def decide(progress: Progress, number: int, now: float) -> Passed | None:
    """Return the record that ends a wave, or None while it has to be waited for.

    A wave is over when all its hosts have ended. It is also over when the remaining hosts are much slower than the
    rest and both the wave and the run would stay within their budgets even if all of them failed: otherwise a single
    host that hangs until its deadline would hold up all the others. The remaining hosts stay in progress, and still
    count as unavailable.
    """
    status = progress.waves[number]
    unfinished = status.unfinished
    if unfinished and not (
        _affordable(progress, status, unfinished) and _all_straggle(progress, status, now)
    ):
        return None
    return Passed(at=now, wave=number, failed=status.failed, stragglers=unfinished)


def _affordable(progress: Progress, status: WaveStatus, unfinished: int) -> bool:
    everywhere = sum(w.unfinished for w in progress.waves[: progress.began])
    return (
        status.failed + unfinished <= status.wave.budget
        and progress.failed + everywhere <= progress.plan.budget
    )


def _all_straggle(progress: Progress, status: WaveStatus, now: float) -> bool:
    """Return whether every unfinished host of a wave is retried, or is slower than most by the policy's factor."""
    running = [state for state in OPEN if state in RUNNING.values()]
    if status.count(*OPEN) > status.count("waiting", *running):
        return False
    hosts = [progress.hosts[name] for name in status.names("waiting", *running)]
    if any(host.started is None for host in hosts):
        return False
    states = {host.state for host in hosts}
    steps = [step for step in STEPS[progress.plan.policy.mode] if RUNNING[step] in states]
    limits = {step: straggler_seconds(progress, status, step) for step in steps}
    return all(
        host.state == "waiting"
        or any(
            host.state == RUNNING[step] and limit is not None and now - host.since - host.delay > limit
            for step, limit in limits.items()
        )
        for host in hosts
    )


def straggler_seconds(progress: Progress, status: WaveStatus, step: Step) -> float | None:
    """Return after how many seconds in a step a host is a straggler, None while there is too little to compare."""
    durations = [
        host.seconds[step]
        for host in (progress.hosts[name] for name in status.names("ended"))
        if host.outcome and host.outcome.ok and step in host.seconds
    ]
    if len(durations) < _MIN_DURATIONS:
        return None
    return progress.plan.policy.straggler_factor * quantile(durations, _STRAGGLER)


def next_wave_at(progress: Progress) -> float | None:
    """Return when the next wave may begin, None while the current one isn't over or the control plane is red.

    The soak counts from the wave's end or from the last red reading: the gate has to stay green throughout.
    """
    if progress.verdict != "go":
        return None
    current = progress.current
    if current is None:
        return 0.0
    if current.passed is None or current.began is None:
        return None
    calm = max(current.passed, progress.red_at or 0.0)
    return max(calm + current.wave.soak_seconds, current.began + current.wave.cadence_seconds)
