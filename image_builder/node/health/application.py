"""This node's state for Azure's Application Health extension. Pure.

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
class Documents:
    """What lies in ``/run/node``. None is a file that is not there, ``damaged`` names those that can't be read.

    ``expected`` are the documents that this image makes, ``sections`` those of the status that a boot fills. ``now`` is
    Unix time, as the documents have it.
    """

    boot_id: str
    now: float
    expected: frozenset[str]
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


def judge(documents: Documents, stale_seconds: float) -> Verdict:
    """Return what a node's own documents come to; the worst of them counts."""
    parts: list[tuple[State, str]] = [
        *(("Unknown", f"{name} can't be read") for name in documents.damaged),
        *_sections(documents),
        *(_preflight(documents) if "preflight" in documents.expected else ()),
        *(_provision(documents) if "provision" in documents.expected else ()),
        *(_health(documents, stale_seconds) if "health" in documents.expected else ()),
    ]
    for state in _ORDER:
        if reasons := tuple(reason for part_state, reason in parts if part_state == state):
            return Verdict(state, reasons)
    return Verdict("Healthy")


def _sections(documents: Documents) -> Iterator[tuple[State, str]]:
    for name in (*status.SECTIONS, *status.OPTIONAL):
        section = documents.status.get(name)
        # The preflight's own document says more than its section.
        if section and name != "preflight" and section.get("state") == status.FAILED:
            yield "Unhealthy", f"{name}: {section.get('code') or 'failed'}"
        elif not section and name in documents.sections:
            yield "Initializing", f"{name} is not finished"


def _of_this_boot(documents: Documents, document: Mapping[str, Any] | None) -> Mapping[str, Any]:
    return document if document and document.get("boot_id") == documents.boot_id else {}


def _preflight(documents: Documents) -> Iterator[tuple[State, str]]:
    document = _of_this_boot(documents, documents.preflight)
    if not document:
        yield "Initializing", "the preflight is not finished"
    elif document.get("state") == model.FAILED:
        # What the gate holds must not be repaired meanwhile.
        is_held = document.get("action") == "none"
        yield "Unknown" if is_held else "Unhealthy", f"preflight: {document.get('code')}"
    elif document.get("state") != model.PASSED:
        yield "Unknown", f"preflight: {document.get('code')}"


def _provision(documents: Documents) -> Iterator[tuple[State, str]]:
    document = _of_this_boot(documents, documents.provision)
    if document.get("state") == record.FAILED:
        yield "Unhealthy", f"join: {document.get('code')} in phase {document.get('phase')}"
    elif document.get("state") != record.OK:
        yield "Initializing", "the node has not joined"


def _health(documents: Documents, stale_seconds: float) -> Iterator[tuple[State, str]]:
    document = _of_this_boot(documents, documents.health)
    if not document:
        yield "Initializing", "no health check has run yet"
        return
    # Of either sign: the clock may have been set since.
    age = abs(documents.now - float(document.get("time", 0.0)))
    if age > stale_seconds:
        yield "Unknown", f"the last health check was {age:.0f} s ago"
    elif document.get("state") == status.FAILED:
        codes = [
            str(finding.get("code"))
            for finding in document.get("findings", ())
            if finding.get("severity") == "fail"
        ]
        yield "Unhealthy", f"health: {', '.join(codes) or 'failed'}"


@dataclass(frozen=True)
class Memory:
    """What is remembered between two questions. ``since`` is when it began to initialize (monotonic), None: not."""

    was_healthy: bool = False
    since: float | None = None


def step(before: Memory, verdict: Verdict, now: float, grace_seconds: float) -> tuple[Memory, Verdict]:
    """Return what is answered, and what is remembered: initializing is not for ever.

    A node that was healthy in this boot and is prepared again (the preflight was restarted by hand) stays Healthy
    meanwhile: nothing bad is known of it, and an instance repair must not end what a person does there.
    """
    if verdict.state != "Initializing":
        return Memory(before.was_healthy or verdict.state == "Healthy"), verdict
    since = now if before.since is None else before.since
    after = replace(before, since=since)
    if now - since > grace_seconds:
        return after, Verdict("Unhealthy", (f"not up after {now - since:.0f} s", *verdict.reasons))
    return after, replace(verdict, state="Healthy") if before.was_healthy else verdict


@dataclass(frozen=True)
class Upgrade:
    """A machine's part in a rolling upgrade: its phase, and what keeps it out of one."""

    phase: int = 0
    busy: tuple[str, ...] = ()


def phase(vm_id: str, phases: int) -> int:
    """Return the phase that a machine is in, by the hash of its id: the same for its whole life."""
    return int(slot(vm_id, phases)) if vm_id else phases - 1


def answer(verdict: Verdict, upgrade: Upgrade) -> tuple[int, dict[str, Any]]:
    """Return status and body. What the extension does not know (reasons, busy) is for people; it ignores that."""
    # A node whose GPUs are tested again is busy, too.
    skip = bool(upgrade.busy) or (verdict.state == "Healthy" and bool(verdict.reasons))
    metrics = {"rollingUpgrade": {"PhaseOrderingNumber": upgrade.phase, "SkipUpgrade": skip}}
    body = {
        "ApplicationHealthState": verdict.state,
        "customMetrics": json.dumps(metrics),
        "reasons": list(verdict.reasons),
        "busy": list(upgrade.busy),
    }
    return OK if verdict.state in ("Healthy", "Unhealthy") else UNAVAILABLE, body
