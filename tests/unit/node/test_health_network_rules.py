"""What a look finds of routes, names and links, by each rule on facts; a name server's messages byte by byte."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from image_builder.node.health import connect, dns, flaps, infiniband, network
from tests.unit.node.health_findings import SETTINGS, codes


def facts(**changes: Any) -> network.Facts:
    good = network.Facts(
        routes=("eth0",),
        answers={"registry.test": dns.Answer("registry.test", ("192.0.2.1",))},
        registries=("registry.test:443",),
        api_servers=("192.0.2.2:6443",),
        connected={"registry.test:443": connect.Connected(), "192.0.2.2:6443": connect.Connected()},
    )
    return replace(good, **changes)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, []),
        ({"routes": ()}, [("network.route", "default", "fail")]),
        (
            {"connected": {"192.0.2.2:6443": connect.Connected("Connection refused")}},
            [("network.api", "192.0.2.2:6443", "warn")],
        ),
        (
            {"connected": {"registry.test:443": connect.Connected("no answer within 3 s")}},
            [("network.registry", "registry.test:443", "warn")],
        ),
        (
            # No address, no connection: one cause, one finding.
            {"answers": {"registry.test": dns.Answer("registry.test", error="no answer")}, "connected": {}},
            [("network.dns", "registry.test", "warn")],
        ),
    ],
)
def test_network(changes: dict[str, Any], wanted: list[tuple[str, str, str]]) -> None:
    assert codes(network.rule(facts(**changes))) == wanted


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
        seen = json.loads(json.dumps(flaps.observe(seen, {"eth0": count}, now, 600)))
    # What was before the first look is not this machine's trouble now.
    assert flaps.too_many(seen, 3) == [("eth0", 3)] and flaps.too_many(seen, 4) == []
    assert flaps.too_many(flaps.observe(seen, {"eth0": 8}, 700, 600), 1) == [("eth0", 2)]
    assert flaps.too_many(flaps.observe(seen, {"eth0": 8}, 800, 600), 1) == []
    # Another device of the same name: its counter starts over.
    assert flaps.too_many(flaps.observe(seen, {"eth0": 1}, 130, 600), 1) == []
    assert codes(network.flap_rule(seen, SETTINGS)) == [("network.flaps", "eth0", "warn")]
    assert codes(infiniband.flap_rule(seen, SETTINGS)) == [("infiniband.flaps", "eth0", "fail")]


def test_dns_messages() -> None:
    query = dns.question(b"\x12\x34", "registry.test.", 1)
    assert query[:2] == b"\x12\x34" and query.endswith(b"\x08registry\x04test\0\0\x01\0\x01")
    address = struct.pack(">HHHIH", 0xC00C, 1, 1, 60, 4) + bytes([192, 0, 2, 1])
    alias = struct.pack(">HHHIH", 0xC00C, 5, 1, 60, 2) + b"\xc0\x0c"
    answer = query[:2] + struct.pack(">HHHHH", 0x8180, 1, 2, 0, 0) + query[12:] + alias + address
    assert dns.parse(answer) == (["192.0.2.1"], "")
    for code, words in ((2, "SERVFAIL"), (3, "NXDOMAIN"), (5, "REFUSED"), (9, "code 9")):
        said = query[:2] + struct.pack(">HHHHH", 0x8180 | code, 1, 0, 0, 0) + query[12:]
        assert dns.parse(said) == ([], words)
    assert dns.parse(query[:2] + struct.pack(">HHHHH", 0x8180, 1, 0, 0, 0) + query[12:]) == (
        [],
        "no addresses",
    )
    for cut in range(len(answer)):
        assert dns.parse(answer[:cut])[0] == []
