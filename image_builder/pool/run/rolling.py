"""A roll's decision about a host after each step: it is drained, reimaged, verified and freed, or left as it was.

A host that never got the new image is freed, whatever happened. One that got it and isn't fine stays cordoned: only
`restore` returns it to work. One that is busy for longer than its wave waits is freed too, and taken in the last wave
when it is idle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

from image_builder.pool.plan.model import UNREACHED, Cell, Host, Outcome, ended, failed, rank
from image_builder.pool.plan.policy import DRAIN_ENDS_SECONDS
from image_builder.pool.run.budgets import too_many
from image_builder.pool.run.moves import (
    again,
    change_wave,
    count_unavailable,
    end,
    move,
    set_empty,
    set_missing,
)
from image_builder.pool.run.records import Chosen, Rested, Result, Surveyed
from image_builder.pool.run.state import HostStatus, Progress, WaveStatus

# The number of a failed `reimage`: the node still runs the previous image.
OLD_IMAGE = 1
STOPPED = "the run stopped before it got another image"


def after_look(progress: Progress, status: HostStatus, record: Result) -> None:
    """Decide on a host that was reached: it already runs the new image, or has yet to get it."""
    if record.joined == "yes":
        move(progress, status.host.name, "joined")
    elif record.joined == "unknown":
        end(progress, status, ended("unknown", "which image it runs is unknown"), record.at)
    elif status.starts <= progress.plan.policy.retries:
        is_rest = progress.waves[status.wave].wave.is_rest
        move(progress, status.host.name, "resting" if is_rest else "ready")
        if progress.stopped:
            leave(progress, status, record.at)
    else:
        detail = f"was reimaged {status.starts} times, but runs the previous image"
        end(progress, status, failed("reimage", OLD_IMAGE, detail), record.at)


def after_await(progress: Progress, status: HostStatus, record: Result) -> None:
    """Take a host of the last wave that is idle; skip one that never became idle."""
    outcome = record.outcome
    status.unit = record.emptied.unit
    if outcome.ok and not progress.stopped and (reason := too_many(progress, status.unit)):
        conclude(progress, status, ended("skipped", reason), record.at)
    elif outcome.ok and not progress.stopped:
        status.row, status.awaited = 0, True
        move(progress, status.host.name, "ready")
    elif outcome.ok:
        conclude(progress, status, ended("skipped", STOPPED), record.at)
    else:
        skipped = outcome.kind in (*UNREACHED, "busy")
        conclude(progress, status, ended("skipped", outcome.detail) if skipped else outcome, record.at)


def after_drain(progress: Progress, status: HostStatus, record: Result) -> None:
    """Continue with an empty host; defer one that stayed busy; free one whose cluster didn't answer."""
    status.awaited = False
    if record.outcome.ok:
        set_empty(progress, status, empty=True)
    if record.outcome.ok and not progress.stopped:
        status.row = 0
        move(progress, status.host.name, "drained")
    elif record.outcome.ok:
        conclude(progress, status, ended("skipped", STOPPED), record.at)
    elif record.outcome.kind == "busy":
        set_empty(progress, status, empty=False)
        rolls = progress.plan.policy.rolls
        is_over = rolls is not None and record.at >= rolls.deadline_at
        _defer(progress, status, record.at, record.outcome.detail, is_soon_again=not is_over)
    elif (
        progress.stopped
        or record.outcome.kind not in UNREACHED
        or not again(progress, status, record.at, "ready")
    ):
        conclude(progress, status, record.outcome, record.at)


def after_reimage(progress: Progress, status: HostStatus, record: Result) -> None:
    """Verify a host that came back with the new image; probe one that may have it."""
    outcome = status.last = record.outcome
    if outcome.ok:
        status.row = 0
        move(progress, status.host.name, "joined")
    elif record.joined == "no" and outcome.kind in (*UNREACHED, "busy"):
        # Nothing was sent: no request arrived, or the host was no longer empty.
        count_unavailable(progress, status, -1)
        status.unsent += 1
        status.starts -= 1
        count_unavailable(progress, status, 1)
        # Its drain has ended well each time, so that the attempts in a row say nothing.
        is_last = status.unsent > progress.plan.policy.retries
        if (
            outcome.kind == "busy"
            or progress.stopped
            or is_last
            or not again(progress, status, record.at, "ready")
        ):
            _settle(progress, status, outcome)
        else:
            status.last = None
    elif outcome.kind in (*UNREACHED, "unknown"):
        status.row = 0
        move(progress, status.host.name, "waiting")
    else:
        end(progress, status, outcome, record.at)


def after_free(progress: Progress, status: HostStatus, record: Result) -> None:
    """End a host with its pending outcome, or defer it; one that stays cordoned is a failure."""
    outcome = record.outcome
    if not outcome.ok and outcome.kind in UNREACHED and again(progress, status, record.at, "settled"):
        return
    if outcome.ok and status.awaited:
        # It worked on until it could be taken.
        status.awaited = False
        set_empty(progress, status, empty=False)
        if progress.stopped:
            end(progress, status, ended("skipped", STOPPED), record.at)
        else:
            move(progress, status.host.name, "ready")
    elif outcome.ok and status.last and status.last.kind == "busy":
        set_empty(progress, status, empty=False)
        _defer(progress, status, record.at, status.last.detail, is_soon_again=False)
    else:
        end(progress, status, status.last if outcome.ok and status.last else outcome, record.at)


