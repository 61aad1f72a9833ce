"""Pulls that are given up or not, row by row: the events reported and when, the limits, and the verdict."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from image_builder.bake.pull.deadline import begin, judge, observe
from image_builder.bake.pull.model import Event, Limits, Phase, Verdict

A, B = "a" * 12, "b" * 12
MB = 1_000_000

# One limit at a time, the others out of reach.
PROGRESS = Limits(progress_seconds=100, min_rate=0, rate_seconds=60, overall_seconds=1e6)
RATE = Limits(progress_seconds=1e6, min_rate=1000, rate_seconds=60, overall_seconds=1e6)
OVERALL = Limits(progress_seconds=1e6, min_rate=0, rate_seconds=60, overall_seconds=1000)

stalled = "stalled"
slow = "too slow"
long = "too long"


def judge_all(started: float, events: Iterable[Event], now: float, limits: Limits) -> Verdict | None:
    """Return the first verdict on a pull from ``started`` to ``now``; ``events`` are in chronological order.

    The pull is judged just before each event and at ``now``.
    """
    state = begin(started)
    for event in events:
        if verdict := judge(state, event.at, limits):
            return verdict
        state = observe(state, event)
    return judge(state, now, limits)


def a(at: float, phase: Phase, current: int = 0, total: int | None = None, text: str = "") -> Event:
    return Event(at, A, phase, current, total, text)


def b(at: float, phase: Phase, current: int = 0, total: int | None = None, text: str = "") -> Event:
    return Event(at, B, phase, current, total, text)


def whole(at: float, phase: Phase, current: int = 0, text: str = "") -> Event:
    return Event(at, "", phase, current, None, text)


def drip(rate: int, since: int, until: int, first: int = 0) -> list[Event]:
    """Return layer A's download of ``rate`` bytes per second from ``since``, reported every second."""
    return [a(at, "downloading", first + rate * (at - since), 10**9) for at in range(since, until + 1)]


# Fifty seconds of downloading at 100 B/s, then nothing but extracting, then the queue, then downloading again.
AROUND = [
    *[a(at, "downloading", 100 * at) for at in range(51)],
    b(50, "waiting"),
    a(50, "extracting", 1),
    a(500, "done"),
    b(1000, "downloading", 1),
]

