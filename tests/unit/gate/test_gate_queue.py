"""Each node once, not too many at a time, those that were refused later and later."""

from __future__ import annotations

from image_builder.cluster.gate.queue import Queue


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
        nodes.add("a", 0.0)  # a change of the node does not shorten it
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