def _defer(progress: Progress, status: HostStatus, at: float, reason: str, *, is_soon_again: bool) -> None:
    """Let a working host, without our cordon, wait for the last wave, or within it for as long as that waits.

    ``reason`` is what was in the way. In the last wave, a host that seems idle or is due after a deadline is drained at
    once: if the reason may persist, the next attempt must not be soon, that is, ``is_soon_again`` is false.
    """
    status.row = 0
    rolls = progress.plan.policy.rolls
    is_rest = progress.waves[status.wave].wave.is_rest
    if progress.stopped:
        conclude(progress, status, ended("skipped", STOPPED), at)
    elif is_rest and at >= status.idle_by - DRAIN_ENDS_SECONDS:
        conclude(progress, status, ended("skipped", reason), at)
    else:
        if is_rest and rolls and not is_soon_again:
            status.not_before = at + rolls.drain.max_wait_seconds
        move(progress, status.host.name, "resting" if is_rest else "deferred")


def after_restore(progress: Progress, status: HostStatus, record: Result) -> None:
    """End a host with its failure; ``restored`` says whether it is as it was before. There is only one attempt."""
    assert status.last is not None  # turn() set it
    status.restored = record.outcome.ok
    end(progress, status, status.last, record.at)


def conclude(progress: Progress, status: HostStatus, outcome: Outcome, at: float) -> None:
    """End a host, after removing its cordon if it is to work again."""
    # A host that is fine without a drain may have been left cordoned by a roll that is being undone, or whose journal
    # is lost.
    if outcome.ok or (status.tries["drain"] and not (status.touched and outcome.is_failure)):
        _settle(progress, status, outcome)
    else:
        end(progress, status, outcome, at)


def _settle(progress: Progress, status: HostStatus, outcome: Outcome) -> None:
    """Have a host freed and ended with an outcome; if that is `busy`, the host is deferred instead."""
    status.last = outcome
    move(progress, status.host.name, "settled")


def stop(progress: Progress, at: float) -> None:
    """Let go of hosts that don't have the new image yet, in a run that no longer changes any host."""
    for wave in progress.waves:
        for name in wave.names("waiting", "ready", "resting", "drained"):
            status = progress.hosts[name]
            # A host that was told to take the new image is probed for the result.
            if status.state != "waiting" or not status.touched:
                leave(progress, status, at)


def leave(progress: Progress, status: HostStatus, at: float) -> None:
    """Free a host that keeps its image, in a run that stopped; one that was never drained goes on waiting."""
    if status.touched:
        # It was told to take the new one, and hasn't.
        end(progress, status, status.last or ended("unknown", STOPPED), at)
    elif status.tries["drain"]:
        conclude(progress, status, ended("skipped", STOPPED), at)


def survey(progress: Progress, record: Surveyed) -> None:
    """Skip hosts that can't take jobs; as long as that is so, they count as unavailable."""
    progress.surveyed = True
    for name, status in progress.hosts.items():
        reason = record.missing.get(name, "")
        set_missing(progress, status, missing=bool(reason))
        if reason and status.state == "waiting" and not status.touched:
            end(progress, status, ended("skipped", reason), record.at)


def busy_canaries(progress: Progress, idle: Collection[str]) -> dict[str, str]:
    """Return which canaries swap places with which idle hosts of their cells, as far as there are any.

    Canaries that ended before the first wave can't take jobs.
    """
    spare: dict[Cell, list[str]] = defaultdict(list)
    for name in sorted(idle, key=rank, reverse=True):
        status = progress.hosts[name]
        if not progress.waves[status.wave].wave.is_canary:
            spare[status.host.cell].append(name)
    places = {}
    for wave in _canaries(progress):
        for name in wave.names("waiting", "ended"):
            others = spare[progress.hosts[name].host.cell]
            if name not in idle and others:
                places[name] = others.pop()
    return places


def cells(progress: Progress) -> list[list[Host]]:
    """Return the waiting hosts of each cell that has canaries, the canaries first."""
    hosts: dict[Cell, list[Host]] = {
        progress.hosts[name].host.cell: []
        for wave in _canaries(progress)
        for name in wave.names("waiting", "ended")
    }
    statuses = progress.hosts.values()
    for status in sorted(
        statuses, key=lambda s: (not progress.waves[s.wave].wave.is_canary, rank(s.host.name))
    ):
        if status.state == "waiting" and status.host.cell in hosts:
            hosts[status.host.cell].append(status.host)
    return list(hosts.values())


def _canaries(progress: Progress) -> list[WaveStatus]:
    return [wave for wave in progress.waves if wave.wave.is_canary]


def choose(progress: Progress, record: Chosen) -> None:
    """Let busy canaries swap places with idle hosts."""
    progress.chosen = True
    for busy, idle in record.places.items():
        places = progress.hosts[idle].wave, progress.hosts[busy].wave
        for name, number in zip((busy, idle), places, strict=True):
            change_wave(progress, name, number)


def deferred(progress: Progress) -> list[str]:
    """Return the hosts that were busy in their waves."""
    return [name for wave in progress.waves for name in wave.names("deferred")]


def rest(progress: Progress, record: Rested) -> None:
    """Add the last wave."""
    progress.waves.append(WaveStatus(record.wave, frozenset(record.wave.verify)))
    for name in record.wave.hosts:
        change_wave(progress, name, len(progress.waves) - 1)
        move(progress, name, "resting")


def turn(progress: Progress, names: Iterable[str]) -> None:
    """Let failed hosts get their previous image back."""
    for name in names:
        status = progress.hosts[name]
        status.last = status.outcome
        move(progress, name, "broken")


def to_restore(progress: Progress) -> list[str]:
    """Return the hosts that failed with the new image and haven't been restored."""
    return [
        name
        for wave in progress.waves[: progress.began]
        for name in wave.names("ended")
        for status in (progress.hosts[name],)
        if status.touched and status.restored is None and status.outcome and status.outcome.is_failure
    ]
