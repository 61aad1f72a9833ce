"""InfiniBand ports and their counters, as /sys/class/infiniband has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from image_builder.node.health import flaps
from image_builder.node.health.model import Finding, Look, Outcome, Sample
from image_builder.node.health.settings import Settings
from image_builder.node.health.sysfs import number, text

# Of /sys/class/infiniband/D/ports/P/counters: what tells of a bad cable or a flapping link.
COUNTERS = (
    "link_downed", "link_error_recovery", "symbol_error", "port_rcv_errors", "local_link_integrity_errors",
)  # fmt: skip


@dataclass(frozen=True)
class Port:
    """``state`` and ``physical`` are the kernel's words, such as ``ACTIVE`` and ``LinkUp``; ``rate`` is in Gbit/s."""

    name: str
    state: str
    physical: str
    rate: float
    counters: Mapping[str, int]

    @property
    def up(self) -> bool:
        return self.state == "ACTIVE" and self.physical == "LinkUp"


def check(look: Look) -> Outcome:
    """Look at every port. What was up once in this boot has to stay so, at the rate that it had."""
    ports = read(look.places.sys)
    best: dict[str, float] = {str(k): float(v) for k, v in look.memory.get("best", {}).items()}
    seen = flaps.observe(
        look.memory.get("flaps", {}),
        {port.name: port.counters["link_downed"] for port in ports},
        look.now,
        look.settings.flap_seconds,
    )
    findings = [*rule(ports, best), *flap_rule(seen, look.settings)]
    best |= {port.name: max(port.rate, best.get(port.name, 0.0)) for port in ports if port.up}
    return Outcome(tuple(findings), tuple(samples(ports)), {"best": best, "flaps": seen})


def read(sys: Path) -> list[Port]:
    """Return the ports whose link layer is InfiniBand: Ethernet ones are links of the network."""
    found = []
    for entry in sorted((sys / "class/infiniband").glob("*/ports/*")):
        if text(entry / "link_layer") == "InfiniBand":
            counters = {name: number(entry / "counters" / name) for name in COUNTERS}
            name = f"{entry.parents[1].name}/{entry.name}"
            # "4: ACTIVE", "5: LinkUp", "400 Gb/sec (4X NDR)"
            state, physical = (text(entry / part).partition(": ")[2] for part in ("state", "phys_state"))
            rate = text(entry / "rate").partition(" ")[0]
            number_of = float(rate) if rate.replace(".", "", 1).isdigit() else 0.0
            found.append(Port(name, state, physical, number_of, counters))
    return found


def rule(ports: Iterable[Port], best: Mapping[str, float]) -> list[Finding]:
    """Return what is wrong with ports; ``best`` has the best rate of each that was up in this boot."""
    here = {port.name: port for port in ports}
    found = []
    for name, rate in best.items():
        port = here.get(name)
        if port is None or not port.up:
            state = f"{port.state}, {port.physical}" if port else "gone"
            detail = f"{name} is {state}"
            found.append(Finding("infiniband.down", name, "fail", detail, action="replace", patient=True))
        elif port.rate < rate:
            detail = f"{name} runs at {port.rate:g} Gbit/s, after {rate:g}"
            found.append(Finding("infiniband.slow", name, "fail", detail, action="replace", patient=True))
    return found


def flap_rule(seen: Mapping[str, Any], settings: Settings) -> list[Finding]:
    """Return the ports whose link went down too often."""
    return [
        Finding("infiniband.flaps", name, "fail", f"{name} went down {times} times", action="replace")
        for name, times in flaps.too_many(seen, settings.flaps)
    ]


def samples(ports: Iterable[Port]) -> list[Sample]:
    """Return the metrics of ports."""
    found = []
    for port in ports:
        labels = {"port": port.name}
        found.append(Sample("infiniband_up", float(port.up), labels))
        found.append(Sample("infiniband_rate_gigabits_per_second", port.rate, labels))
        found += [Sample(f"infiniband_{name}_total", count, labels) for name, count in port.counters.items()]
    return found
