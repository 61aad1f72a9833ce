"""``/etc/node-agent/health.json``, as the role node_health writes it.

    {"condition": "NodeHealthy", "kubeconfig": "/etc/kubernetes/kubelet.conf", "node_name": "",
     "textfile_directory": "/var/lib/prometheus/node-exporter",
     "disabled": [], "intervals": {"nvme": 600, "gpu": 300}, "severities": {"network.registry": "fail"},
     "raise_looks": 3, "clear_seconds": 300,
     "paths": ["/", "/mnt/local"], "full_warn_percent": 90, "full_fail_percent": 97,
     "names": [], "registries": ["registry.example:443"], "api_servers": [], "connect_seconds": 3,
     "flaps": 3, "flap_seconds": 600, "clock_error_seconds": 1,
     "imds": "http://169.254.169.254"}

Every key has a default; unknown keys are rejected.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from image_builder.node import settings as settings_files
from image_builder.node.decode import absolute, at_least, decode, shown, within
from image_builder.node.net import reach

CHECKS = (
    "filesystems", "arrays", "nvme", "kernel_log", "network", "clock", "maintenance", "gpu", "infiniband",
)  # fmt: skip
# How often each check looks, in seconds; 0 is at every start. Checks that query a device's driver look less often.
INTERVALS: Mapping[str, float] = {
    **dict.fromkeys(CHECKS, 0.0),
    "nvme": 600.0,
    "gpu": 300.0,
}
_NAME = re.compile(r"(?:[A-Za-z0-9_-]{1,63}(?:\.|$)){1,100}")
_CODE = re.compile(r"[a-z0-9-]+\.[a-z0-9-]+")


def _intervals(value: Any, path: str) -> dict[str, float]:
    """Return all intervals: the defaults, and those that a document sets."""
    return {**INTERVALS, **decode(Mapping[str, float], value, path)}  # type: ignore[type-abstract]


@dataclass(frozen=True)
class Settings:
    """The settings. ``condition`` or ``kubeconfig`` empty: nothing is reported to Kubernetes.

    ``node_name`` empty: the name in the kubeconfig's certificate, or the host's name. ``severities`` overrides those of
    individual codes. ``raise_looks``: how many looks in a row must find a problem that may pass by itself.
    ``clear_seconds``: how long a finding must be gone, longer if it has come back. ``names`` are looked up in addition
    to the hosts of ``registries`` and ``api_servers`` (HOST:PORT); without ``api_servers`` the kubeconfig's is used.
    ``flaps`` within ``flap_seconds`` are too many. ``imds`` empty: no platform is asked for maintenance events.
    """

    condition: str = "NodeHealthy"
    kubeconfig: str = "/etc/kubernetes/kubelet.conf"
    node_name: str = ""
    textfile_directory: str = "/var/lib/prometheus/node-exporter"
    disabled: tuple[str, ...] = ()
    intervals: Mapping[str, float] = field(
        default_factory=lambda: dict(INTERVALS), metadata={"read": _intervals}
    )
    severities: Mapping[str, Literal["ignore", "warn", "fail"]] = field(default_factory=dict)
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

    def problems(self) -> Iterator[str]:
        """Yield the rules that these settings break."""
        for path, check in (
            *((f"disabled[{number}]", check) for number, check in enumerate(self.disabled)),
            *((f"intervals.{check}", check) for check in self.intervals),
        ):
            if check not in CHECKS:
                yield f"{path} must be one of the checks {', '.join(CHECKS)}, not {shown(check)}"
        for check, seconds in self.intervals.items():
            yield from within(f"intervals.{check}", seconds, 0, 86400)
        for code in self.severities:
            if not _CODE.fullmatch(code):
                yield f"severities.{code} must be a code: two words with a dot between them"
        if self.condition and not self.condition.isalnum():
            yield f"condition must be of letters and digits, not {shown(self.condition)}"
        yield from within("full_fail_percent", self.full_fail_percent, 1, 100)
        if not 1 <= self.full_warn_percent <= self.full_fail_percent:
            yield "full_warn_percent must be 1 to full_fail_percent"
        if not 0 < self.connect_seconds <= 10:
            yield "connect_seconds must be above 0 and at most 10"
        for name in ("raise_looks", "flaps"):
            yield from at_least(name, getattr(self, name), 1)
        for name in ("clear_seconds", "flap_seconds", "clock_error_seconds"):
            if not getattr(self, name) > 0:
                yield f"{name} must be above 0"
        for number, name in enumerate(self.names):
            if not _NAME.fullmatch(name):
                yield f"names[{number}] must be of letters, digits, '.', '_' and '-', not {shown(name)}"
        if self.imds and not self.imds.startswith("http://"):
            yield f"imds must be an http address, not {shown(self.imds)}"
        for number, path in enumerate(self.paths):
            yield from absolute(f"paths[{number}]", path)
        yield from absolute("textfile_directory", self.textfile_directory)
        if self.kubeconfig:
            yield from absolute("kubeconfig", self.kubeconfig)
        for field_name in ("registries", "api_servers"):
            for number, place in enumerate(getattr(self, field_name)):
                if endpoint(place) is None:
                    yield f"{field_name}[{number}] must be HOST:PORT, not {shown(place)}"


def parse(document: Mapping[str, Any]) -> Settings:
    """Return the settings. Raises NodeError (``settings``) that lists all problems at once."""
    return settings_files.parse(Settings, document, "health")


def endpoint(text: str) -> tuple[str, int] | None:
    """Return host and port of ``HOST:PORT`` or ``[IPV6]:PORT``, None if it is neither."""
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if not reach.is_address(host):
            return None
    elif not _NAME.fullmatch(host):
        return None
    return (host, int(port)) if port.isdecimal() and 0 < int(port) < 65536 else None
