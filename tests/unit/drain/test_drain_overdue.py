"""A deadline passes by the API server's clock, as two answers in a row say."""

from __future__ import annotations

import pytest

from image_builder.drain.handover import Handover
from image_builder.drain.overdue import Overdue
from image_builder.drain.policy import Policy
from image_builder.drain.run import Drain
from tests.unit.drain.manifests import node_object, pod_object
from tests.unit.drain.test_drain_run import Server

DEADLINE = 1000.0


@pytest.mark.parametrize(
    ("answers", "over"),
    [
        ([999.0, 999.0, 999.0], [False, False, False]),
        ([1000.0, 1001.0, 1002.0], [False, True, True]),
        # One of several API servers is ahead.
        ([5000.0, 998.0, 5000.0, 999.0], [False, False, False, False]),
    ],
)
def test_it_passes_by_the_clock_of_the_server(answers: list[float], over: list[bool]) -> None:
    server = Server()
    # The driver's own clock was set to a time long after.
    overdue = Overdue(server, DEADLINE, lambda: 9e9)
    assert not overdue.check()
    seen = []
    for server.served_at in answers:
        seen.append(overdue.check())
    assert seen == over


def test_a_wrong_clock_of_the_driver_evicts_nothing() -> None:
    """Neither in a drain nor on awaited hosts. One that is behind doesn't keep the server's from counting."""
    for wall, served, is_over in ((9e9, 999.0, False), (0.0, 1001.0, True)):
        server = Server()
        server.nodes["gpu-1"], server.pods["gpu-1"] = node_object({"a": "b"}), [pod_object()]
        server.served_at = served
        policy = Policy(settle_seconds=0.0)
        drain = Drain(server, "roll", policy, lambda _: None, deadline=DEADLINE, wall=lambda wall=wall: wall)  # type: ignore[misc]
        drain.add(["gpu-1"])
        for _ in range(4):
            drain.turn()
        assert bool(server.evicted) is is_over
        awaited = Handover(server, "other", policy, 0, deadline=DEADLINE, wall=lambda wall=wall: wall)  # type: ignore[misc]
        awaited.add(["gpu-1"])
        assert bool(list(awaited.turn())) is is_over


def test_a_turn_without_a_request_counts_no_answer_twice() -> None:
    server = Server()
    server.nodes["gpu-1"] = node_object({"a": "b"})
    clock = [0.0]
    policy = Policy(settle_seconds=60.0)
    drain = Drain(server, "roll", policy, lambda _: None, deadline=DEADLINE, clock=lambda: clock[0])
    drain.add(["gpu-1"])
    server.served_at = 999.0
    drain.turn()
    # Its host is idle and settles; meanwhile one of several API servers, which is ahead, answered something.
    server.served_at = 5000.0
    drain.turn()
    server.served_at, server.pods["gpu-1"] = 999.0, [pod_object()]
    clock[0] = 100.0
    drain.turn()
    assert not server.evicted
    assert drain.open_hosts == ["gpu-1"]
    drain.turn()
    assert not server.evicted
