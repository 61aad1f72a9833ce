"""Have Azure reboot or reimage the nodes for which the gate requests it, once per request.

The journal is the node's own record (``drain.quarantine``): it says `sent` before the request is sent, so the process
that follows a killed one finds out what became of the request, and sends nothing. Only a person can have a request
sent again.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from image_builder.drain import event, fence, hosts, quarantine
from image_builder.drain.lease import Leases
from image_builder.drain.observe import CURRENT, Looker
from image_builder.drain.policy import Policy
from image_builder.drain.quarantine import Record
from image_builder.drain.run import occupied
from image_builder.errors import FetchError, PoolError
from image_builder.node.errors import NodeError
from image_builder.node.net.kube import Client as Kube
from image_builder.node.net.kube import KubeError, path_of_node
from image_builder.node.preflight import hold
from image_builder.pool.plan.model import Host
from image_builder.pool.scale_set.client import Client as Azure
from image_builder.pool.scale_set.model import Version
from image_builder.pool.scale_set.records import Replacement, Verb
from image_builder.pool.scale_set.roll import REPAIRS, Drive, NoJournal, Patience, send, settled_requests
from image_builder.pool.scale_set.upgrades import Member
from image_builder.pool.scale_set.verdict import Node
from image_builder.pool.steps.control_plane import NODES
from image_builder.text import stamp

# ``back``: the node has booted since. ``skipped`` and ``refused``: nothing was done, and the remedy is still requested.
State = Literal["asked", "sent", "back", "hand-over", "returned", "skipped", "refused", "failed", "unknown"]
# A case that ends in one of these needs a person or the next run.
OPEN: tuple[State, ...] = ("skipped", "refused", "failed", "unknown")
_VERBS: Mapping[str, Verb] = {"reboot": "restart", "reimage": "reimage"}
_EVENTS = {"reboot": "RebootSent", "reimage": "ReimageSent"}
BACK = "it has booted, and waits for its preflight"
_REPAIRED = (
    "Azure's automatic repairs run for its scale set, and may replace the machine meanwhile: suspend them (az vmss"
    " set-orchestration-service-state --action Suspend --service-name AutomaticRepairs)"
)
_CHANGED = "its mark changed meanwhile"
_STRANGE = "the inventory doesn't have its instance: image-builder pool snapshot"


@dataclass(frozen=True)
class Case:
    """A node whose remedy is requested, as it was read; ``host`` is its entry in the inventory."""

    node: str
    record: Record
    boot_id: str
    host: Host | None = None
    provider_id: str = ""
    physical_host: str = ""

    @property
    def state(self) -> State:
        if self.record.remedy == "hand-over":
            return "hand-over"
        if self.record.stage == "asked":
            return "asked"
        return "sent" if self.boot_id == self.record.sent_boot else "back"

    @property
    def is_due(self) -> bool:
        """Return whether a request is still to be sent, or the result of a sent one is still to be found out."""
        return self.state in ("asked", "sent")

    @property
    def known(self) -> Host:
        """Return its host; raises PoolError if the inventory lacks the host or its instance."""
        host = self.host
        if host is None or not (host.scale_set_id and host.instance and host.vm_id):
            raise PoolError(_STRANGE)
        return host

    @property
    def advice(self) -> str:
        """Return how a person can have the request sent again."""
        return f"check the node; to send it again: --again {self.node}"


@dataclass(frozen=True)
class Outcome:
    case: Case
    state: State
    reason: str = ""


def waiting(kube: Kube, fleet: Iterable[Host]) -> list[Case]:
    """Return the nodes of a fleet's scale sets whose remedy is requested; raises KubeError."""
    inventory = {host.name: host for host in fleet}
    sets = tuple(
        {f"azure://{host.scale_set_id}/".lower() for host in inventory.values() if host.scale_set_id}
    )
    cases: list[Case] = []

    def take(document: dict[str, Any]) -> None:
        name, record = document["metadata"]["name"], quarantine.record_of(document)
        provider_id = str((document.get("spec") or {}).get("providerID") or "")
        if record is None or record.remedy not in quarantine.ASKING or record.stage not in ("asked", "sent"):
            return
        if name in inventory or provider_id.lower().startswith(sets):
            host = inventory.get(name)
            physical = hosts.host_of(document)
            cases.append(Case(name, record, _boot_of(document), host, provider_id, physical))

    kube.each_page(NODES, {}, take)
    return sorted(cases, key=lambda case: case.node)


def outcome_of(case: Case) -> Outcome:
    """Return the state of a node for which nothing is done."""
    report = f"report it (image-builder gate report {case.node} --send), then delete the instance"
    reasons = {
        "asked": f"{case.record.remedy} it",
        "sent": f"{case.record.remedy} sent at {stamp(case.record.sent_at)}: {case.advice}",
        "back": BACK,
        "hand-over": report,
    }
    return Outcome(case, case.state, reasons[case.state])


