"""``node-agent health-endpoint``: this node's state for Azure's Application Health extension, on loopback.

The extension (Microsoft.ManagedServices.ApplicationHealthLinux 2.0, "rich health states") polls an address on loopback
and reads from an answer with status 2xx::

    {"ApplicationHealthState": "Healthy", "customMetrics": "{\\"rollingUpgrade\\": {...}}"}

with ``Healthy`` or ``Unhealthy``; anything else, including any other status, is ``Unknown``, or ``Initializing`` during
its grace period. ``customMetrics`` is JSON in a string: ``PhaseOrderingNumber`` is this machine's phase in a rolling
upgrade, ``SkipUpgrade`` says that it is left out.
https://learn.microsoft.com/azure/virtual-machine-scale-sets/virtual-machine-scale-sets-health-extension,
https://learn.microsoft.com/azure/virtual-machine-scale-sets/virtual-machine-scale-sets-rolling-upgrade-custom-metrics

Serves one endpoint, ``GET /health``. Each answer comes from the files that other commands leave in ``/run/node``, so a
request starts and queries nothing. Interpreting the files takes no I/O.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from image_builder.node import layout, status
from image_builder.node import settings as settings_files
from image_builder.node.decode import at_least, within
from image_builder.node.errors import NodeError
from image_builder.node.join import record
from image_builder.node.join.binding import slot
from image_builder.node.net import serving
from image_builder.node.preflight import model

State = Literal["Initializing", "Healthy", "Unhealthy", "Unknown"]
# Which state takes precedence if the parts of a node differ.
_ORDER: tuple[State, ...] = ("Unhealthy", "Unknown", "Initializing")
OK, UNAVAILABLE = 200, 503
ADDRESS, PATH = "127.0.0.1", "/health"
# Concurrent connections, and the seconds that one may take: the extension makes one every few seconds.
_MOST, _SECONDS = 4, 5.0
# The document that each command writes, by the name of its settings.
_DOCUMENTS = {"preflight": "preflight", "join": "provision", "health": "health"}


@dataclass(frozen=True)
class Verdict:
    """A node's state, and why it isn't ``Healthy``: ``reasons`` are for people."""

    state: State
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Documents:
    """The contents of ``/run/node``. None is a file that doesn't exist; ``damaged`` names those that can't be read.

    ``expected`` are the documents that this image produces, ``sections`` the sections of the status that a boot fills.
    ``now`` is Unix time, as in the documents.
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
        """Return the machine's id, empty until the join has asked for it."""
        return str((self.provision or {}).get("vm_id", ""))


def judge(documents: Documents, stale_seconds: float) -> Verdict:
    """Return the verdict on a node's own documents; the worst of them counts."""
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
        # A node that the gate holds must not be repaired meanwhile.
        is_held = document.get("action") == "none"
        yield "Unknown" if is_held else "Unhealthy", f"preflight: {document.get('code')}"
    elif document.get("state") != model.PASSED:
        yield "Unknown", f"preflight: {document.get('code')}"


def _provision(documents: Documents) -> Iterator[tuple[State, str]]:
    document = _of_this_boot(documents, documents.provision)
    # The preflight's own document says more than a join that failed because of it.
    repeats_preflight = "preflight" in documents.expected and document.get("code") in record.OF_PREFLIGHT
    if document.get("state") == record.FAILED and not repeats_preflight:
        yield "Unhealthy", f"join: {document.get('code')} in phase {document.get('phase')}"
    elif document.get("state") != record.OK:
        yield "Initializing", "the node has not joined"


def _health(documents: Documents, stale_seconds: float) -> Iterator[tuple[State, str]]:
    document = _of_this_boot(documents, documents.health)
    if not document:
        yield "Initializing", "no health check has run yet"
        return
    # Either sign counts: the clock may have been set since.
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
    """The state between two requests. ``since`` is when the node began to initialize (monotonic), None if it isn't."""

    was_healthy: bool = False
    since: float | None = None


def step(before: Memory, verdict: Verdict, now: float, grace_seconds: float) -> tuple[Memory, Verdict]:
    """Return the state to remember, and the verdict to answer with: a node can't initialize forever.

    A node that was healthy in this boot and is being prepared again (the preflight was restarted by hand) stays Healthy
    meanwhile: nothing bad is known about it, and an instance repair must not interrupt what a person is doing there.
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
    """Return status and body. Fields unknown to the extension (reasons, busy) are for people; it ignores them."""
    # A node whose GPUs are being tested again is busy, too.
    skip = bool(upgrade.busy) or (verdict.state == "Healthy" and bool(verdict.reasons))
    metrics = {"rollingUpgrade": {"PhaseOrderingNumber": upgrade.phase, "SkipUpgrade": skip}}
    body = {
        "ApplicationHealthState": verdict.state,
        "customMetrics": json.dumps(metrics),
        "reasons": list(verdict.reasons),
        "busy": list(upgrade.busy),
    }
    return OK if verdict.state in ("Healthy", "Unhealthy") else UNAVAILABLE, body


# -- the address -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """``/etc/node-agent/health-endpoint.json``, as the role node_health writes it.

    ``grace_seconds``: how long a node may initialize. ``stale_seconds``: how old the last look at it may be.
    ``phases``: how many a rolling upgrade has. ``lease_seconds``: how long a lease counts after its last change.
    ``idle_gpu_users``: how many times an idle node has ``/dev/nvidia-uvm`` open.
    """

    port: int = 10299
    grace_seconds: int = 1800
    stale_seconds: int = 300
    phases: int = 1
    lease_seconds: int = 3600
    idle_gpu_users: int = 0

    def problems(self) -> Iterator[str]:
        """Yield the rules that these settings break."""
        yield from within("port", self.port, 1, 65535)
        for name in ("grace_seconds", "stale_seconds", "phases", "lease_seconds"):
            yield from at_least(name, getattr(self, name), 1)
        yield from at_least("idle_gpu_users", self.idle_gpu_users, 0)


@dataclass(frozen=True)
class Places(status.Places):
    """The places of the status, the kernel's devices, and the list of preloaded images."""

    sys: Path = Path("/sys")
    listed: Path = layout.LIST

    @property
    def leases(self) -> Path:
        """Return the directory with the jobs' leases, one file each."""
        return self.run / "busy"


