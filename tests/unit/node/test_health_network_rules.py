"""Findings about routes, names and links: each rule applied to facts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from image_builder.node.health import network
from image_builder.node.net import reach
from tests.unit.node.health_findings import SETTINGS, codes


def facts(**changes: Any) -> network.Facts:
    good = network.Facts(
        routes=("eth0",),
        lookups={"registry.test": reach.Lookup(("192.0.2.1",))},
        registries=("registry.test:443",),
        api_servers=("192.0.2.2:6443",),
        connections={"registry.test:443": reach.Connection(), "192.0.2.2:6443": reach.Connection()},
    )
    return replace(good, **changes)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, []),
        ({"routes": ()}, [("network.route", "default", "fail")]),
        (
            {"connections": {"192.0.2.2:6443": reach.Connection("Connection refused")}},
            [("network.api", "192.0.2.2:6443", "warn")],
        ),
        (
            {"connections": {"registry.test:443": reach.Connection("no answer within 3 s")}},
            [("network.registry", "registry.test:443", "warn")],
        ),
        (
            # No address, no connection: one cause, one finding.
            {"lookups": {"registry.test": reach.Lookup(error="no answer")}, "connections": {}},
            [("network.dns", "registry.test", "warn")],
        ),
    ],
)
def test_network(changes: dict[str, Any], wanted: list[tuple[str, str, str]]) -> None:
    assert codes(network.network_rule(facts(**changes))) == wanted


def test_default_routes(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    head = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
    eth0 = "eth0\t{}\t0100A8C0\t0003\t0\t0\t100\t{}\t0\t0\t0\n"
    route = tmp_path / "net/route"
    route.write_text(head + eth0.format("0000A8C0", "00FFFFFF"))
    reject = (
        "00000000000000000000000000000000 00 00000000000000000000000000000000 00 "
        "00000000000000000000000000000000 ffffffff 00000001 00000000 00200200       lo\n"
    )
    (tmp_path / "net/ipv6_route").write_text(reject)
    assert network.default_routes(tmp_path) == []
    route.write_text(head + eth0.format("00000000", "00000000"))
    assert network.default_routes(tmp_path) == ["eth0"]
    (tmp_path / "net/ipv6_route").write_text(
        reject.replace("00200200       lo", "00000003     eth1").replace("ffffffff", "00000400")
    )
    assert network.default_routes(tmp_path) == ["eth0", "eth1"]


def test_flaps_count_within_their_window() -> None:
    seen: dict[str, Any] = {}
    for now, count in ((0, 5), (60, 6), (120, 8)):
        seen = json.loads(json.dumps(network.count_flaps(seen, {"eth0": count}, now, 600)))
    # Flaps before the first look don't count against this machine.
    assert network.flapping(seen, 3) == [("eth0", 3)] and network.flapping(seen, 4) == []
    assert network.flapping(network.count_flaps(seen, {"eth0": 8}, 700, 600), 1) == [("eth0", 2)]
    assert network.flapping(network.count_flaps(seen, {"eth0": 8}, 800, 600), 1) == []
    # Another device of the same name: its counter starts over.
    assert network.flapping(network.count_flaps(seen, {"eth0": 1}, 130, 600), 1) == []
    assert codes(network.link_rule(seen, SETTINGS)) == [("network.flaps", "eth0", "warn")]
    assert codes(network.port_flap_rule(seen, SETTINGS)) == [("infiniband.flaps", "eth0", "fail")]
