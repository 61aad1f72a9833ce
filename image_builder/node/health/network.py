"""The network: default route, names, the registries and the API server, and flapping links, InfiniBand included.

InfiniBand ports and their counters are those in /sys/class/infiniband.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from image_builder.node import sysfs
from image_builder.node.errors import NodeError
from image_builder.node.health.model import Finding, Look, Outcome, Sample
from image_builder.node.health.settings import Settings, endpoint
from image_builder.node.net import kubeconfig, reach
from image_builder.node.sysfs import Port, number

_RTF_UP, _RTF_REJECT = 0x1, 0x200
# From /sys/class/infiniband/D/ports/P/counters: those that a bad cable or a flapping link raises.
COUNTERS = (
    "link_downed", "link_error_recovery", "symbol_error", "port_rcv_errors", "local_link_integrity_errors",
)  # fmt: skip


@dataclass(frozen=True)
class Facts:
    """The network's state. ``connections`` are by HOST:PORT, except those whose name has no address."""

    routes: tuple[str, ...] = ()
    lookups: Mapping[str, reach.Lookup] = field(default_factory=dict)
    registries: tuple[str, ...] = ()
    api_servers: tuple[str, ...] = ()
    connections: Mapping[str, reach.Connection] = field(default_factory=dict)
    carriers: Mapping[str, int] = field(default_factory=dict)


def check_network(look: Look) -> Outcome:
    """Read routes and links, resolve names, and connect. Raises OSError."""
    facts = observe(look)
    links = count_flaps(look.memory.get("flaps", {}), facts.carriers, look.now, look.settings.flap_seconds)
    findings = [*network_rule(facts), *link_rule(links, look.settings)]
    return Outcome(tuple(findings), tuple(network_samples(facts)), {"flaps": links})


def observe(look: Look) -> Facts:
    """Return the network's state; connections and lookups each take ``connect_seconds`` at most."""
    settings, places = look.settings, look.places
    api_servers = settings.api_servers or server_of(settings.kubeconfig)
    endpoints = {
        place: target for place in (*settings.registries, *api_servers) if (target := endpoint(place))
    }
    names = (*settings.names, *(host for host, _ in endpoints.values()))
    lookups = reach.resolve([name for name in names if not reach.is_address(name)], settings.connect_seconds)
    targets = {
        place: [(address, port) for address in addresses]
        for place, (host, port) in endpoints.items()
        if (addresses := lookups[host].addresses if host in lookups else (host,))
    }
    return Facts(
        routes=tuple(default_routes(places.proc)),
        lookups=lookups,
        registries=settings.registries,
        api_servers=tuple(api_servers),
        connections=reach.connect(targets, settings.connect_seconds),
        carriers=carriers(places.sys),
    )


def server_of(name: str) -> tuple[str, ...]:
    """Return a kubeconfig's API server as HOST:PORT; empty without a kubeconfig, or if it is missing or damaged."""
    path = Path(name)
    if not name or not path.exists():
        return ()
    try:
        server = urlsplit(kubeconfig.load(path).server)
        port = server.port or 443
    except (NodeError, ValueError):
        return ()
    host = server.hostname or ""
    return (f"[{host}]:{port}" if ":" in host else f"{host}:{port}",)


def default_routes(proc: Path) -> list[str]:
    """Return the interfaces of the default routes, both IPv4 and IPv6."""
    interfaces = set()
    for line in _table(proc / "net/route")[1:]:
        name, target, _gateway, flags, *_, mask = line[:8]
        if int(target, 16) == int(mask, 16) == 0 and int(flags, 16) & _RTF_UP:
            interfaces.add(name)
    for line in _table(proc / "net/ipv6_route"):
        set_flags = int(line[8], 16) & (_RTF_UP | _RTF_REJECT)
        if int(line[0], 16) == int(line[1], 16) == 0 and set_flags == _RTF_UP:
            interfaces.add(line[9])
    return sorted(interfaces - {"lo"})


def _table(path: Path) -> list[list[str]]:
    try:
        return [line.split() for line in path.read_text(encoding="ascii").splitlines()]
    except FileNotFoundError:
        return []  # a kernel without IPv6


def carriers(sys: Path) -> dict[str, int]:
    """Return how often each physical link lost its carrier."""
    return {
        entry.name: number(entry / "carrier_down_count")
        for entry in sorted((sys / "class/net").glob("*"))
        if (entry / "device").exists()
    }


def network_rule(facts: Facts) -> list[Finding]:
    """Return what is wrong with the network.

    Names, registries and the API server are shared by many nodes: problems with them only warn, so that they don't make
    a whole fleet unhealthy. The route is the node's own.
    """
    findings = []
    if not facts.routes:
        findings.append(
            Finding("network.route", "default", "fail", "there is no default route", patient=True)
        )
    for name, lookup in facts.lookups.items():
        if lookup.error:
            detail = f"{name}: {lookup.error}"
            findings.append(Finding("network.dns", name, "warn", detail, patient=True))
    for code, places in (("network.registry", facts.registries), ("network.api", facts.api_servers)):
        findings += [
            Finding(code, place, "warn", f"{place}: {connection.error}", patient=True)
            for place in places
            if (connection := facts.connections.get(place)) and connection.error
        ]
    return findings


