"""What becomes of a host of a roll after each step: drained, of another image, verified, freed; or as it was before.

A host that never got another image is freed, whatever happened. One that did and is not fine keeps its cordon: only
`restore` takes it back to work.
"""

from __future__ import annotations

from collections.abc import Iterable

from image_builder.pool.plan.model import UNREACHED, Outcome, ended, failed
from image_builder.pool.run.moves import again, end, move
from image_builder.pool.run.records import Result
from image_builder.pool.run.state import HostStatus, Progress

# The node runs the image that it was to leave.
OLD_IMAGE = 1
STOPPED = "the run stopped before it had another image"


def after_look(progress: Progress, status: HostStatus, record: Result) -> None:
    """Decide on a host that was reached: it runs the new image already, or is to get it."""
    if record.joined == "yes":
        move(progress, status.host.name, "joined")
    elif record.joined == "unknown":
        end(progress, status, ended("unknown", "which image it runs is unknown"), record.at)
    elif status.starts <= progress.plan.policy.retries:
        move(progress, status.host.name, "ready")
        if progress.stopped:
            leave(progress, status, record.at)
    else:
        detail = f"got another image {status.starts} times, and runs the previous one"
        end(progress, status, failed("reimage", OLD_IMAGE, detail), record.at)


def after_drain(progress: Progress, status: HostStatus, record: Result) -> None:
    """Go on with an empty host; free one that stayed busy, or whose cluster did not answer."""
    if record.outcome.ok and not progress.stopped:
        status.row = 0
        move(progress, status.host.name, "drained")
    elif record.outcome.ok:
        conclude(progress, status, ended("skipped", STOPPED), record.at)
    elif (
        progress.stopped
        or record.outcome.kind not in UNREACHED
        or not again(progress, status, record.at, "ready")
    ):
        conclude(progress, status, record.outcome, record.at)


def after_reimage(progress: Progress, status: HostStatus, record: Result) -> None:
    """Verify what came back with the new image; find out about what may have it."""
    outcome = status.last = record.outcome
    if outcome.ok:
        status.row = 0
        move(progress, status.host.name, "joined")
    elif record.joined == "no" and outcome.kind in (*UNREACHED, "skipped"):
        # Nothing was sent: no request arrived, or the host was not empty any more.
        if progress.stopped or not again(progress, status, record.at, "ready"):
            _settle(progress, status, outcome)
    elif outcome.kind in (*UNREACHED, "unknown"):
        status.row = 0
        move(progress, status.host.name, "waiting")
    else:
        end(progress, status, outcome, record.at)


def after_free(progress: Progress, status: HostStatus, record: Result) -> None:
    """End a host as it was to end; one that stays cordoned is a failure."""
    outcome = record.outcome
    if not outcome.ok and outcome.kind in UNREACHED and again(progress, status, record.at, "settled"):
        return
    assert status.last is not None  # conclude gave it
    end(progress, status, status.last if outcome.ok else outcome, record.at)


def after_restore(progress: Progress, status: HostStatus, record: Result) -> None:
    """End a host that failed as it did; ``restored`` says whether it is what it was before. It is tried once."""
    assert status.last is not None  # turn gave it
    status.restored = record.outcome.ok
    end(progress, status, status.last, record.at)


def conclude(progress: Progress, status: HostStatus, outcome: Outcome, at: float) -> None:
    """End a host, after its cordon was taken back where it is to work again."""
    # Who is fine without a drain may have been left cordoned: by a roll that is undone, or whose journal is lost.
    if outcome.ok or (status.tries["drain"] and not (status.touched and outcome.is_failure)):
        _settle(progress, status, outcome)
    else:
        end(progress, status, outcome, at)


def _settle(progress: Progress, status: HostStatus, outcome: Outcome) -> None:
    status.last = outcome
    move(progress, status.host.name, "settled")


def stop(progress: Progress, at: float) -> None:
    """Let go of who has no other image yet, in a run that changes no host any more."""
    for wave in progress.waves:
        for name in wave.names("waiting", "ready", "drained"):
            status = progress.hosts[name]
            # Who was told is asked what came of it.
            if status.state != "waiting" or not status.touched:
                leave(progress, status, at)


def leave(progress: Progress, status: HostStatus, at: float) -> None:
    """Free a host that keeps its image, in a run that stopped; who was never drained waits, as it did before."""
    if status.touched:
        # It was told to take another one, and has not.
        end(progress, status, status.last or ended("unknown", STOPPED), at)
    elif status.tries["drain"]:
        conclude(progress, status, ended("skipped", STOPPED), at)


def turn(progress: Progress, names: Iterable[str]) -> None:
    """Let hosts that failed get back the image that they had."""
    for name in names:
        status = progress.hosts[name]
        status.last = status.outcome
        move(progress, name, "broken")


def to_restore(progress: Progress) -> list[str]:
    """Return the hosts that failed with another image, and were not restored."""
    return [
        name
        for wave in progress.waves[: progress.began]
        for name in wave.names("ended")
        for status in (progress.hosts[name],)
        if status.touched and status.restored is None and status.outcome and status.outcome.is_failure
    ]
