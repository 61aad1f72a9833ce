"""The right to act: judged only by our own clock, and never by a lease that has been lost meanwhile."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest

from image_builder.cluster.gate.model import Node, Rules, Wish
from image_builder.cluster.gate.retest import Limits, Retester
from image_builder.drain.lease import NAMESPACE, Election, Holders, Leases, Settings, lease_of
from image_builder.errors import PoolError
from image_builder.node.errors import NodeError
from image_builder.node.net.kube import Client, KubeError
from image_builder.node.net.kubeconfig import Access, Pem
from image_builder.system.identity import identity, is_dead, name_of

BOOT = "11111111-2222-3333-4444-555555555555"
NOW = 1_700_000_000.0


class Api:
    """An API server that has one lease, and takes its time, in which the lease's holder may renew it."""

    def __init__(self) -> None:
        self.clock, self.seconds = 0.0, 0.0
        self.renewed = "a"
        self.puts: list[float] = []

    def find(self, path: str) -> dict[str, Any]:
        return self.request("GET", path)

    def request(self, method: str, _path: str, _body: Any = None, _kind: str = "") -> dict[str, Any]:
        self.clock += self.seconds
        if method != "GET":
            self.puts.append(self.clock)
        return {"metadata": {}, "spec": {"holderIdentity": "other", "renewTime": self.renewed}}


def test_a_lease_lasts_from_when_it_was_seen_and_not_from_when_it_was_asked_for() -> None:
    api = Api()
    election = Election(cast("Client", api), "us", Settings(duration=30.0), lambda: api.clock)
    api.seconds = 14.0  # its holder renews it just before the answer, and leads for 20 more seconds
    election.attempt()
    api.seconds = 0.0
    for at in (31.0, 43.0, 44.0, 45.0):
        api.clock = at
        election.attempt()
    assert api.puts == [45.0]


def test_a_lease_that_was_taken_counts_from_before_the_request() -> None:
    api = Api()
    election = Election(
        cast("Client", api), "other", Settings(duration=30.0, deadline=20.0), lambda: api.clock
    )
    api.seconds = 8.0  # of the look, and of the renewal
    election.attempt()
    assert api.puts == [16.0]
    for at, leads in ((19.9, True), (20.0, False)):
        api.clock = at
        assert election.leads is leads


def test_who_loses_the_lease_between_two_nodes_stops_there() -> None:
    api = Api()
    wishes = [Wish(BOOT, f"nonce-{n}", 0.0, NOW + 3600, "text") for n in range(5)]
    nodes = [Node(f"n{n}", BOOT, "True", BOOT, wish=wish) for n, wish in enumerate(wishes)]
    lines: list[str] = []
    retester = Retester(cast("Client", api), Rules(), Limits(share=0.0), lines.append)
    retester.turn(nodes, NOW, lambda: len(lines) < 2)
    assert len(api.puts) == len(lines) == 2


