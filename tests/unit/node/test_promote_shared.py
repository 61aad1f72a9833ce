"""The rate of promotion: kept over any stretch of time, by any number of workers, without a burst."""

from __future__ import annotations

import heapq
import random

import pytest

from image_builder.node.promote.shared import BURST_SECONDS, QUANTUM, Bucket, Pacer, take

MB = 1_000_000


def test_what_is_taken_is_owed_and_waited_for() -> None:
    bucket, seconds = take(Bucket(0, 10.0), 10.0, 4 * MB, 2 * MB)
    assert (bucket.tokens, seconds) == (-2 * MB, 0.5)
    bucket, seconds = take(bucket, 10.25, 4 * MB, 1 * MB)
    assert (bucket.tokens, seconds) == (-2 * MB, 0.5)


def test_rest_earns_no_more_than_a_short_burst() -> None:
    bucket, seconds = take(Bucket(0, 0.0), 3600.0, 1 * MB, 0)
    assert bucket.tokens == pytest.approx(BURST_SECONDS * MB)
    assert seconds == 0


def test_a_clock_that_stands_still_or_goes_back_earns_nothing() -> None:
    assert take(Bucket(5, 10.0), 10.0, MB, 0) == (Bucket(5, 10.0), 0.0)
    assert take(Bucket(5, 10.0), 9.0, MB, 0) == (Bucket(5, 10.0), 0.0)


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_all_workers_together_keep_the_rate(workers: int) -> None:
    rate, chance = 8 * MB, random.Random(workers)
    bucket, spent, sizes = Bucket(0, 0.0), 0, (4096, 300_000, 4 * MB)
    ready = [(0.0, n) for n in range(workers)]
    told: list[tuple[float, int]] = []
    while (now := ready[0][0]) < 60:
        _, worker = heapq.heappop(ready)
        cost = chance.choice(sizes)
        bucket, seconds = take(bucket, now, rate, cost)
        heapq.heappush(ready, (now + seconds, worker))
        told.append((now + seconds, cost))
    # Bytes count once their wait is over: never above the rate, and not far below it either.
    for end in (1.0, 10.0, 59.0):
        spent = sum(cost for at, cost in told if at <= end)
        assert rate * end * 0.5 - 4 * MB * workers <= spent <= rate * (end + BURST_SECONDS)
    assert sum(cost for at, cost in told if at <= 59) >= rate * 59 - 4 * MB * workers


def test_small_files_are_paid_together() -> None:
    asked: list[int] = []
    slept: list[float] = []

    def exchange(cost: int) -> float:
        asked.append(cost)
        return 0.25 if len(asked) == 2 else 0.0

    pacer = Pacer(exchange, slept.append)
    for _ in range(2 * QUANTUM // 4096):
        pacer.spend(4096)
    assert asked == [QUANTUM, QUANTUM]
    assert slept == [0.25]
    pacer.spend(10 * QUANTUM)
    assert asked[2:] == [10 * QUANTUM]
