"""A host's moves from one state to another: all counts are kept up to date, and nothing else changes a state."""

from __future__ import annotations

from image_builder.pool.plan.model import Outcome
from image_builder.pool.run.state import HostStatus, Progress, State, WaveStatus


def move(progress: Progress, name: str, state: State) -> None:
    """Put a host into a state."""
    status = progress.hosts[name]
    wave = progress.waves[status.wave]
    count_unavailable(progress, status, -1)
    _count_failed(progress, wave, status, -1)
    wave.remove(name, status.state)
    status.state = state
    if state != "ended":
        status.outcome = status.ended_at = None
    wave.add(name, state)
    _count_failed(progress, wave, status, 1)
    count_unavailable(progress, status, 1)


def end(progress: Progress, status: HostStatus, outcome: Outcome, at: float) -> None:
    """End a host with its outcome."""
    status.outcome, status.ended_at = outcome, at
    if outcome.ok:
        progress.proven.add(status.host.cell)
        set_missing(progress, status, missing=False)
    move(progress, status.host.name, "ended")


def again(progress: Progress, status: HostStatus, at: float, state: State) -> bool:
    """Let a host wait for another attempt, twice as long each time; return False if it has none left."""
    policy = progress.plan.policy
    if status.row >= policy.retries:
        return False
    status.not_before = at + policy.retry_seconds * 2**status.row
    status.row += 1
    move(progress, status.host.name, state)
    return True


def count_unavailable(progress: Progress, status: HostStatus, by: int) -> None:
    """Add ``by`` to the counts of unavailable hosts if a host is one; call with -1 before a change and 1 after it."""
    if status.unavailable:
        progress.unavailable += by
        progress.zones[status.host.zone] += by


def set_empty(progress: Progress, status: HostStatus, *, empty: bool) -> None:
    """Note whether a cordoned host has no work."""
    count_unavailable(progress, status, -1)
    status.empty = empty
    count_unavailable(progress, status, 1)


def set_missing(progress: Progress, status: HostStatus, *, missing: bool) -> None:
    """Note whether a host can't take jobs for a reason other than the run."""
    count_unavailable(progress, status, -1)
    status.missing = missing
    count_unavailable(progress, status, 1)


def change_wave(progress: Progress, name: str, number: int) -> None:
    """Put a host into another wave; its state stays the same."""
    status = progress.hosts[name]
    progress.waves[status.wave].remove(name, status.state)
    status.wave = number
    progress.waves[number].add(name, status.state)


def _count_failed(progress: Progress, wave: WaveStatus, status: HostStatus, by: int) -> None:
    if status.state != "ended" or status.outcome is None or not status.outcome.is_failure:
        return
    signature = status.outcome.signature
    for counts in (progress.signatures, wave.signatures):
        counts[signature] += by
        if not counts[signature]:
            del counts[signature]
    progress.failed += by
    wave.failed += by
