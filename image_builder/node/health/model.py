"""Findings and metrics of a look at the node, and the input of a check. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from image_builder.node.finding import Action
from image_builder.node.health.settings import Settings

Severity = Literal["warn", "fail"]
Key = tuple[str, str]
"""A finding's code and subject."""


@dataclass(frozen=True)
class Finding:
    """Something that is wrong. ``code`` is stable, lower-case words with a dot; ``subject`` a path, a device, a name.

    ``fail``: this node should get no new work. ``warn``: people should know, for example if many nodes share the cause.
    ``patient``: it may pass by itself, so it counts only when several looks in a row have found it. ``action`` is
    what would help, in the preflight's terms.
    """

    code: str
    subject: str
    severity: Severity
    detail: str
    action: Action = "none"
    patient: bool = False

    @property
    def key(self) -> Key:
        return (self.code, self.subject)


@dataclass(frozen=True)
class Sample:
    """One value of a metric; ``name`` is without the prefix ``node_health_``."""

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """The result of a look. ``memory`` (JSON) is passed to the next look, at least ``rest_seconds`` later."""

    findings: tuple[Finding, ...] = ()
    samples: tuple[Sample, ...] = ()
    memory: Mapping[str, Any] = field(default_factory=dict)
    rest_seconds: float = 0.0


@dataclass(frozen=True)
class Places:
    """Where the state of a node is read, and where results go; only tests use other places."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    dev: Path = Path("/dev")
    run: Path = Path("/run/node")
    kvp: Path = Path("/var/lib/hyperv/.kvp_pool_3")
    # systemd's link to the id of the kubelet's last start (unit_export_invocation_id in src/core/unit.c).
    kubelet: Path = Path("/run/systemd/units/invocation:kubelet.service")


@dataclass(frozen=True)
class Look:
    """The input of a check. ``now`` is from the monotonic clock, in seconds; ``memory`` is what its last look left."""

    settings: Settings
    places: Places
    now: float
    memory: Mapping[str, Any] = field(default_factory=dict)