@dataclass
class Repairs:
    """Repairs in progress, of nodes in several threads.

    ``kube`` opens a connection to the API server. ``again`` are the nodes whose request a person wants sent again.
    ``policy`` is the drain policy, which says which pods don't count. Once ``over`` is set, nothing more is sent or
    waited for.
    """

    kube: Callable[[], Kube]
    azure: Azure
    again: Collection[str] = ()
    policy: Policy = field(default_factory=Policy)
    patience: Patience = field(default_factory=Patience)
    over: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        # Unique to this process: for all it knows, one that was killed may still be alive.
        self._holder = f"repair-{uuid.uuid4().hex[:12]}"
        self._leases = Leases(self.kube, self._holder)
        self._guard, self._locks = threading.Lock(), dict[str, threading.Lock]()
        self._drives: dict[str, Drive | PoolError] = {}
        self.azure = replace(self.azure, wait=self._pause)

    def run(self, cases: Iterable[Case], at_once: int) -> list[Outcome]:
        """Send the requests, for up to ``at_once`` nodes at a time, wait until the nodes have booted, and return how
        each case ended.
        """
        with self._leases, ThreadPoolExecutor(at_once, thread_name_prefix="repair") as threads:
            return list(threads.map(self._outcome, cases))

    def _outcome(self, case: Case) -> Outcome:
        was_sent = case.state == "sent"
        try:
            with self.kube() as kube:
                drive = self._drive(case)
                if was_sent and case.node not in self.again:
                    drive.append(_request_of(case, drive))
                elif refusal := self._send(kube, drive, case):
                    return refusal
                was_sent = True
                return self._followed(kube, drive, case)
        except PoolError as error:
            return Outcome(case, "skipped", error.message)
        except (FetchError, NodeError) as error:
            if self.over.is_set():
                return Outcome(case, "sent" if was_sent else "asked", "interrupted: the next run resumes")
            return Outcome(case, "unknown" if was_sent else "skipped", error.message)

    def _pause(self, seconds: float) -> None:
        if self.over.wait(seconds):
            raise FetchError("interrupted", hint="rerun the same command to resume")

    def _drive(self, case: Case) -> Drive:
        """Return the drive of a node's scale set, which is held from then on; raises PoolError if another process
        holds it.
        """
        path = case.known.scale_set_id
        with self._guard:
            lock = self._locks.setdefault(path, threading.Lock())
        with lock:
            if path not in self._drives:
                try:
                    self._drives[path] = self._held(path)
                except PoolError as error:
                    self._drives[path] = error
            drive = self._drives[path]
        if isinstance(drive, PoolError):
            raise drive
        return drive

    def _held(self, path: str) -> Drive:
        self._pause(0)
        self._leases.take(path)
        scale_set = self.azure.scale_set(path)
        self.azure.require_free(scale_set, self._holder)
        if scale_set.is_flexible:
            raise PoolError(f"{path} is in mode Flexible, whose instances need other requests")
        # The Lease keeps rolls away, so nothing needs to be written to the scale set, not even a roll's tag.
        journal, for_ever = NoJournal(), float("inf")
        return Drive(self.azure, path, self._holder, journal, self.patience, self._pause, held_until=for_ever)

    # -- sending -----------------------------------------------------------------------------------------------

    def _send(self, kube: Kube, drive: Drive, case: Case) -> Outcome | None:
        """Mark a node and send its request, once. Return why nothing was sent; None if it was, or may have been."""
        document = kube.find(path_of_node(case.node))
        if document is None or quarantine.record_of(document) != case.record:
            return Outcome(case, "skipped", _CHANGED)
        labels = document["metadata"].get("labels") or {}
        held = hold.of_node(case.record.reason, labels, hold.parse(kube.find(hold.PATH) or {}))
        if held is not None and held.state == hold.OPEN:
            return Outcome(case, "skipped", f"the gate's breaker holds it: {held.words}")
        if drive.client.services(drive.path).get(REPAIRS) == "Running":
            return Outcome(case, "skipped", _REPAIRED)
        looker = Looker(kube, self.policy)
        if reason := occupied(looker, document, quarantine.RUN):
            return Outcome(case, "skipped", reason)
        record = replace(case.record, stage="sent", sent_at=self.azure.now(), sent_boot=_boot_of(document))
        try:
            if not fence.send(kube, case.node, quarantine.take_out(document, record)):
                return Outcome(case, "skipped", _CHANGED)
            refusal = self._request(drive, case, record, looker)
        except FetchError as error:
            refusal = Outcome(case, "skipped", error.message)
        finally:
            history = drive.requests(case.known.instance)
            if not history or history[-1].settled:
                # Nothing was done for certain, so the remedy stays requested.
                _unmark(kube, case, record)
        if history and not history[-1].settled:
            with suppress(KubeError):  # the request was sent, even if the Event can't be posted
                self._post(kube, document, record)
            return None
        return refusal

    def _request(self, drive: Drive, case: Case, record: Record, looker: Looker) -> Outcome:
        """Check the node once more and send the request; return why nothing came of it."""
        host = case.known

        def busy() -> str:
            self._leases.hold(host.scale_set_id)
            document = looker.node(case.node)
            if document is None or quarantine.record_of(document) != record:
                return _CHANGED
            if self.over.is_set():
                return "interrupted"
            return occupied(looker, document, quarantine.RUN, CURRENT)

        instance = drive.instance(host.instance)
        if instance is None or instance.vm_id != host.vm_id.lower():
            return Outcome(case, "skipped", f"its instance was deleted, or is another machine; {_STRANGE}")
        if not instance.is_at_rest:
            return Outcome(case, "skipped", f"its instance is {instance.state}")
        member = Member(instance, Version(instance.image), Node(record.sent_boot, ""), busy)
        send(drive, _VERBS[record.remedy], [member])
        if member.error:
            raise member.error
        if member.ending:
            return Outcome(case, "skipped", member.ending.reason)
        if history := drive.requests(host.instance):
            settled = history[-1].settled
            return Outcome(case, "refused", settled.detail if settled else "")
        return Outcome(
            case, "skipped", "the last check took too long, or the instance changed: the next run retries"
        )

    def _post(self, kube: Kube, document: Mapping[str, Any], record: Record) -> None:
        meta, reason = document["metadata"], _EVENTS[record.remedy]
        message = f"Azure was asked to {record.remedy} it: {record.condition} {record.reason}"
        moment = record.sent_at
        event.post(kube, event.event(meta["name"], meta["uid"], reason, message, moment, step=str(moment)))

    # -- what became of it -------------------------------------------------------------------------------------

    def _followed(self, kube: Kube, drive: Drive, case: Case) -> Outcome:
        """Find out what became of a request, and wait for the boot that it should cause; raises FetchError."""
        before = drive.requests(case.known.instance)[-1].sent.boot_id

        def node() -> Node | None:
            # The Node's status may still describe the previous boot: only a new boot ID, or Ready, counts.
            with suppress(KubeError):
                document = kube.find(path_of_node(case.node))
                boot_id = _boot_of(document or {})
                if document and boot_id and (boot_id != before or _is_ready(document)):
                    return Node(boot_id, "")
            return None

        settled = settled_requests(drive, case.known.instance, node)[-1].settled
        assert settled is not None
        if settled.outcome in ("failed", "gone"):
            return Outcome(case, "failed", f"{settled.detail or settled.outcome}: {case.advice}")
        if settled.outcome != "done":
            trace = "neither Azure nor the node shows it" if settled.outcome == "not accepted" else "unknown"
            return Outcome(case, "unknown", f"{trace}: {case.advice}")
        until = self.azure.now() + self.patience.boot
        while (reading := node()) is None or reading.boot_id == before:
            if self.azure.now() > until:
                return Outcome(case, "failed", f"it doesn't come back: {case.advice}")
            self._pause(self.patience.look)
        return Outcome(case, "returned", BACK)


def _request_of(case: Case, drive: Drive) -> Replacement:
    """Return the request that another process sent for a node, or was about to send; raises FetchError."""
    instance, record = drive.instance(case.known.instance), case.record
    return Replacement(
        at=record.sent_at,
        verb=_VERBS[record.remedy],
        scale_set=drive.path,
        instance=case.known.instance,
        vm_id=case.known.vm_id.lower(),
        boot_id=record.sent_boot,
        version=instance.image if instance else "",
        build="",
    )


def _unmark(kube: Kube, case: Case, record: Record) -> None:
    """Restore a node's record from before it was marked, unless it has changed since. Raises KubeError."""
    for _ in fence.attempts(case.node):
        document = kube.find(path_of_node(case.node))
        if document is None or quarantine.record_of(document) != record:
            return
        if fence.send(kube, case.node, quarantine.take_out(document, case.record)):
            return


def _boot_of(document: Mapping[str, Any]) -> str:
    return str(((document.get("status") or {}).get("nodeInfo") or {}).get("bootID") or "")


def _is_ready(document: Mapping[str, Any]) -> bool:
    conditions = (document.get("status") or {}).get("conditions") or ()
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
