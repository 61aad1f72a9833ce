"""``/etc/node-agent/health.json``, as the role node_health writes it.

    {"condition": "NodeHealthy", "kubeconfig": "/etc/kubernetes/kubelet.conf", "node_name": "",
     "textfile_directory": "/var/lib/prometheus/node-exporter",
     "disabled": [], "intervals": {"nvme": 600, "gpu": 300}, "severities": {"network.registry": "fail"},
     "raise_looks": 3, "clear_seconds": 300,
     "paths": ["/", "/mnt/local"], "full_warn_percent": 90, "full_fail_percent": 97,
     "names": [], "registries": ["registry.example:443"], "api_servers": [], "connect_seconds": 3,
     "flaps": 3, "flap_seconds": 600, "clock_error_seconds": 1,
     "imds": "http://169.254.169.254"}

Every key has a default; an unknown one is refused.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from image_builder.node.errors import NodeError

CHECKS = (
    "filesystems", "arrays", "nvme", "kernel_log", "network", "clock", "maintenance", "gpu", "infiniband",
)  # fmt: skip
# How often each looks, in seconds; 0 is at every start. What asks a device or a service looks less often.
INTERVALS: Mapping[str, float] = {
    **dict.fromkeys(CHECKS, 0.0),
    "nvme": 600.0,
    "gpu": 300.0,
}
SEVERITIES = ("ignore", "warn", "fail")
_NAME = re.compile(r"(?:[A-Za-z0-9_-]{1,63}(?:\.|$)){1,100}")
_CODE = re.compile(r"[a-z0-9-]+\.[a-z0-9-]+")


@dataclass(frozen=True)
class Settings:
    """``condition`` or ``kubeconfig`` empty: Kubernetes is told nothing. ``node_name`` empty: the host's name.

    ``severities`` changes those of single codes. ``raise_looks``: how many looks in a row must find what may pass by
    itself. ``clear_seconds``: how long it must be gone, longer for what comes back. ``names`` are looked up beside the
    hosts of ``registries`` and ``api_servers`` (HOST:PORT); without ``api_servers`` it is the kubeconfig's. ``flaps``
    within ``flap_seconds`` are too many. ``imds`` empty: no platform is asked for maintenance events.
    """

    condition: str = "NodeHealthy"
    kubeconfig: str = "/etc/kubernetes/kubelet.conf"
    node_name: str = ""
    textfile_directory: str = "/var/lib/prometheus/node-exporter"
    disabled: tuple[str, ...] = ()
    intervals: Mapping[str, float] = field(default_factory=lambda: dict(INTERVALS))
    severities: Mapping[str, str] = field(default_factory=dict)
    raise_looks: int = 3
    clear_seconds: float = 300.0
    paths: tuple[str, ...] = ("/", "/mnt/local", "/var/lib/kubelet")
    full_warn_percent: float = 90.0
    full_fail_percent: float = 97.0
    names: tuple[str, ...] = ()
    registries: tuple[str, ...] = ()
    api_servers: tuple[str, ...] = ()
    connect_seconds: float = 3.0
    flaps: int = 3
    flap_seconds: float = 600.0
    clock_error_seconds: float = 1.0
    imds: str = "http://169.254.169.254"


def parse(found: Mapping[str, Any]) -> Settings:
    """Return the settings; raises NodeError (``settings``) with all that is wrong at once."""
    known = {one.name: one for one in fields(Settings)}
    problems = [f"{name}: there is no such setting" for name in sorted(set(found) - set(known))]
    default, given = Settings(), {}
    for name in known.keys() & found.keys():
        try:
            given[name] = _convert(getattr(default, name), found[name])
        except (TypeError, ValueError, AttributeError) as error:
            problems.append(f"{name}: it has another shape than it should: {error}")
    if "intervals" in given:
        given["intervals"] = {**INTERVALS, **given["intervals"]}
    made = Settings(**given)
    problems += _problems(made)
    if problems:
        raise NodeError("settings", "health.json: " + "; ".join(problems))
    return made


def _convert(default: Any, value: Any) -> Any:
    """Return a JSON value as what stands for it here, by the default's type."""
    if isinstance(default, tuple):
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise TypeError(f"{value!r} is no list")
        return tuple(str(item) for item in value)
    if isinstance(default, Mapping):
        return {str(k): float(v) if default else str(v) for k, v in value.items()}
    if isinstance(value, bool) or not isinstance(value, str if isinstance(default, str) else int | float):
        raise TypeError(f"{value!r}")
    return type(default)(value)


def _problems(made: Settings) -> list[str]:
    checks = {*made.disabled, *made.intervals}
    rules = {
        f"disabled and intervals: no check is called {', '.join(sorted(checks - set(CHECKS)))}": checks
        <= set(CHECKS),
        "severities: a code is two words with a dot, its severity one of ignore, warn, fail": all(
            _CODE.fullmatch(code) and value in SEVERITIES for code, value in made.severities.items()
        ),
        "condition: letters and digits": not made.condition or made.condition.isalnum(),
        "full_warn_percent is not above full_fail_percent, and both are 1 to 100": 1
        <= made.full_warn_percent
        <= made.full_fail_percent
        <= 100,
        "connect_seconds: above 0, at most 10": 0 < made.connect_seconds <= 10,
        "raise_looks and flaps: at least 1": min(made.raise_looks, made.flaps) >= 1,
        "clear_seconds, flap_seconds, clock_error_seconds: above 0": min(
            made.clear_seconds, made.flap_seconds, made.clock_error_seconds
        )
        > 0,
        "intervals: 0 to 86400 seconds": all(0 <= s <= 86400 for s in made.intervals.values()),
        "names: letters, digits, '.', '_' and '-'": all(_NAME.fullmatch(name) for name in made.names),
        "imds: an http address, or nothing": not made.imds or made.imds.startswith("http://"),
        **{f"{path!r} is no absolute path": path.startswith("/") for path in _paths(made)},
        **{
            f"{one!r} is not HOST:PORT": endpoint(one) is not None
            for one in (*made.registries, *made.api_servers)
        },
    }
    return [words for words, is_kept in rules.items() if not is_kept]


def _paths(made: Settings) -> tuple[str, ...]:
    return (*made.paths, made.textfile_directory, *filter(None, [made.kubeconfig]))


def endpoint(text: str) -> tuple[str, int] | None:
    """Return host and port of ``HOST:PORT`` or ``[IPV6]:PORT``, None where it is neither."""
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if not is_address(host):
            return None
    elif not _NAME.fullmatch(host):
        return None
    return (host, int(port)) if port.isdecimal() and 0 < int(port) < 65536 else None


def is_address(host: str) -> bool:
    """Tell whether a host is an IP address and not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
