"""A caller's rate limit; and a queue: each node once, not too many at a time, failed ones ever later."""

from __future__ import annotations

import pytest

from image_builder.cluster.limits import Limiter, Queue, whole_seconds


def test_a_bucket_fills_again() -> None:
    limiter = Limiter(burst=2, per_second=0.5)
    assert [limiter.take("a", 0.0) for _ in range(3)] == [0, 0, 2.0]
    # Another caller has a bucket of its own; and a refused request uses nothing up.
    assert limiter.take("b", 0.0) == 0
    assert limiter.take("a", 1.0) == 1.0
    assert limiter.take("a", 2.0) == 0 and limiter.take("a", 2.0) == 2.0
    # A bucket never has more than it began with.
    assert [limiter.take("a", 1000.0) for _ in range(3)] == [0, 0, 2.0]


def test_buckets_that_are_full_again_are_forgotten() -> None:
    limiter = Limiter(burst=2, per_second=1)
    for number in range(9_998):
        limiter.take(f"old {number}", 0.0)
    for _ in range(3):
        limiter.take("busy", 1.5)
    limiter.take("once", 1.5)
    limiter.take("new", 3.0)
    assert set(limiter._buckets) == {"busy", "once", "new"}
    assert limiter.take("busy", 3.0) == 0 and limiter.take("busy", 3.0) == 0.5


@pytest.mark.parametrize(("seconds", "header"), [(0.001, 1), (1.0, 1), (1.2, 2), (59.5, 60)])
def test_retry_after_is_never_too_early(seconds: float, header: int) -> None:
    assert whole_seconds(seconds) == header


def queue(rate: float = 10, burst: int = 3) -> Queue:
    return Queue(rate, burst, lambda: 0.5)


def test_a_burst_then_the_rate() -> None:
    nodes = queue()
    for number in range(100):
        nodes.add(f"n{number}", 0.0)
    names = [nodes.take(0.0)[0] for _ in range(5)]
    assert names == ["n0", "n1", "n2", None, None]
    assert nodes.take(0.0)[1] == 0.1
    count = sum(nodes.take(1.0 + tick / 1000)[0] is not None for tick in range(2000))
    assert 20 <= count <= 23  # two seconds' worth, and the burst


def test_each_node_once() -> None:
    nodes = queue()
    nodes.add("a", 0.0)
    nodes.add("a", 1.0)
    assert len(nodes) == 1
    assert nodes.take(1.0) == ("a", 0.0)
    assert nodes.take(1.0) == (None, float("inf"))


def test_one_that_was_refused_waits_longer_each_time_and_holds_up_nobody() -> None:
    nodes = queue(rate=1000, burst=1000)
    waits = []
    for _ in range(4):
        nodes.failed("a", 0.0)
        nodes.add("a", 0.0)  # a change to the node doesn't shorten the wait
        waits.append(nodes.take(0.0)[1])
        nodes.add("b", 0.0)
        assert nodes.take(0.0)[0] == "b"
    assert waits == [0.5, 1.0, 2.0, 4.0]
    nodes.drop("a")
    nodes.add("a", 0.0)
    assert nodes.take(0.0)[0] == "a"


def test_what_the_server_asked_for_is_waited() -> None:
    nodes = queue()
    nodes.failed("a", 0.0, retry_after=30)
    assert nodes.take(0.0)[1] == 30.5