class Leased(Client):
    """An API server with Leases by name; of two writers of one, the second is refused for its old version."""

    def __init__(self) -> None:
        super().__init__(Access("https://lab", Pem(text="")))
        self.leases: dict[str, dict[str, Any]] = {}

    def request(self, method: str, path: str, body: Any = None, _type: str = "") -> dict[str, Any]:
        name = path.rpartition("/")[2]
        if method == "GET":
            if name not in self.leases:
                raise KubeError("not found", 404)
            return copy.deepcopy(self.leases[name])
        assert path.startswith(f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases")
        self.leases[body["metadata"]["name"]] = copy.deepcopy(body)
        return {}

    def each(self, path: str, take: Callable[[dict[str, Any]], None]) -> str:
        assert path == f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
        for lease in self.leases.values():
            take(lease)
        return "1"


def test_a_scale_set_has_one_holder_whatever_its_run() -> None:
    server = Leased()
    first, copied = Leases(lambda: server, "roll-1@a.1.1"), Leases(lambda: server, "roll-1@b.1.1")
    other = Leases(lambda: server, "roll-2")
    with first:
        first.hold("/Set/A")
        with pytest.raises(PoolError, match="is held by roll-1@a.1.1 .Lease image-builder/set-"):
            other.hold("/set/a")
        other.hold("/set/b")
        with pytest.raises(PoolError, match="held by roll-1"):
            copied.hold("/set/a")
    other.hold("/set/a")  # released at the end of its block
    with pytest.raises(PoolError, match="held by roll-2"):
        Leases(lambda: server, "roll-1").hold("/set/a")


def test_a_process_of_this_machine_that_has_ended_holds_nothing() -> None:
    """Its number may belong to another process by now, and another machine or container has such a number, too."""
    machine, number, start = identity("").removeprefix("@").split(".")
    server = Leased()
    for place, (holder, is_gone) in enumerate(
        (
            (f"roll-1@{machine}.{number}.{start}", False),
            (f"roll-1@{machine}.{number}.{int(start) - 1}", True),
            (f"roll-1@{machine}.4194305.7", True),
            (f"roll-1@{machine}0.4194305.7", False),
            ("roll-1@elsewhere-1.4194305.7", False),
            (f"roll-1@{machine}", False),
            ("roll-1", False),
        )
    ):
        assert is_dead(holder) is is_gone and name_of(holder) == "roll-1"
        Leases(lambda: server, holder).hold(f"/set/{place}")
        with nullcontext() if is_gone else pytest.raises(PoolError):
            Leases(lambda: server, "roll-1@here.1.1").hold(f"/set/{place}")


@pytest.mark.parametrize("takes_over", [False, True])
def test_a_process_that_hangs_but_renews_its_lease_can_be_dismissed(*, takes_over: bool) -> None:
    server, told = Leased(), list[str]()
    with Leases(lambda: server, "roll-1@a.1.1", BRIEF) as hanging:
        hanging.hold("/set/a")
        # A renewal within a second can't be told from none: fractions of a second aren't in a Lease's duration.
        following = Leases(lambda: server, "roll-1@b.1.1", replace(BRIEF, duration=30.0))
        with following, nullcontext() if takes_over else pytest.raises(PoolError):
            following.take("/set/a", tell=told.append, takes_over=takes_over)
            # It could act for as long as it was sure of its Lease: no longer.
            with pytest.raises(PoolError, match="held by roll-1@b"):
                hanging.hold("/set/a")
            following.hold("/set/a")
    assert len(told) == 1 and "roll-1@a.1.1" in told[0]


def test_a_process_of_another_run_is_never_dismissed() -> None:
    server = Leased()
    with Leases(lambda: server, "roll-1@a.1.1", BRIEF) as driving:
        driving.hold("/set/a")
        other = Leases(lambda: server, "roll-2@b.1.1", replace(BRIEF, duration=30.0))
        with other, pytest.raises(PoolError, match="held by roll-1@a"):
            other.take("/set/a", takes_over=True)
        driving.hold("/set/a")
        assert server.leases[lease_of("/set/a")]["spec"]["holderIdentity"] == "roll-1@a.1.1"


BRIEF = Settings(namespace=NAMESPACE, duration=0.4, deadline=0.3, pause=0.1)


def test_who_comes_waits_for_one_that_is_gone_and_is_refused_by_one_that_is_there() -> None:
    server = Leased()
    Leases(lambda: server, "gone", BRIEF).hold("/set/a")
    Leases(lambda: server, "next", BRIEF).take("/set/a")
    assert server.leases[lease_of("/set/a")]["spec"]["holderIdentity"] == "next"
    with Leases(lambda: server, "there", BRIEF) as there:
        there.hold("/set/b")
        # This one waits longer than a renewal takes on a busy machine: fractions of a second aren't in a Lease.
        late = Leases(lambda: server, "late", replace(BRIEF, duration=30.0))
        with pytest.raises(PoolError, match="held by there"):
            late.take("/set/b")


def test_leases_of_one_that_is_gone_run_out_together(monkeypatch: pytest.MonkeyPatch) -> None:
    server, sets = Leased(), [f"/set/{n}" for n in range(8)]
    gone = Leases(lambda: server, "gone", BRIEF)
    for path in sets:
        gone.hold(path)
    following, pauses = Leases(lambda: server, "next", BRIEF), list[float]()

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        time.sleep(seconds)

    monkeypatch.setattr(following._stop, "wait", pause)
    following.take(*sets)
    # One after another would take as many times longer.
    assert sum(pauses) < len(sets) / 2 * BRIEF.duration
    assert {lease["spec"]["holderIdentity"] for lease in server.leases.values()} == {"next"}


def test_a_certificate_that_cannot_be_read_for_a_moment_ends_no_renewal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Leased()
    with Leases(lambda: server, "roll", BRIEF) as leases:
        leases.hold("/set/a")
        request = server.request
        monkeypatch.setattr(server, "request", partial(_fail, NodeError("kube.config", "half a file")))
        time.sleep(2 * BRIEF.pause)
        monkeypatch.setattr(server, "request", request)
        before = server.leases[lease_of("/set/a")]["spec"]["renewTime"]
        end = time.monotonic() + 30
        while server.leases[lease_of("/set/a")]["spec"]["renewTime"] == before:
            assert time.monotonic() < end, "it is not renewed any more"
            time.sleep(BRIEF.pause / 4)


def _fail(error: Exception, *_: object) -> None:
    raise error


def test_a_lease_that_nobody_renews_runs_out_for_who_looks() -> None:
    server, now = Leased(), [0.0]
    Leases(lambda: server, "roll-1").hold("/set/a")
    holders, name = Holders(lambda: now[0]), lease_of("/set/a")
    holders.look(server)
    assert holders.holder(name) == "roll-1" and holders.holder("set-other") == ""
    now[0] = 100.0
    server.leases[name]["spec"]["renewTime"] = "later"
    holders.look(server)
    for at, expected in ((200.0, "roll-1"), (221.0, "")):
        now[0] = at
        holders.look(server)
        assert holders.holder(name) == expected
    server.leases.clear()
    holders.look(server)
    assert holders.holder(name) == ""


def _refuse(answer: OSError, _number: int, _signal: int) -> None:
    raise answer


def test_a_process_that_proc_hides_may_be_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's, with `hidepid`: only the kernel's answer to a signal tells it from one that has ended."""
    machine = identity("").removeprefix("@").partition(".")[0]
    for answer, is_gone in ((PermissionError(), False), (ProcessLookupError(), True)):
        with monkeypatch.context() as patch:
            patch.setattr("image_builder.system.identity.os.kill", partial(_refuse, answer))
            assert is_dead(f"roll-1@{machine}.4194305.7") is is_gone
