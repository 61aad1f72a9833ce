"""What Azure's Application Health extension is told of this node. Pure.

The extension (Microsoft.ManagedServices.ApplicationHealthLinux 2.0, "rich health states") asks an address on loopback
and takes from an answer with status 2xx::

    {"ApplicationHealthState": "Healthy", "customMetrics": "{\\"rollingUpgrade\\": {...}}"}

with ``Healthy`` or ``Unhealthy``; everything else, as any other status, is ``Unknown``, and ``Initializing`` while its
grace period lasts. ``customMetrics`` is JSON in a string: ``PhaseOrderingNumber`` says in which phase of a rolling
upgrade this machine is, ``SkipUpgrade`` that it is left out.
https://learn.microsoft.com/azure/virtual-machine-scale-sets/virtual-machine-scale-sets-health-extension,
https://learn.microsoft.com/azure/virtual-machine-scale-sets/virtual-machine-scale-sets-rolling-upgrade-custom-metrics
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from image_builder.node import status
from image_builder.node.join import record
from image_builder.node.join.binding import slot
from image_builder.node.preflight import model

State = Literal["Initializing", "Healthy", "Unhealthy", "Unknown"]
# What counts first where the parts of a node differ.
_ORDER: tuple[State, ...] = ("Unhealthy", "Unknown", "Initializing")
OK, UNAVAILABLE = 200, 503


@dataclass(frozen=True)
class Verdict:
    """What a node is, and why it is not ``Healthy``: ``reasons`` are for people."""

    state: State
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Known:
    """What lies in ``/run/node``. None is a file that is not there, ``damaged`` names those that can't be read.

    ``wanted`` are the documents that this image makes, ``sections`` those of the status that a boot fills. ``now`` is
    Unix time, as the documents have it.
    """

    boot_id: str
    now: float
    wanted: frozenset[str]
    sections: Sequence[str] = ()
    status: Mapping[str, Any] = field(default_factory=dict)
    preflight: Mapping[str, Any] | None = None
    provision: Mapping[str, Any] | None = None
    health: Mapping[str, Any] | None = None
    damaged: tuple[str, ...] = ()

    @property
    def vm_id(self) -> str:
        """Return the machine's id, empty before the joining has asked for it."""
        return str((self.provision or {}).get("vm_id", ""))


def judge(known: Known, stale_seconds: float) -> Verdict:
    """Return what a node's own documents come to; the worst of them counts."""
    found: list[tuple[State, str]] = [
        *(("Unknown", f"{name} can't be read") for name in known.damaged),
        *_sections(known),
        *(_preflight(known) if "preflight" in known.wanted else ()),
        *(_provision(known) if "provision" in known.wanted else ()),
        *(_health(known, stale_seconds) if "health" in known.wanted else ()),
    ]
    for state in _ORDER:
        if reasons := tuple(reason for one, reason in found if one == state):
            return Verdict(state, reasons)
    return Verdict("Healthy")


def _sections(known: Known) -> Iterator[tuple[State, str]]:
    for name in (*status.SECTIONS, *status.OPTIONAL):
        section = known.status.get(name)
        # The preflight's own document says more than its section.
        if section and name != "preflight" and section.get("state") == status.FAILED:
            yield "Unhealthy", f"{name}: {section.get('code') or 'failed'}"
        elif not section and name in known.sections:
            yield "Initializing", f"{name} is not done"


def _of_this_boot(known: Known, found: Mapping[str, Any] | None) -> Mapping[str, Any]:
    return found if found and found.get("boot_id") == known.boot_id else {}


def _preflight(known: Known) -> Iterator[tuple[State, str]]:
    found = _of_this_boot(known, known.preflight)
    if not found:
        yield "Initializing", "the preflight is not done"
    elif found.get("state") == model.FAILED:
        # What the gate holds must not be repaired meanwhile.
        is_held = found.get("action") == "none"
        yield "Unknown" if is_held else "Unhealthy", f"preflight: {found.get('code')}"
    elif found.get("state") != model.PASSED:
        yield "Unknown", f"preflight: {found.get('code')}"


def _provision(known: Known) -> Iterator[tuple[State, str]]:
    found = _of_this_boot(known, known.provision)
    if found.get("state") == record.FAILED:
        yield "Unhealthy", f"join: {found.get('code')} in phase {found.get('phase')}"
    elif found.get("state") != record.OK:
        yield "Initializing", "the node has not joined"


def _health(known: Known, stale_seconds: float) -> Iterator[tuple[State, str]]:
    found = _of_this_boot(known, known.health)
    if not found:
        yield "Initializing", "nobody has looked at the node"
        return
    # Of either sign: the clock may have been set since.
    age = abs(known.now - float(found.get("time", 0.0)))
    if age > stale_seconds:
        yield "Unknown", f"the last look at the node was {age:.0f} s ago"
    elif found.get("state") == status.FAILED:
        codes = [str(one.get("code")) for one in found.get("findings", ()) if one.get("severity") == "fail"]
        yield "Unhealthy", f"health: {', '.join(codes) or 'failed'}"


@dataclass(frozen=True)
class Memory:
    """What is remembered between two questions. ``since`` is when it began to initialize (monotonic), None: not."""

    was_healthy: bool = False
    since: float | None = None


def step(before: Memory, found: Verdict, now: float, grace_seconds: float) -> tuple[Memory, Verdict]:
    """Return what is answered, and what is remembered: initializing is not for ever.

    A node that was healthy in this boot and is prepared again (somebody has restarted the preflight) stays Healthy
    meanwhile: nothing bad is known of it, and an instance repair must not end what a person does there.
    """
    if found.state != "Initializing":
        return Memory(before.was_healthy or found.state == "Healthy"), found
    since = now if before.since is None else before.since
    after = replace(before, since=since)
    if now - since > grace_seconds:
        return after, Verdict("Unhealthy", (f"not up after {now - since:.0f} s", *found.reasons))
    return after, replace(found, state="Healthy") if before.was_healthy else found


@dataclass(frozen=True)
class Upgrade:
    """A machine's part in a rolling upgrade: its phase, and what keeps it out of one."""

    phase: int = 0
    busy: tuple[str, ...] = ()


def phase(vm_id: str, phases: int) -> int:
    """Return the phase that a machine is in, by the hash of its id: the same for its whole life."""
    return int(slot(vm_id, phases)) if vm_id else phases - 1


def answer(found: Verdict, upgrade: Upgrade) -> tuple[int, dict[str, Any]]:
    """Return status and body. What the extension does not know (reasons, busy) is for people; it leaves that alone."""
    # Who is tested again is at work, too.
    skip = bool(upgrade.busy) or (found.state == "Healthy" and bool(found.reasons))
    metrics = {"rollingUpgrade": {"PhaseOrderingNumber": upgrade.phase, "SkipUpgrade": skip}}
    body = {
        "ApplicationHealthState": found.state,
        "customMetrics": json.dumps(metrics),
        "reasons": list(found.reasons),
        "busy": list(upgrade.busy),
    }
    return OK if found.state in ("Healthy", "Unhealthy") else UNAVAILABLE, body
