"""A node's retries: how long it waits before each, and when it gives up."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from image_builder.node.net import retry
from image_builder.node.net.retry import Deadline, NotYet, backoff, patiently


@given(st.integers(0, 10_000), st.floats(0, 1, exclude_max=True), st.none() | st.floats(-5, 1e9))
def test_a_wait_is_within_its_limits_and_what_was_asked_for_is_obeyed(
    attempt: int, chance: float, asked: float | None
) -> None:
    wait = backoff(attempt, retry_after=asked, chance=lambda: chance)
    least = min(max(asked or 0, 0), retry.LONGEST_RETRY_AFTER)
    assert least <= wait <= least + min(retry.LONGEST_WAIT, 2.0 ** min(attempt, 60))


def test_full_jitter_spreads_over_a_limit_that_doubles_up_to_ten_minutes() -> None:
    most = [backoff(attempt, chance=lambda: 1.0) for attempt in range(12)]
    assert most == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 600, 600]
    assert backoff(11, chance=lambda: 0.0) == 0


def test_patience_ends_with_an_answer_or_with_what_can_not_pass() -> None:
    answers: list[Exception | str] = [NotYet(OSError("away")), NotYet(OSError("busy"), 7.0), "done"]
    waits: list[float] = []
    told: list[str] = []

    def send() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    never = Deadline(math.inf, sleep=waits.append, chance=lambda: 0.5)
    assert patiently(send, never, tell=told.append) == "done"
    assert waits == [0.5, 8.0]
    assert told == ["away; again in 0 s", "busy; again in 8 s"]
    answers = [ValueError("no such field")]
    with pytest.raises(ValueError, match="no such field"):
        patiently(send, never, tell=told.append)
    assert len(waits) == 2


def test_patience_ends_before_the_time_does() -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    def send() -> str:
        raise NotYet(OSError("away"))

    with pytest.raises(OSError, match="away"):
        patiently(send, Deadline(20.0, lambda: now[0], sleep, chance=lambda: 0.999), cap=8.0)
    assert 10 < now[0] < 20


def test_a_deadline_is_never_waited_past() -> None:
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    deadline = Deadline(110.0, clock=lambda: now[0], sleep=sleep)
    assert (deadline.attempt(), deadline.attempt(5)) == (10.0, 5.0)
    assert deadline.wait(4) and now == [104.0]
    assert not deadline.wait(6) and now == [104.0]
    assert deadline.sooner(3).until == 107.0 and deadline.sooner(30).until == 110.0
    assert deadline.poll(10) and now == [110.0]
    now[0] = 200.0
    assert (
        (deadline.remaining, deadline.attempt()) == (0.0, 1.0)
        and not deadline.wait(0)
        and not deadline.poll(1)
    )
