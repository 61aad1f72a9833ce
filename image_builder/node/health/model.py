"""Findings and metrics of a look at the node, and what a check is given. Nothing here does anything."""

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

    ``fail``: no new work should come to this node. ``warn``: people should know, as of a cause that many nodes share.
    ``patient``: it may pass by itself, so it counts only when several looks in a row have found it. ``action`` is
    what would help, in the words of the preflight.
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
    """What a look came to. ``memory`` is given to the next look (JSON); ``rest_seconds``: no look before that."""

    findings: tuple[Finding, ...] = ()
    samples: tuple[Sample, ...] = ()
    memory: Mapping[str, Any] = field(default_factory=dict)
    rest_seconds: float = 0.0


@dataclass(frozen=True)
class Places:
    """Where a node is looked at, and where results go; others only in tests."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    dev: Path = Path("/dev")
    run: Path = Path("/run/node")
    kvp: Path = Path("/var/lib/hyperv/.kvp_pool_3")


@dataclass(frozen=True)
class Look:
    """What a check is given. ``now`` is of the monotonic clock, in seconds; ``memory`` is what its last look left."""

    settings: Settings
    places: Places
    now: float
    memory: Mapping[str, Any] = field(default_factory=dict)
