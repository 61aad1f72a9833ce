"""Which nodes may be tested again while the fleet works, and when that must stop. Nothing here does anything.

A re-test takes a node away from its users, so few are tested at a time; and where many fail at once it is rather the
test, the driver or the data that is wrong than the nodes, so that nothing more is taken away. A node that failed one
stays out and keeps its place among the few: whatever goes wrong, re-tests never take more of the fleet away than that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """``share`` of the fleet may be out at once because of re-tests, at least one node; 0: none is made. No node is
    tested more often than every ``period`` seconds; nodes ask every seven days.

    The breaker opens when of at least ``least`` tests in the last ``window`` seconds more than ``failing`` failed.
    """

    share: float = 0.02
    period: float = 6 * 86400.0
    window: float = 6 * 3600.0
    least: int = 5
    failing: float = 0.2


@dataclass(frozen=True)
class Candidate:
    """A node of the fleet. ``tested`` is when it was tested last, in seconds since 1970; ``under_test``: it is out
    because of a re-test, one that goes on or one that it failed."""

    name: str
    tested: float
    idle: bool
    under_test: bool = False


@dataclass(frozen=True)
class Outcome:
    """A re-test that ended."""

    ended: float
    passed: bool


def is_open(outcomes: Iterable[Outcome], now: float, limits: Limits) -> bool:
    """Tell whether the breaker is open: no re-test is granted."""
    recent = [outcome for outcome in outcomes if 0 <= now - outcome.ended <= limits.window]
    failed = sum(not outcome.passed for outcome in recent)
    return len(recent) >= limits.least and failed > limits.failing * len(recent)


def cap(fleet: int, limits: Limits) -> int:
    """Return how many of ``fleet`` nodes may be under test at once."""
    return min(fleet, max(1, int(fleet * limits.share))) if limits.share else 0


def grant(
    candidates: Sequence[Candidate], outcomes: Iterable[Outcome], now: float, limits: Limits
) -> list[str]:
    """Return the names of the nodes to test now: idle ones whose time has come, the longest untested first."""
    if is_open(outcomes, now, limits):
        return []
    free = cap(len(candidates), limits) - sum(candidate.under_test for candidate in candidates)
    due = [
        candidate
        for candidate in candidates
        if candidate.idle and not candidate.under_test and now - candidate.tested >= limits.period
    ]
    due.sort(key=lambda candidate: (candidate.tested, candidate.name))
    return [candidate.name for candidate in due[: max(0, free)]]
