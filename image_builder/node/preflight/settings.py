"""What the role writes to ``/etc/node-agent/preflight.json``, checked as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from image_builder.node.errors import NodeError

ENGINES = ("", "docker", "containerd")
TIERS = ("boot-quick", "boot-full")


@dataclass(frozen=True)
class Settings:
    """``hard``: the kubelet doesn't start on a node that did not pass. ``reboot``: the node may start itself again,
    once for a fault until a boot passes. ``dns`` are names to resolve, ``tcp`` places (``host:port``) to connect to,
    ``engine`` is who must answer; for all three together ``wait_seconds`` is the most. ``gpu_seconds`` is the smoke
    test's deadline.
    ``jitter_seconds`` spreads the reports of nodes that were started together. GPUs whose last test is older than
    ``retest_days`` are to be tested again, where the gate grants it; 0: never.
    """

    hard: bool = False
    reboot: bool = True
    taint: str = "image-builder/preflight"
    dns: tuple[str, ...] = ()
    tcp: tuple[str, ...] = ()
    engine: str = ""
    wait_seconds: float = 60.0
    gpu_tier: str = "boot-quick"
    gpu_seconds: float = 660.0
    kubeconfig: str = "/etc/kubernetes/kubelet.conf"
    node_name: str = ""
    healthz: str = "http://127.0.0.1:10248/healthz"
    jitter_seconds: float = 30.0
    retest_days: float = 7.0


def parse(found: Mapping[str, Any]) -> Settings:
    """Return the settings; raises NodeError (``settings``) with everything that is wrong."""
    known = {field.name: field.default for field in fields(Settings)}
    problems = [f"{name}: there is no such setting" for name in found.keys() - known.keys()]
    values: dict[str, Any] = {}
    for name, value in found.items():
        if name not in known:
            continue
        wanted = type(known[name])
        if wanted is tuple and isinstance(value, list) and all(isinstance(item, str) for item in value):
            values[name] = tuple(value)
        elif wanted is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            values[name] = float(value)
        elif wanted in (bool, str) and isinstance(value, wanted):
            values[name] = value
        else:
            problems.append(
                f"{name}: {value!r} is no {'list of words' if wanted is tuple else wanted.__name__}"
            )
    made = Settings(**values)
    problems += _problems(made)
    if problems:
        raise NodeError("settings", "preflight.json: " + "; ".join(sorted(problems)))
    return made


def _problems(made: Settings) -> list[str]:
    rules = {
        f"engine: {made.engine!r} is none of docker, containerd": made.engine in ENGINES,
        f"gpu_tier: {made.gpu_tier!r} is none of {', '.join(TIERS)}": made.gpu_tier in TIERS,
        f"taint: {made.taint!r} is no PREFIX/NAME": made.taint.count("/") == 1
        and not made.taint.endswith("/"),
        "wait_seconds: 1 to 900": 1 <= made.wait_seconds <= 900,
        "gpu_seconds: 30 to 3600": 30 <= made.gpu_seconds <= 3600,
        "jitter_seconds: 0 to 600": 0 <= made.jitter_seconds <= 600,
        "retest_days: at least 0": made.retest_days >= 0,
        **{f"tcp: {place!r} is no host:port": _is_place(place) for place in made.tcp},
    }
    return [words for words, is_kept in rules.items() if not is_kept]


def _is_place(place: str) -> bool:
    host, colon, port = place.rpartition(":")
    return bool(host and colon) and port.isdecimal() and 0 < int(port) < 65536