def network_samples(facts: Facts) -> list[Sample]:
    """Return the metrics of the network."""
    samples = [Sample("network_default_route", float(bool(facts.routes)))]
    for name, lookup in facts.lookups.items():
        samples.append(Sample("dns_lookup_success", float(not lookup.error), {"name": name}))
        samples.append(Sample("dns_lookup_duration_seconds", round(lookup.seconds, 6), {"name": name}))
    for place, connection in facts.connections.items():
        samples.append(Sample("tcp_connect_success", float(not connection.error), {"endpoint": place}))
        samples.append(
            Sample("tcp_connect_duration_seconds", round(connection.seconds, 6), {"endpoint": place})
        )
    samples += [
        Sample("network_carrier_down_total", count, {"device": name})
        for name, count in facts.carriers.items()
    ]
    return samples


def count_flaps(
    before: Mapping[str, Any], counts: Mapping[str, int], now: float, window: float
) -> dict[str, dict[str, Any]]:
    """Return what to remember about links: the last count, and ``[when, how many]`` within ``window`` seconds.

    ``before`` is the previous result. A link that is new, or whose counter went backwards, starts over: earlier flaps
    belong to another device, or to the boot before the first look.
    """
    links = {}
    for name, count in counts.items():
        link = before.get(name, {})
        last = link.get("count", count)
        recent = [[when, times] for when, times in link.get("recent", []) if now - when <= window]
        if count > last:
            recent.append([now, count - last])
        links[name] = {"count": count, "recent": recent if count >= last else []}
    return links


def flapping(links: Mapping[str, Any], limit: int) -> list[tuple[str, int]]:
    """Return the links that went down at least ``limit`` times, and how often."""
    times = {name: sum(count for _, count in link["recent"]) for name, link in links.items()}
    return [(name, count) for name, count in times.items() if count >= limit]


def link_rule(links: Mapping[str, Any], settings: Settings) -> list[Finding]:
    """Return the links that lost their carrier too often."""
    minutes = settings.flap_seconds / 60
    return [
        Finding(
            "network.flaps", name, "warn", f"{name} lost its carrier {times} times in {minutes:g} minutes"
        )
        for name, times in flapping(links, settings.flaps)
    ]


def check_infiniband(look: Look) -> Outcome:
    """Look at every port. A port that was once up in this boot must stay up, at the rate that it had."""
    ports = [port for port in sysfs.ports(look.places.sys) if port.is_infiniband]
    counters = {port.name: read_counters(look.places.sys, port) for port in ports}
    best: dict[str, float] = {str(k): float(v) for k, v in look.memory.get("best", {}).items()}
    links = count_flaps(
        look.memory.get("flaps", {}),
        {name: counts["link_downed"] for name, counts in counters.items()},
        look.now,
        look.settings.flap_seconds,
    )
    findings = [*port_rule(ports, best), *port_flap_rule(links, look.settings)]
    best |= {port.name: max(port.rate_gbit, best.get(port.name, 0.0)) for port in ports if port.is_up}
    return Outcome(tuple(findings), tuple(port_samples(ports, counters)), {"best": best, "flaps": links})


def read_counters(sys: Path, port: Port) -> dict[str, int]:
    """Return the counters of a port, 0 for one that it doesn't have."""
    directory = sys / f"class/infiniband/{port.device}/ports/{port.number}/counters"
    return {name: number(directory / name) for name in COUNTERS}


def port_rule(ports: Iterable[Port], best: Mapping[str, float]) -> list[Finding]:
    """Return what is wrong with ports; ``best`` has the best rate of each that was up in this boot."""
    present = {port.name: port for port in ports}
    findings = []
    for name, rate in best.items():
        port = present.get(name)
        if port is None or not port.is_up:
            state = f"{port.state}, {port.physical}" if port else "gone"
            detail = f"{name} is {state}"
            findings.append(Finding("infiniband.down", name, "fail", detail, action="replace", patient=True))
        elif port.rate_gbit < rate:
            detail = f"{name} runs at {port.rate_gbit:g} Gbit/s, after {rate:g}"
            findings.append(Finding("infiniband.slow", name, "fail", detail, action="replace", patient=True))
    return findings


def port_flap_rule(links: Mapping[str, Any], settings: Settings) -> list[Finding]:
    """Return the ports whose link went down too often."""
    return [
        Finding("infiniband.flaps", name, "fail", f"{name} went down {times} times", action="replace")
        for name, times in flapping(links, settings.flaps)
    ]


def port_samples(ports: Iterable[Port], counters: Mapping[str, Mapping[str, int]]) -> list[Sample]:
    """Return the metrics of ports; ``counters`` are by the port's name."""
    samples = []
    for port in ports:
        labels = {"port": port.name}
        samples.append(Sample("infiniband_up", float(port.is_up), labels))
        samples.append(Sample("infiniband_rate_gigabits_per_second", port.rate_gbit, labels))
        samples += [
            Sample(f"infiniband_{name}_total", count, labels) for name, count in counters[port.name].items()
        ]
    return samples
