"""Hosts that are awaited: idle ones are reported, and those whose jobs end first are cordoned while they work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from image_builder.drain import fence
from image_builder.drain.handover import Due, Handover
from image_builder.drain.policy import Policy
from tests.unit.drain.manifests import node_object, pod_object
from tests.unit.drain.test_drain_run import Server

NOW = 1_700_000_000.0
HOSTS = ("gpu-1", "gpu-2", "gpu-3", "gpu-4")
ENDS = {"gpu-2": "2023-11-15T00:00:00Z", "gpu-3": "2023-11-14T23:00:00Z"}


def busy(ends: str = "") -> dict[str, Any]:
    return pod_object(annotations={"image-builder/ends-at": ends} if ends else {})


@pytest.fixture
def server() -> Server:
    """Return a server with four hosts at work, two of which say until when."""
    state = Server()
    for name in HOSTS:
        state.nodes[name] = node_object({"a": "b"})
        state.pods[name] = [busy(ENDS.get(name, ""))]
    return state


def handover(server: Server, max_fenced: int = 2, run: str = "roll", **policy: Any) -> Handover:
    awaited = Handover(server, run, Policy(**policy), max_fenced, wall=lambda: NOW)
    awaited.add(HOSTS)
    return awaited


def cordoned(server: Server) -> list[str]:
    return [name for name in HOSTS if fence.is_cordoned(server.nodes.get(name, {}))]


def test_those_whose_jobs_end_first_are_cordoned_while_they_work(server: Server) -> None:
    awaited = handover(server, max_fenced=3)
    assert list(awaited.turn()) == [] and cordoned(server) == ["gpu-1", "gpu-2", "gpu-3"]
    assert awaited.pod("gpu-1") == "work/a"
    assert list(awaited.turn()) == [] and len(cordoned(server)) == 3
    server.pods["gpu-3"] = []
    # The idle host stays cordoned, and the next one takes its place.
    assert list(awaited.turn()) == [Due("gpu-3")] and cordoned(server) == list(HOSTS)
    assert list(awaited.turn()) == []


def test_who_may_not_be_cordoned_is_awaited_without(server: Server) -> None:
    server.denied = {"gpu-3"}
    awaited = handover(server, max_fenced=1)
    # The next one takes its place.
    assert list(awaited.turn()) == [] and cordoned(server) == []
    assert list(awaited.turn()) == [] and cordoned(server) == ["gpu-2"]
    server.pods["gpu-3"] = []
    assert list(awaited.turn()) == [Due("gpu-3")]


def test_who_is_idle_is_told_and_not_cordoned(server: Server) -> None:
    awaited = handover(server, max_fenced=0)
    server.pods["gpu-2"] = []
    del server.nodes["gpu-4"]
    assert list(awaited.turn()) == [Due("gpu-2"), Due("gpu-4")] and cordoned(server) == []


def test_a_policy_that_cordons_no_busy_host_does_not_here_either(server: Server) -> None:
    assert list(handover(server, mode="idle-only").turn()) == [] and cordoned(server) == []


def test_cordons_of_a_driver_that_was_killed_count_before_there_are_new_ones(server: Server) -> None:
    list(handover(server).turn())
    assert cordoned(server) == ["gpu-2", "gpu-3"]
    # It looks at two hosts a turn: those that are cordoned come last.
    second = Handover(server, "roll", Policy(looks_per_second=1.0, poll_seconds=2.0), 2, wall=lambda: NOW)
    second.add(["gpu-1", "gpu-4", "gpu-2", "gpu-3"])
    for _ in range(3):
        assert list(second.turn()) == [] and cordoned(server) == ["gpu-2", "gpu-3"]


def test_what_others_do_with_cordons_is_theirs(server: Server) -> None:
    server.nodes["gpu-3"] = node_object({"a": "b"}, cordoned=True)
    awaited = handover(server, max_fenced=1)
    list(awaited.turn())
    assert fence.record_of(server.nodes["gpu-3"]) is None and fence.record_of(server.nodes["gpu-2"])
    # A person removes our cordon: it isn't restored.
    del server.nodes["gpu-2"]["spec"]["unschedulable"]
    list(awaited.turn())
    assert not fence.is_cordoned(server.nodes["gpu-2"]) and fence.record_of(server.nodes["gpu-1"])


def test_a_host_that_is_let_go_of_is_not_looked_at_any_more(server: Server) -> None:
    awaited = handover(server)
    awaited.drop("gpu-1")
    server.pods["gpu-1"] = []
    assert list(awaited.turn()) == []


def test_after_the_deadline_nobody_is_awaited(server: Server) -> None:
    """Hosts that share a gang are due together, and no further host is cordoned."""
    for name in ("gpu-1", "gpu-3"):
        server.pods[name] = [pod_object(owner="Job", spec={"nodeName": name})]
    awaited = Handover(server, "roll", Policy(), 2, deadline=NOW, wall=lambda: NOW)
    awaited.add(HOSTS)
    unit = ("gpu-1", "gpu-3")
    due = sorted(awaited.turn())
    assert due == [Due("gpu-1", unit), Due("gpu-2"), Due("gpu-3", unit), Due("gpu-4")]
    assert cordoned(server) == [] and list(awaited.turn()) == []


def test_what_a_host_runs_is_known_before_it_is_due(server: Server) -> None:
    policy = Policy(poll_seconds=1.0, looks_per_second=3.0)
    awaited = Handover(server, "roll", policy, 0, deadline=NOW, wall=lambda: NOW)
    awaited.add(HOSTS)
    assert list(awaited.turn()) == [] and len(list(awaited.turn())) == 4


class Counting(Server):
    """A server that notes whose pods are listed."""

    def __init__(self, hosts: list[str]) -> None:
        super().__init__()
        self.seen: list[str] = []
        for name in hosts:
            self.nodes[name] = node_object({"a": "b"})
            self.nodes[name]["metadata"]["name"] = name

    def each(self, path: str, take: Callable[[dict[str, Any]], None]) -> str:
        self.seen.append(path.partition("spec.nodeName%3D")[2].partition("%2C")[0])
        return super().each(path, take)


def rotating(
    fenced: int, hosts: int, gangs: dict[str, str], looks: float = 10.0
) -> tuple[Counting, Handover]:
    """Return hosts at work, some of them with our cordon, all of which were looked at; ``gangs`` are Jobs, by host."""
    names = [f"gpu-{number:03}" for number in range(hosts)]
    server = Counting(names)
    for name in names:
        pod = pod_object(name, owner="Job" if name in gangs else "", spec={"nodeName": name})
        if name in gangs:
            pod["metadata"]["ownerReferences"][0]["name"] = gangs[name]
        server.pods[name] = [pod]
    policy = Policy(looks_per_second=looks, poll_seconds=1.0)
    awaited = Handover(server, "roll", policy, fenced, wall=lambda: NOW)
    awaited.add(names)
    while sum(fence.is_cordoned(node) for node in server.nodes.values()) < fenced:
        assert list(awaited.turn()) == []
    return server, awaited


def test_hosts_with_our_cordon_have_a_rotation_of_their_own() -> None:
    server, awaited = rotating(20, 100, {})
    seen: list[str] = []
    for _ in range(5):
        server.seen.clear()
        assert list(awaited.turn()) == []
        assert len(server.seen) == 10
        seen += server.seen
    fenced = {name for name, node in server.nodes.items() if fence.is_cordoned(node)}
    # Eight of ten looks: each of them at least twice in five turns, and two others in each.
    assert {seen.count(name) for name in fenced} == {2} and len(set(seen) - fenced) == 10


def test_a_gang_that_has_ended_is_noticed_in_the_next_turn_as_a_whole() -> None:
    gangs = {f"gpu-{number:03}": "big" for number in range(30, 70)}
    server, awaited = rotating(100, 100, gangs)
    for _ in range(3):
        server.pods = {name: [] if name in gangs else pods for name, pods in server.pods.items()}
        server.seen.clear()
        assert {due.name for due in awaited.turn()} == gangs.keys()
        # Nobody is looked at twice, and the others aren't forgotten.
        assert len(server.seen) == len(set(server.seen)) <= 40 + 10
        for name in gangs:
            server.pods[name] = [pod_object(name, owner="Job", spec={"nodeName": name})]
        awaited.add(gangs)
        for _ in range(20):
            assert list(awaited.turn()) == []


def test_of_several_gangs_the_largest_is_looked_at_in_every_turn() -> None:
    gangs = {f"gpu-{number:03}": f"job-{number // 2}" for number in range(60)}
    gangs |= {f"gpu-{number:03}": "big" for number in range(60, 90)}
    server, awaited = rotating(100, 100, gangs)
    for _ in range(20):
        server.seen.clear()
        assert list(awaited.turn()) == []
        assert {"big"} <= {gangs.get(name, "") for name in server.seen} and len(server.seen) <= 10