TABLE: dict[str, tuple[list[Event], float, Limits, tuple[str, str, str, float] | None]] = {
    # Connecting: nothing is known of any layer.
    "connecting, for as long as it may": ([], 100, PROGRESS, None),
    "connecting forever": ([], 101, PROGRESS, (stalled, "", "nothing was reported yet", 101)),
    "connecting forever, and its words": (
        [whole(5, "waiting", text="Pulling from library/x")],
        101,
        PROGRESS,
        (stalled, "", "Pulling from library/x", 101),
    ),
    "connecting takes too long in all": ([], 1001, OVERALL, (long, "", "nothing was reported yet", 1001)),
    # Progress.
    "each byte is progress": (
        [a(at, "downloading", at, 800) for at in range(90, 800, 90)],
        820,
        PROGRESS,
        None,
    ),
    "a download that stops": (
        [a(0, "downloading", 1 * MB, 800 * MB), a(10, "downloading", 12_300_000, 800 * MB)],
        111,
        PROGRESS,
        (stalled, A, "downloading, 12.3 MB of 800 MB", 101),
    ),
    "equal numbers are no progress": (
        [a(at, "downloading", 5 * MB, 8 * MB) for at in range(0, 110, 10)],
        101,
        PROGRESS,
        (stalled, A, "downloading, 5 MB of 8 MB", 101),
    ),
    "a size of which nobody knows the total": (
        [a(0, "downloading", 5_250_000)],
        200,
        PROGRESS,
        (stalled, A, "downloading, 5.25 MB", 200),
    ),
    "phases further on are progress": (
        [
            a(90, "downloading", 8, 8),
            a(180, "downloaded"),
            a(270, "extracting"),
            a(360, "extracting", 4, 8),
            a(450, "done"),
        ],
        550,
        PROGRESS,
        None,
    ),
    "a phase that is told again is none": (
        [a(0, "downloading", 8, 8), a(10, "downloaded"), a(60, "downloaded")],
        111,
        PROGRESS,
        (stalled, A, "downloaded", 101),
    ),
    "an extraction that hangs at its end": (
        [a(0, "downloaded"), a(10, "extracting", 513_500_000, 513_500_000)],
        111,
        PROGRESS,
        (stalled, A, "extracting, 514 MB of 514 MB", 101),
    ),
    "an extraction that moves while all downloads are done": (
        [
            a(0, "downloaded"),
            b(0, "downloaded"),
            *[a(at, "extracting", at, 900) for at in range(90, 900, 90)],
        ],
        900,
        PROGRESS,
        None,
    ),
    "the other layer moves": (
        [a(0, "downloading", 5, 80), *[b(at, "downloading", at, 900) for at in range(50, 900, 50)]],
        900,
        PROGRESS,
        None,
    ),
    "the layer that moved last is named": (
        [
            a(0, "downloading", 5, 80),
            b(1, "downloading", 5, 80),
            a(2, "downloading", 6, 80),
            b(3, "retrying"),
        ],
        103,
        PROGRESS,
        (stalled, A, "downloading, 6 B of 80 B", 101),
    ),
    "not the layer that moved last and is done, but the one that should move": (
        [a(0, "downloading", 5, 80), b(1, "downloading", 5, 80), b(2, "done")],
        103,
        PROGRESS,
        (stalled, A, "downloading, 5 B of 80 B", 101),
    ),
    "not the layer that moved last and waits for one below it, but the one that comes": (
        [a(0, "downloading", 5, 80), b(1, "downloading", 5, 80), b(2, "downloaded")],
        103,
        PROGRESS,
        (stalled, A, "downloading, 5 B of 80 B", 101),
    ),
    "what has all its bytes and is checked isn't slow": (
        [a(0, "downloading", 0, 30_000), a(1, "downloading", 30_000, 30_000)],
        60.5,
        RATE,
        None,
    ),
    "a layer that is told of as downloaded brought its rest, not its whole once more": (
        [
            a(0, "downloading", 0, 50_000),
            a(1, "downloading", 40_000, 50_000),
            a(2, "downloaded"),
            *[b(at, "downloading", 10 * (at - 2), 10**9) for at in range(2, 61)],
        ],
        61,
        RATE,
        (slow, B, "downloading, 580 B of 1 GB at 843 B/s", 61),
    ),
    "leaving the queue without a byte is no progress": (
        [a(90, "waiting"), a(90, "downloading", 0, 80)],
        101,
        PROGRESS,
        (stalled, A, "downloading, 0 B of 80 B", 101),
    ),
    # Starting over.
    "a countdown is no progress": (
        [a(0, "downloading", 5, 80)]
        + [a(at, "retrying", text=f"Retrying in {20 - at % 20} seconds") for at in range(1, 101)],
        101,
        PROGRESS,
        (stalled, A, "retrying after 5 B of 80 B", 101),
    ),
    "retries that never bring a byte": (
        [
            event
            for at in range(0, 101, 10)
            for event in (a(at, "downloading", 0, 80), a(at + 5, "retrying", text="Retrying in 5 seconds"))
        ],
        110,
        PROGRESS,
        (stalled, A, "downloading, 0 B of 80 B", 105),
    ),
    "a layer that starts over makes progress with each byte": (
        [
            a(0, "downloading", 70, 80),
            a(10, "retrying"),
            a(20, "downloading", 0, 80),
            *[a(at, "downloading", at // 90, 80) for at in range(90, 900, 90)],
        ],
        900,
        PROGRESS,
        None,
    ),
    "to fall to nothing is no progress": (
        [a(0, "downloading", 70, 80), a(90, "downloading", 0, 80)],
        101,
        PROGRESS,
        (stalled, A, "downloading, 0 B of 80 B", 101),
    ),
    "going on where it broke off is no progress": (
        [a(0, "downloading", 70, 80), a(80, "retrying"), a(90, "downloading", 70, 80)],
        101,
        PROGRESS,
        (stalled, A, "downloading, 70 B of 80 B", 101),
    ),
    # The queue.
    "the clock stands still in the queue": (
        [a(0, "waiting"), b(0, "waiting"), a(5000, "downloading", 5, 80)],
        5100,
        PROGRESS,
        None,
    ),
    "the queue for ever": ([a(0, "waiting"), b(0, "waiting", text="Waiting")], 1e9, Limits(), None),
    "the queue is left out of a wait before and after it": (
        [a(60, "waiting"), a(5060, "downloading", 0, 80)],
        5101,
        PROGRESS,
        (stalled, A, "downloading, 0 B of 80 B", 101),
    ),
    "words of the queue are no progress": (
        [b(0, "downloading", 5, 80), *[a(at, "waiting") for at in range(1, 101)]],
        101,
        PROGRESS,
        (stalled, B, "downloading, 5 B of 80 B", 101),
    ),
    "the rest of the layers is done or in the queue": (
        [b(0, "downloading", 5, 80), a(0, "waiting"), b(10, "done")],
        5000,
        PROGRESS,
        None,
    ),
    "the image's own words don't queue it": (
        [whole(0, "waiting", text="Pulling from library/x"), a(1, "done")],
        102,
        PROGRESS,
        (stalled, "", "its only layer is done", 101),
    ),
    # All layers are done.
    "the runtime doesn't finish": (
        [a(0, "done"), b(10, "done")],
        111,
        PROGRESS,
        (stalled, "", "all 2 layers are done", 101),
    ),
    "the runtime has time to finish": ([a(0, "done"), b(10, "done")], 110, PROGRESS, None),
    "nothing is too slow once all is done": (
        [a(0, "downloading", 1, 80), a(30, "done"), b(60, "done")],
        5000,
        RATE,
        None,
    ),
    # The overall duration.
    "in all, with bytes to the last": (
        drip(1, 0, 1100),
        1100,
        OVERALL,
        (long, A, "downloading, 1 kB of 1 GB", 1001),
    ),
    "in all, without the queue": ([a(0, "waiting"), *drip(1, 5000, 6000)], 6000, OVERALL, None),
    "in all, with the time before the queue": (
        [a(500, "waiting"), *drip(1, 5000, 5501)],
        5501,
        OVERALL,
        (long, A, "downloading, 500 B of 1 GB", 1001),
    ),
    "in all, with the extraction": (
        [a(0, "downloaded"), *[a(at, "extracting", at) for at in range(0, 1200, 100)]],
        1001,
        OVERALL,
        (long, A, "extracting, 1 kB", 1001),
    ),
    # The rate.
    "a drip just over the minimum": (drip(1001, 0, 300), 300, RATE, None),
    "a drip just at the minimum": (drip(1000, 0, 300), 300, RATE, None),
    "a drip just under the minimum": (
        drip(999, 0, 300),
        300,
        RATE,
        (slow, A, "downloading, 59.9 kB of 1 GB at 999 B/s", 61),
    ),
    "a drip under the minimum, before the window is full": (drip(9, 0, 60), 60, RATE, None),
    "no minimum is asked for": (drip(1, 0, 900), 900, replace(RATE, min_rate=0), None),
    "a good start doesn't help later": (
        [*drip(100_000, 0, 100), *drip(900, 101, 300, first=10 * MB)],
        300,
        RATE,
        (slow, A, "downloading, 10.1 MB of 1 GB at 885 B/s", 61),
    ),
    "a slow start is made good": ([*drip(10, 0, 50), *drip(8000, 51, 120, first=500)], 120, RATE, None),
    "layers are added up": (
        [
            seen
            for at in range(301)
            for seen in (a(at, "downloading", 600 * at), b(at, "downloading", 600 * at))
        ],
        300,
        RATE,
        None,
    ),
    "layers are added up and are still too few": (
        [
            seen
            for at in range(301)
            for seen in (a(at, "downloading", 400 * at), b(at, "downloading", 400 * at))
        ],
        300,
        RATE,
        (slow, A, "downloading, 24 kB at 800 B/s", 61),
    ),
    "extracting alone takes as long as it likes": (
        [*drip(1000, 0, 50), a(51, "extracting", 1), a(900, "extracting", 2)],
        1000,
        RATE,
        None,
    ),
    "extracting and the queue aren't in the window": (AROUND, 1010, RATE, None),
    "the window goes on after extracting and the queue": (
        AROUND,
        1011,
        RATE,
        (slow, B, "downloading, 1 B at 83 B/s", 61),
    ),
    "retrying isn't downloading": ([a(0, "downloading", 1, 80), a(50, "retrying")], 5000, RATE, None),
    "a checksum over what came isn't downloading": ([a(0, "downloading", 80, 80)], 5000, RATE, None),
    "what came untold is counted with the phase": (
        [a(0, "downloading", 1, 90_000), b(0, "downloading", 1, 80), a(59, "downloaded")],
        100,
        RATE,
        None,
    ),
    "what comes anew after a retry is counted": (
        [*drip(1000, 0, 40), a(40, "retrying"), *drip(1000, 60, 200)],
        200,
        RATE,
        None,
    ),
    "an image that is told of as a whole alone": (
        [whole(at, "downloading", 10 * at) for at in range(100)],
        100,
        RATE,
        (slow, "", "downloading, 600 B at 10 B/s", 61),
    ),
    # Which limit comes first.
    "stalled before too slow and too long": (
        [a(0, "downloading", 5, 80)],
        5000,
        Limits(progress_seconds=50, min_rate=1000, rate_seconds=60, overall_seconds=70),
        (stalled, A, "downloading, 5 B of 80 B", 5000),
    ),
    "too slow before stalled and too long": (
        [a(0, "downloading", 5, 80), a(50, "downloading", 6, 80)],
        100,
        Limits(progress_seconds=70, min_rate=1000, rate_seconds=60, overall_seconds=80),
        (slow, A, "downloading, 6 B of 80 B at 0 B/s", 100),
    ),
    "nothing came: stalled, not slow": (
        [a(0, "downloading", 5, 80)],
        100,
        Limits(progress_seconds=90, min_rate=1000, rate_seconds=60),
        (stalled, A, "downloading, 5 B of 80 B", 100),
    ),
    "too long before stalled and too slow": (
        [a(0, "downloading", 5, 80)],
        100,
        Limits(progress_seconds=70, min_rate=1000, rate_seconds=60, overall_seconds=50),
        (long, A, "downloading, 5 B of 80 B", 100),
    ),
    "all at once": (
        [a(0, "downloading", 5, 80)],
        100,
        Limits(progress_seconds=60, min_rate=1000, rate_seconds=60, overall_seconds=60),
        (stalled, A, "downloading, 5 B of 80 B", 100),
    ),
    "an event that comes too late to help": (
        [a(0, "downloading", 5, 80), a(150, "downloading", 80, 80), a(160, "done")],
        170,
        PROGRESS,
        (stalled, A, "downloading, 5 B of 80 B", 150),
    ),
}
