"""Each node once, not too many at a time, those that were refused later and later."""

from __future__ import annotations

from image_builder.cluster.gate.queue import Queue


def queue(rate: float = 10, burst: int = 3) -> Queue:
    return Queue(rate, burst, lambda: 0.5)


def test_a_burst_then_the_rate() -> None:
    made = queue()
    for number in range(100):
        made.add(f"n{number}", 0.0)
    taken = [made.take(0.0)[0] for _ in range(5)]
    assert taken == ["n0", "n1", "n2", None, None]
    assert made.take(0.0)[1] == 0.1
    seen = sum(made.take(1.0 + tick / 1000)[0] is not None for tick in range(2000))
    assert 20 <= seen <= 23  # two seconds' worth, and the burst


def test_each_node_once() -> None:
    made = queue()
    made.add("a", 0.0)
    made.add("a", 1.0)
    assert len(made) == 1
    assert made.take(1.0) == ("a", 0.0)
    assert made.take(1.0) == (None, float("inf"))


def test_one_that_was_refused_waits_longer_each_time_and_holds_up_nobody() -> None:
    made = queue(rate=1000, burst=1000)
    waits = []
    for _ in range(4):
        made.failed("a", 0.0)
        made.add("a", 0.0)  # a change of the node does not shorten it
        waits.append(made.take(0.0)[1])
        made.add("b", 0.0)
        assert made.take(0.0)[0] == "b"
    assert waits == [0.5, 1.0, 2.0, 4.0]
    made.drop("a")
    made.add("a", 0.0)
    assert made.take(0.0)[0] == "a"


def test_what_the_server_asked_for_is_waited() -> None:
    made = queue()
    made.failed("a", 0.0, retry_after=30)
    assert made.take(0.0)[1] == 30.5
