"""The way out: default route, names, the registries, the API server, and links that flap."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from image_builder.node import kubeconfig
from image_builder.node.errors import NodeError
from image_builder.node.health import connect, dns, flaps
from image_builder.node.health.model import Finding, Look, Outcome, Sample
from image_builder.node.health.settings import Settings, endpoint, is_address
from image_builder.node.health.sysfs import number

_RTF_UP, _RTF_REJECT = 0x1, 0x200


@dataclass(frozen=True)
class Facts:
    """What was seen. ``connected`` has what each HOST:PORT said; one whose name has no address is not in it."""

    routes: tuple[str, ...] = ()
    answers: Mapping[str, dns.Answer] = field(default_factory=dict)
    registries: tuple[str, ...] = ()
    api_servers: tuple[str, ...] = ()
    connected: Mapping[str, connect.Connected] = field(default_factory=dict)
    carriers: Mapping[str, int] = field(default_factory=dict)


def check(look: Look) -> Outcome:
    """Look for routes and links, ask the name servers, connect. Raises OSError."""
    facts = observe(look)
    seen = flaps.observe(look.memory.get("flaps", {}), facts.carriers, look.now, look.settings.flap_seconds)
    findings = [*rule(facts), *flap_rule(seen, look.settings)]
    return Outcome(tuple(findings), tuple(samples(facts)), {"flaps": seen})


def observe(look: Look) -> Facts:
    """Return what is seen; connections and lookups each take ``connect_seconds`` at most."""
    settings, places = look.settings, look.places
    api_servers = settings.api_servers or server_of(settings.kubeconfig)
    wanted = [*settings.registries, *api_servers]
    hosts = {one: found[0] for one in wanted if (found := endpoint(one))}
    names = [name for name in (*settings.names, *hosts.values()) if not is_address(name)]
    known = dns.hosts(places.etc)
    asked = [name for name in names if name.lower() not in known]
    answers = dns.lookup(asked, dns.servers(places.etc), settings.connect_seconds)
    targets = {}
    for one, host in hosts.items():
        addresses = [host] if is_address(host) else known.get(host.lower()) or _addresses(answers, host)
        if addresses:
            targets[one] = [(address, int(one.rpartition(":")[2])) for address in addresses]
    return Facts(
        routes=tuple(default_routes(places.proc)),
        answers=answers,
        registries=settings.registries,
        api_servers=tuple(api_servers),
        connected=connect.all_of(targets, settings.connect_seconds),
        carriers=carriers(places.sys),
    )


def _addresses(answers: Mapping[str, dns.Answer], name: str) -> Sequence[str]:
    return answers[name].addresses if name in answers else ()


def server_of(name: str) -> tuple[str, ...]:
    """Return a kubeconfig's API server as HOST:PORT; nothing without one, before it is there, for a damaged one."""
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
    """Return the interfaces that default routes lead to, of both families."""
    found = []
    for line in _table(proc / "net/route")[1:]:
        name, target, _gateway, flags, *_, mask = line[:8]
        if int(target, 16) == int(mask, 16) == 0 and int(flags, 16) & _RTF_UP:
            found.append(name)
    for line in _table(proc / "net/ipv6_route"):
        set_flags = int(line[8], 16) & (_RTF_UP | _RTF_REJECT)
        if int(line[0], 16) == int(line[1], 16) == 0 and set_flags == _RTF_UP:
            found.append(line[9])
    return sorted(set(found) - {"lo"})


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


def rule(facts: Facts) -> list[Finding]:
    """Return what is wrong with the network.

    Names, registries and the API server are shared by many nodes: what is wrong with them is a warning, so that
    their trouble doesn't make a fleet unhealthy. The route is the node's own.
    """
    found = []
    if not facts.routes:
        found.append(Finding("network.route", "default", "fail", "there is no default route", patient=True))
    for name, answer in facts.answers.items():
        if answer.error:
            detail = f"{name}: {answer.error}"
            found.append(Finding("network.dns", name, "warn", detail, patient=True))
    for code, wanted in (("network.registry", facts.registries), ("network.api", facts.api_servers)):
        found += [
            Finding(code, one, "warn", f"{one}: {said.error}", patient=True)
            for one in wanted
            if (said := facts.connected.get(one)) and said.error
        ]
    return found


def flap_rule(seen: Mapping[str, Any], settings: Settings) -> list[Finding]:
    """Return the links that lost their carrier too often."""
    minutes = settings.flap_seconds / 60
    return [
        Finding(
            "network.flaps", name, "warn", f"{name} lost its carrier {times} times in {minutes:g} minutes"
        )
        for name, times in flaps.too_many(seen, settings.flaps)
    ]


def samples(facts: Facts) -> list[Sample]:
    """Return the metrics of the network."""
    found = [Sample("network_default_route", float(bool(facts.routes)))]
    for name, answer in facts.answers.items():
        found.append(Sample("dns_lookup_success", float(not answer.error), {"name": name}))
        found.append(Sample("dns_lookup_duration_seconds", round(answer.seconds, 6), {"name": name}))
    found += _connections(facts.connected.items())
    found += [
        Sample("network_carrier_down_total", count, {"device": name})
        for name, count in facts.carriers.items()
    ]
    return found


def _connections(connected: Iterable[tuple[str, connect.Connected]]) -> list[Sample]:
    found = []
    for one, said in connected:
        found.append(Sample("tcp_connect_success", float(not said.error), {"endpoint": one}))
        found.append(Sample("tcp_connect_duration_seconds", round(said.seconds, 6), {"endpoint": one}))
    return found
