"""A view of a run in progress, taken from its state: plain, frozen, and independent of how it is drawn."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from image_builder.pool.plan.model import STEPS, Mode, Step, quantile
from image_builder.pool.run import budgets
from image_builder.pool.run.gates import Verdict
from image_builder.pool.run.state import OPEN, RUNNING, Progress, State, WaveStatus
from image_builder.pool.show.report import is_skipped
from image_builder.pool.show.report import state as state_of

_BRING_UP: tuple[State, ...] = ("waiting", "probing", "ready", "joining", "joined", "verifying")
# The states of hosts that haven't ended, in the order in which a host goes through them.
STATES: dict[Mode, tuple[State, ...]] = {
    "bootstrap": _BRING_UP,
    "verify": _BRING_UP,
    "check": _BRING_UP,
    "roll": (*(state for state in OPEN if state != "joining"), "deferred"),
}
_SLOWEST = 5

# p50 and p95 in seconds, by step (`bootstrap`) and by the phases that hosts reported (`disk`).
Quantiles = Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class WaveView:
    """A wave: ``counts`` are its hosts by state, ended ones as `ok`, `skipped` and `failed`.

    Times are seconds since 1970.
    """

    name: str
    hosts: int
    counts: Mapping[str, int]
    budget: int
    began: float | None
    passed: float | None
    signatures: Mapping[str, int]

    @property
    def unfinished(self) -> int:
        return sum(count for name, count in self.counts.items() if name in OPEN)

    @property
    def state(self) -> str:
        if self.began is None:
            return "to come"
        if self.passed is None:
            return "in work"
        return f"over, {self.unfinished} late" if self.unfinished else "over"


@dataclass(frozen=True)
class Slow:
    """A host in progress: its step, and since when it has been in it, excluding its join slot."""

    host: str
    step: Step
    since: float


@dataclass(frozen=True)
class View:
    """A view of a run of ``mode``. ``current`` is the number of waves that began; ``next_at`` is when the next may."""

    mode: Mode
    state: str
    reason: str
    began_at: float | None
    waves: tuple[WaveView, ...]
    current: int
    failed: int
    budget: int
    unavailable: int
    max_unavailable: int
    verdict: Verdict
    reasons: tuple[str, ...]
    next_at: float | None
    signatures: Mapping[str, int]
    quantiles: Sequence[Quantiles] = ()
    slowest: tuple[Slow, ...] = ()


def look(progress: Progress, quantiles: Sequence[Quantiles] = (), slowest: tuple[Slow, ...] = ()) -> View:
    """Return the view of a run now; ``quantiles`` (of each wave) and ``slowest`` are computed less often."""
    plan = progress.plan
    return View(
        mode=plan.policy.mode,
        state=state_of(progress, running=not progress.stopped),
        reason=progress.stopped,
        began_at=progress.waves[0].began if progress.waves else None,
        waves=tuple(_wave(progress, wave) for wave in progress.waves),
        current=progress.began,
        failed=progress.failed,
        budget=plan.budget,
        unavailable=progress.unavailable,
        max_unavailable=plan.max_unavailable,
        verdict=progress.verdict,
        reasons=progress.reasons,
        next_at=budgets.next_wave_at(progress) if progress.began < len(progress.waves) else None,
        signatures=dict(progress.signatures),
        quantiles=quantiles,
        slowest=slowest,
    )


def _wave(progress: Progress, status: WaveStatus) -> WaveView:
    mode = progress.plan.policy.mode
    counts: dict[str, int] = {state: status.count(state) for state in STATES[mode]}
    counts["ok"] = status.count("ended") - status.failed
    if mode == "roll":
        counts["skipped"] = sum(is_skipped(progress.hosts[name]) for name in status.names("ended"))
        counts["ok"] -= counts["skipped"]
    counts["failed"] = status.failed
    return WaveView(
        name=status.wave.name,
        hosts=sum(counts.values()),
        counts=counts,
        budget=status.wave.budget,
        began=status.began,
        passed=status.passed,
        signatures=dict(status.signatures),
    )


def wave_quantiles(progress: Progress, status: WaveStatus) -> Quantiles:
    """Return p50 and p95 of the steps and phases of a wave's hosts that joined."""
    durations: dict[str, list[float]] = {}
    for name in status.names("joined", "verifying", "ended"):
        host = progress.hosts[name]
        if host.outcome is None or host.outcome.ok:
            for part, seconds in (*host.seconds.items(), *host.phases.items()):
                durations.setdefault(part, []).append(seconds)
    return {name: (quantile(values, 0.5), quantile(values, 0.95)) for name, values in durations.items()}


def slowest(progress: Progress) -> tuple[Slow, ...]:
    """Return the hosts that have been in a step for longest."""
    working = (
        Slow(name, step, status.since + status.delay)
        for wave in progress.waves[: progress.began]
        for step in STEPS[progress.plan.policy.mode]
        for name in wave.names(RUNNING[step])
        for status in (progress.hosts[name],)
    )
    return tuple(heapq.nsmallest(_SLOWEST, working, key=lambda slow: slow.since))
