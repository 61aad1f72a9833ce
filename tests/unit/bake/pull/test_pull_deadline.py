"""The deadlines of a pull: every rule as a row of a table, and that the judge's memory doesn't grow."""

from __future__ import annotations

import random
import sys
from dataclasses import FrozenInstanceError

import pytest

from image_builder.bake.pull.deadline import State, begin, judge, observe
from image_builder.bake.pull.model import Event, Limits, Phase, Verdict
from tests.unit.bake.pull.deadline_rows import PROGRESS, RATE, TABLE, A, B, a, b, judge_all


@pytest.mark.parametrize(("events", "now", "limits", "expected"), TABLE.values(), ids=TABLE)
def test_verdict(
    events: list[Event], now: float, limits: Limits, expected: tuple[str, str, str, float] | None
) -> None:
    found = judge_all(0, [seen for seen in events if seen.at <= now], now, limits)
    assert (found and (found.kind, found.layer, found.last, found.seconds)) == expected


def test_the_clock_may_begin_anywhere() -> None:
    for began in (-5000.0, 0.0, 1e6):
        events = [a(began + 1, "downloading", 5, 80)]
        assert judge_all(began, events, began + 101, PROGRESS) is None
        assert judge_all(began, events, began + 102, PROGRESS) == Verdict(
            "stalled", A, "downloading, 5 B of 80 B", 101
        )


def test_nobody_asked_in_time() -> None:
    """A slow download is forgiven once nothing is downloading; a stall isn't, not even in the queue."""
    state = begin(0)
    for seen in (a(0, "downloading", 5), b(0, "downloaded"), a(150, "waiting"), b(150, "extracting")):
        state = observe(state, seen)
    assert judge(state, 150, RATE) is None
    state = observe(observe(begin(0), a(150, "waiting")), b(150, "waiting"))
    assert judge(state, 5000, PROGRESS) == Verdict("stalled", A, "waiting", 150)


def test_asking_changes_nothing() -> None:
    state = observe(begin(0), a(0, "downloading", 5, 80))
    before = repr(state)
    for now in (50, 500, 5000, 7):
        judge(state, now, Limits())
    assert repr(state) == before
    with pytest.raises(FrozenInstanceError):
        state.at = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        state.layers[B] = state.layers[A]  # type: ignore[index]


def test_events_out_of_order_turn_no_clock_back() -> None:
    state = observe(observe(begin(0), a(50, "downloading", 5, 80)), b(20, "downloading", 5, 80))
    assert (state.at, state.counted) == (50, 50)
    assert judge(state, 0, PROGRESS) is None


def _weight(state: State) -> int:
    """Return roughly how many bytes a state takes."""
    return sys.getsizeof(state.points) + sum(sys.getsizeof(layer) for layer in state.layers.values())


@pytest.mark.parametrize("step", [0.01, 1.0, 30.0])
def test_memory_is_bounded_whatever_the_number_of_events(step: float) -> None:
    """Twelve layers with random events, restarts and extractions included; the longest step covers over a week."""
    chance = random.Random(1)
    names = [f"{number:012x}" for number in range(12)]
    phases: tuple[Phase, ...] = ("waiting", "retrying", "downloaded", "extracting", "done")
    state, most, at = begin(0), 0, 0.0
    for _ in range(25_000):
        at += step * chance.random() * 2
        phase: Phase = "downloading" if chance.random() < 0.9 else chance.choice(phases)
        state = observe(state, Event(at, chance.choice(names), phase, chance.randrange(10**9), 10**9))
        most = max(most, len(state.points))
    assert len(state.layers) == len(names)
    assert most <= 1026
    assert _weight(state) < 32_000
    clocks = [clock for clock, _ in state.points]
    sums = [so_far for _, so_far in state.points]
    assert clocks == sorted(set(clocks)) and sums == sorted(sums)
    assert state.points[-1][1] == state.received


@pytest.mark.parametrize("window", [10, 300, 3600, 14400])
def test_a_thinned_history_still_tells_fast_from_slow(window: float) -> None:
    """After half an hour or a day, any window is accurate to a few percent, and never too strict."""
    every, seconds = (0.1, 1800) if window <= 300 else (5.0, 86_400)
    state = begin(0)
    for number in range(round(seconds / every)):
        at = number * every
        state = observe(state, a(at, "downloading", round(at * 1000), 10**12))
    for rate, expected in ((999, False), (1030 + 1000 * 2 * max(1.0, every) / window, True)):
        limits = Limits(progress_seconds=1e9, min_rate=rate, rate_seconds=window, overall_seconds=1e9)
        assert (judge(state, state.at, limits) is not None) == expected, rate


@pytest.mark.parametrize(
    ("verdict", "sentence"),
    [
        (
            Verdict("stalled", "sha256:3f2a0123456789abcdef", "downloading, 12.3 MB of 800 MB", 1800),
            "no progress for 30:00 min; layer 3f2a01234567: downloading, 12.3 MB of 800 MB",
        ),
        (
            Verdict("stalled", "", "nothing was reported yet", 42.4),
            "no progress for 0:42 min; nothing was reported yet",
        ),
        (
            Verdict("too slow", A, "downloading, 5 MB at 12 kB/s", 301),
            f"too slow for 5:01 min; layer {A}: downloading, 5 MB at 12 kB/s",
        ),
        (
            Verdict("too long", A, "extracting, 1 kB", 4 * 3600 + 62),
            f"not finished after 4:01:02 h; layer {A}: extracting, 1 kB",
        ),
    ],
)
def test_sentence(verdict: Verdict, sentence: str) -> None:
    assert str(verdict) == sentence