def parse(document: Mapping[str, Any]) -> Settings:
    """Return the settings. Raises NodeError (``settings``) that lists all problems at once."""
    return settings_files.parse(Settings, document, "health-endpoint")


def look(places: Places, boot_id: str) -> Documents:
    """Read what is known about the node. Raises no error: files that can't be read are named in ``damaged``."""
    documents: dict[str, Any] = {}
    damaged = []
    for name in ("status", *_DOCUMENTS.values()):
        try:
            documents[name] = _object((places.run / f"{name}.json").read_bytes())
        except FileNotFoundError:
            pass
        except (OSError, ValueError):
            damaged.append(f"{name}.json")
    expected = [document for name, document in _DOCUMENTS.items() if (places.etc / f"{name}.json").exists()]
    return Documents(
        boot_id=boot_id,
        now=time.time(),
        expected=frozenset(expected),
        sections=status.wanted_sections(places.etc, places.listed),
        damaged=tuple(damaged),
        **documents,
    )


def _object(data: bytes) -> dict[str, Any]:
    value = json.loads(data)
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def busy(places: Places, settings: Settings) -> tuple[str, ...]:
    """Return the signs that a job is running here: live leases, and programs that use the GPUs.

    A lease is a file in ``/run/node/busy``; it counts until ``lease_seconds`` after its modification time, so that a
    leftover lease expires by itself; a longer job touches the file or dates it ahead. Every CUDA program has
    ``/dev/nvidia-uvm`` open, and the kernel counts that as references to its module: one file to read, correct for
    containers too, and correct again after a program was killed.
    """
    reasons = [f"lease {name}" for name in _leases(places.leases, time.time() - settings.lease_seconds)]
    users = _gpu_users(places.sys)
    if users > settings.idle_gpu_users:
        reasons.append(f"{users} users of /dev/nvidia-uvm")
    return tuple(reasons)


def _leases(directory: Path, oldest: float) -> list[str]:
    try:
        entries = list(os.scandir(directory))
    except OSError:
        return []
    names = []
    for entry in entries:
        try:
            if entry.stat(follow_symlinks=False).st_mtime > oldest:
                names.append(entry.name)
        except FileNotFoundError:
            pass  # the job ended just now
    return sorted(names)


def _gpu_users(sys: Path) -> int:
    try:
        return int((sys / "module/nvidia_uvm/refcnt").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0  # no driver, and so no job that uses it


class Endpoint:
    """Answers for a node; remembers what ``application.step`` needs to know about earlier requests."""

    def __init__(self, settings: Settings, places: Places) -> None:
        self._settings, self._places = settings, places
        self._boot_id = status.boot_id(places.boot_id)
        self._memory, self._lock = Memory(), threading.Lock()

    def answer(self) -> tuple[int, dict[str, Any]]:
        """Return status and body for one request."""
        settings = self._settings
        documents = look(self._places, self._boot_id)
        verdict = judge(documents, settings.stale_seconds)
        with self._lock:
            before = self._memory
            self._memory, verdict = step(before, verdict, time.monotonic(), settings.grace_seconds)
        upgrade = Upgrade(phase(documents.vm_id, settings.phases), busy(self._places, settings))
        return answer(verdict, upgrade)


def open_server(settings: Settings, places: Places) -> serving.Server:
    """Return a server that is already bound to its port. Raises OSError."""
    endpoint = Endpoint(settings, places)

    class Handler(serving.Handler):
        def respond(self) -> None:
            if self.command != "GET":
                self.answer(405, {"error": "method", "message": "only GET is allowed"}, {"Allow": "GET"})
            elif self.path.partition("?")[0] != PATH:
                self.answer(404, {"error": "path", "message": f"the only path is {PATH}"})
            else:
                self.answer(*endpoint.answer())

    return serving.Server((ADDRESS, settings.port), Handler, most=_MOST, seconds=_SECONDS)


def run(places: Places = Places()) -> int:
    """Serve until the process is ended. Raises NodeError (``settings``, ``endpoint.port``)."""
    settings = parse(settings_files.load("health-endpoint", places.etc))
    try:
        server = open_server(settings, places)
    except OSError as error:
        message = f"{ADDRESS}:{settings.port} can't be served: {error.strerror}"
        raise NodeError("endpoint.port", message) from error
    with server:
        status.tell(f"health-endpoint: http://{ADDRESS}:{server.port}{PATH}")
        server.serve_forever(poll_interval=serving.TICK)
    return 0
