"""Checks of every node, with or without GPUs: its disk, its network, its container engine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any

from image_builder.node import child, status
from image_builder.node.errors import ABSENT, ProgramError
from image_builder.node.finding import Action
from image_builder.node.net import reach
from image_builder.node.preflight.model import FAILED, INCONCLUSIVE, PASSED, SKIPPED, Check
from image_builder.node.preflight.settings import Settings

_ENGINES: Mapping[str, list[str]] = {
    "docker": ["docker", "version", "--format", "{{.Server.Version}}"],
    "containerd": ["ctr", "version"],
}
# The timeout of one attempt, and the pause between two (seconds).
_ATTEMPT, _PAUSE = 10.0, 2.0
# A unit that failed is started again after 30 to 60 seconds. Its section is judged once it failed this often in a row.
ATTEMPTS = 3
# What the disk's table says (`disk.decide`) is no attempt that failed: it stays so for this boot.
_DECISIONS = frozenset(
    f"disk.{name}"
    for name in (
        *("none", "system", "missing", "ambiguous", "paths", "error"),
        *("foreign", "mixed", "incomplete", "several", "newer"),
    )
)
# After so many seconds of a boot, a unit that has not reported at all hangs, or dies each time.
LATE = 1200.0
# The action for a section that failed. Missing images are the node image's fault. Without a disk, only a reboot that
# doesn't help (`judge.settle`) proves that the machine is to blame.
_HELP: Mapping[str, Action] = {"disk": "reboot", "seed": "reimage", "preload": "reimage"}

# Codes that say nothing about the machine: the settings are wrong, or somebody else's data or devices are there; the
# image lacks a program, or its kernel a feature.
_HELP_BY_CODE: Mapping[str, Action] = {
    **dict.fromkeys(("settings", "disk.system", "disk.ambiguous", "disk.paths"), "config"),
    **dict.fromkeys(("disk.busy", "disk.foreign", "disk.mixed", "disk.several"), "config"),
    **dict.fromkeys((ABSENT, "disk.newer", "disk.quota"), "reimage"),
}

Probe = Callable[[], str]


def prepared(sections: Mapping[str, Any], names: Sequence[str], uptime: float = math.inf) -> list[Check]:
    """Judge the sections of ``/run/node/status.json`` that a boot of this node fills before the kubelet starts.

    A section whose unit is being retried is inconclusive, and calls for nothing. So is one that is missing ``uptime``
    seconds after the boot, while there is time or another section is being retried: its unit may wait for that one.
    While there is time, so are images whose seed is being retried: without an archive, the engine waits for it.
    """
    checks = []
    is_seed_late = uptime < LATE and bool(sections.get("seed", {}).get("retried"))
    may_come = uptime < LATE or any(name in sections and is_retried(sections[name]) for name in names)
    for name in names:
        section = sections.get(name)
        if section is None:
            reason = f"node-agent {name} has not reported in this boot"
            checks.append(
                Check(name, INCONCLUSIVE, f"{name}.missing", reason, "none" if may_come else "reboot")
            )
        elif section["state"] == status.FAILED:
            code, reason = str(section.get("code") or f"{name}.failed"), str(section.get("reason", ""))
            if is_retried(section) or (name == "preload" and is_seed_late):
                checks.append(Check(name, INCONCLUSIVE, code, f"{reason}; it is retried"))
            else:
                action = _HELP_BY_CODE.get(code, _HELP.get(name, "reboot"))
                checks.append(Check(name, FAILED, code, reason, action))
        else:
            checks.append(Check(name, PASSED, reason=str(section.get("reason", ""))))
    return checks


def is_retried(section: Mapping[str, Any]) -> bool:
    """Return whether a section failed and its unit's next attempt may change that: a decision on a disk is final."""
    is_decided = "action" in section or section.get("code") in _DECISIONS
    has_failed = section["state"] == status.FAILED and not is_decided
    return has_failed and int(section.get("attempts", 1)) < ATTEMPTS


def reach_all(settings: Settings, passed: Container[str] = ()) -> list[Check]:
    """Resolve the names, connect to the endpoints and query the engine, all at once, for at most ``wait_seconds``.

    ``passed`` are the ids of checks to skip.
    """
    probes: dict[str, tuple[str, Probe]] = {
        **{f"dns:{name}": ("network.dns", _resolver(name)) for name in settings.dns},
        **{f"tcp:{place}": ("network.tcp", _connector(place)) for place in settings.tcp},
    }
    if settings.engine:
        probes["engine"] = ("runtime.engine", _asker(settings.engine))
    if not probes:
        return [Check("network", SKIPPED, reason="no endpoint is configured")]
    probes = {name: probe for name, probe in probes.items() if name not in passed}
    results = _try_all(probes, settings.wait_seconds)
    return [_settled(name, probes[name][0], *results[name]) for name in results]


def _settled(name: str, code: str, reason: str | None, seconds: float) -> Check:
    if reason is None:
        return Check(name, PASSED, seconds=seconds)
    # A network outage affects thousands of nodes: it isn't held against any of them, and none reboots because of it.
    if code.startswith("network."):
        return Check(name, INCONCLUSIVE, code, reason, "none", seconds)
    return Check(name, FAILED, code, reason, "reboot", seconds)


def _try_all(
    probes: Mapping[str, tuple[str, Probe]], wait_seconds: float
) -> dict[str, tuple[str | None, float]]:
    """Return for each probe its problem (None: none) and the seconds that it took."""
    began = time.monotonic()
    deadline = began + wait_seconds
    results: dict[str, tuple[str | None, float]] = {
        name: (f"no answer within {wait_seconds:g} s", round(wait_seconds, 3)) for name in probes
    }

    def retry(name: str, probe: Probe) -> None:
        while True:
            reason = probe()
            results[name] = (reason or None, round(time.monotonic() - began, 3))
            if not reason or time.monotonic() + _PAUSE > deadline:
                return
            time.sleep(_PAUSE)

    reach.together(
        {name: partial(retry, name, probe) for name, (_, probe) in probes.items()}, wait_seconds + 0.5
    )
    return dict(results)


def _resolver(name: str) -> Probe:
    def probe() -> str:
        error = reach.lookup(name).error
        return f"{name} can't be resolved: {error}" if error else ""

    return probe


def _connector(place: str) -> Probe:
    host, _, port = place.rpartition(":")

    def probe() -> str:
        error = reach.connection((host.strip("[]"), int(port)), _ATTEMPT).error
        return f"{place} can't be reached: {error}" if error else ""

    return probe


def _asker(engine: str) -> Probe:
    def probe() -> str:
        try:
            child.run(_ENGINES[engine], timeout=_ATTEMPT)
        except ProgramError as error:
            return f"{engine} does not answer: {error.message}"
        return ""

    return probe
