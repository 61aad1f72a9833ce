"""Who acts: by our own clock alone, and never by a lease that has been lost meanwhile."""

from __future__ import annotations

from typing import Any, cast

from image_builder.cluster.gate.model import Node, Rules, Wish
from image_builder.cluster.gate.retest import Limits, Retester
from image_builder.drain.lease import Election, Settings
from image_builder.node.net.kube import Client

BOOT = "11111111-2222-3333-4444-555555555555"
NOW = 1_700_000_000.0


class Api:
    """An API server that has one lease, and takes its time. ``renew`` is what its holder does meanwhile."""

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
    api.seconds = 14.0  # its holder renews it just before it is answered, and leads for 20 seconds more
    election.attempt()
    api.seconds = 0.0
    for at in (31.0, 43.0, 44.0, 45.0):
        api.clock = at
        election.attempt()
    assert api.puts == [45.0]


def test_who_loses_the_lease_between_two_nodes_stops_there() -> None:
    api = Api()
    wishes = [Wish(BOOT, f"nonce-{n}", 0.0, NOW + 3600, "text") for n in range(5)]
    nodes = [Node(f"n{n}", BOOT, "True", BOOT, wish=wish) for n, wish in enumerate(wishes)]
    lines: list[str] = []
    retester = Retester(cast("Client", api), Rules(), Limits(share=0.0), lines.append)
    retester.turn(nodes, NOW, lambda: len(lines) < 2)
    assert len(api.puts) == len(lines) == 2
