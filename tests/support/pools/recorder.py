"""The merged log of a roll: requests to Azure with its state at the time, the API server's objects, and its audit log.

Everything is on one machine, so one clock orders it. The simulator's server answers one request at a time, and requests
are recorded while it does; nodes and pods are watched as any controller does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from image_builder.drain import fence, taint
from image_builder.node.net.kube import Client as Kube
from image_builder.node.net.kube import KubeError
from image_builder.pool.plan.model import Host
from image_builder.pool.plan.plan import Plan
from image_builder.pool.run.records import Record
from image_builder.pool.scale_set import records as requests
from image_builder.pool.scale_set.client import HOLD_TAG
from tests.support.arm.model import Answer, Json, Request
from tests.support.arm.scale_sets import Machine, ScaleSets, SetState

_IDLE_SECONDS = 90.0
_CATCH_UP_SECONDS = 20.0
_SETS = "/virtualmachinescalesets/"


@dataclass(frozen=True)
class Sent:
    """A request to Azure, and the state of its scale set right before: ``vm_ids`` are those of its instances.

    ``models`` are the versions that all scale sets name, ``until`` is when the operation that it began ends, in
    seconds since the epoch. ``status`` is 0 for a request that never arrived.
    """

    at: float
    method: str
    path: str
    body: Json | None
    if_match: str
    status: int
    scale_set: str
    vm_ids: Mapping[str, str]
    mode: str
    is_upgraded_by_azure: bool
    tag: str
    models: Mapping[str, str]
    until: float

    @property
    def verb(self) -> str:
        """Return `upgrade` or `reimage` for a request that may replace disks, or `model`, `tags`, `service`, `read`."""
        if self.method == "GET":
            return "read"
        if self.method == "PATCH":
            return "tags" if set(self.body or {}) == {"tags"} else "model"
        last = self.path.lower().rpartition("/")[2]
        named = {"manualupgrade": "upgrade", "reimage": "reimage", "setorchestrationservicestate": "service"}
        return named.get(last, last)

    @property
    def numbers(self) -> tuple[str, ...]:
        """Return the instances that it names."""
        parts = self.path.split("/")
        if self.verb == "reimage" and parts[-3].lower() == "virtualmachines":
            return (parts[-2],)
        return tuple((self.body or {}).get("instanceIds") or ())

    @property
    def replaces(self) -> bool:
        return self.verb in ("upgrade", "reimage")


@dataclass(frozen=True)
class NodeState:
    """A Node as the API server had it from ``at`` on."""

    at: float
    name: str
    is_gone: bool
    is_ready: bool
    is_cordoned: bool
    run: str
    is_barred: bool

    @property
    def is_ours(self) -> bool:
        return bool(self.run) or self.is_barred


@dataclass(frozen=True)
class PodState:
    """A pod as the API server had it from ``at`` on."""

    at: float
    is_gone: bool
    document: Json

    @property
    def uid(self) -> str:
        return str(self.document["metadata"]["uid"])

    @property
    def name(self) -> str:
        return str(self.document["metadata"]["name"])

    @property
    def job(self) -> str:
        """Return the uid of the Job that owns the pod, empty if there is none."""
        owners = self.document["metadata"].get("ownerReferences") or ()
        return next((str(owner["uid"]) for owner in owners if owner["kind"] == "Job"), "")

    @property
    def node(self) -> str:
        return str(self.document["spec"].get("nodeName") or "")

    @property
    def holds(self) -> bool:
        """Return whether the pod keeps its host busy, judged by the pod itself, not by the drain's view of it."""
        meta = self.document["metadata"]
        owners = {owner["kind"] for owner in meta.get("ownerReferences") or ()}
        is_mirror = "kubernetes.io/config.mirror" in (meta.get("annotations") or {})
        is_over = self.document.get("status", {}).get("phase") in ("Succeeded", "Failed")
        return bool(self.node) and not (self.is_gone or is_mirror or is_over or "DaemonSet" in owners)

    @property
    def runs(self) -> bool:
        return self.holds and self.document.get("status", {}).get("phase") == "Running"


@dataclass(frozen=True)
class Disk:
    """A new OS disk of an instance."""

    at: float
    scale_set: str
    number: str
    version: str


@dataclass(frozen=True)
class Log:
    """Everything known about one roll. ``audit`` has the driver's requests, from the API server's own log.

    ``machines`` are the instances and ``services`` those of the scale sets as they are now, ``files`` those that the
    driver has written.
    """

    plan: Plan
    run_id: str
    sent: Sequence[Sent]
    disks: Sequence[Disk]
    nodes: Sequence[NodeState]
    pods: Sequence[PodState]
    audit: Sequence[Mapping[str, Any]]
    run: Sequence[Record]
    requests: Sequence[requests.Record]
    machines: Mapping[tuple[str, str], Machine]
    services: Mapping[str, Mapping[str, str]]
    versions: Mapping[str, Json]
    files: Sequence[Path]

    @cached_property
    def _hosts(self) -> dict[tuple[str, str], Host]:
        return {(host.scale_set_id.lower(), host.instance): host for host in self.plan.hosts}

    @cached_property
    def _states(self) -> dict[str, list[NodeState]]:
        states: dict[str, list[NodeState]] = {}
        for state in self.nodes:
            states.setdefault(state.name, []).append(state)
        return states

    def host(self, scale_set: str, number: str) -> Host | None:
        """Return the plan's host for an instance."""
        return self._hosts.get((scale_set, number))

    def before(self, name: str) -> NodeState | None:
        """Return a node as it was when the roll began."""
        states = self._states.get(name, [])
        earlier = [state for state in states if not self.run or state.at <= self.run[0].at]
        return earlier[-1] if earlier else states[0] if states else None

    def last(self, name: str) -> NodeState | None:
        states = self._states.get(name, [])
        return states[-1] if states else None

    def run_on(self, name: str, at: float) -> str:
        """Return the run whose cordon a node had at a moment, empty for none and for a node that isn't in the plan."""
        earlier = [state for state in self._states.get(name, ()) if state.at <= at]
        return earlier[-1].run if earlier else ""

    def present(self, at: float) -> list[PodState]:
        """Return all pods that kept a host busy at a moment, as they were then."""
        states = {pod.uid: pod for pod in self.pods if pod.at <= at}
        return [pod for pod in states.values() if pod.holds]

    def tenants(self, name: str, at: float) -> list[PodState]:
        """Return the pods that kept a host busy at a moment, each in the state with which it began to."""
        present: dict[str, PodState] = {}
        for pod in self.pods:
            if pod.at > at:
                break
            if pod.node == name and pod.holds:
                present.setdefault(pod.uid, pod)
            else:
                present.pop(pod.uid, None)
        return list(present.values())


@dataclass
class Recorder:
    """Records from ``__enter__`` on. ``connect`` opens an administrator's connection, one for each thread."""

    connect: Callable[[], Kube]
    scale_sets: ScaleSets
    sent: list[Sent] = field(default_factory=list)
    disks: list[Disk] = field(default_factory=list)
    nodes: list[NodeState] = field(default_factory=list)
    pods: list[PodState] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._before: dict[str, Any] | None = None
        self._stop = threading.Event()
        self._versions: dict[str, int] = {}
        self._clients: list[Kube] = []
        self._threads: list[threading.Thread] = []
        arm = self.scale_sets.arm
        arm.faults.insert(0, self._look)
        arm.observers.append(self._answered)

    def __enter__(self) -> Recorder:
        for path, take in (("/api/v1/nodes", self._node), ("/api/v1/pods", self._pod)):
            client = self.connect()
            self._clients.append(client)
            thread = threading.Thread(target=self._follow, args=(client, path, take), daemon=True)
            self._threads.append(thread)
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for client in self._clients:
            client.interrupt()
        for thread in self._threads:
            thread.join(30)

    def catch_up(self, client: Kube) -> None:
        """Wait until everything that has happened by now is recorded."""
        deadline = time.monotonic() + _CATCH_UP_SECONDS
        for path in ("/api/v1/nodes", "/api/v1/pods"):
            # Each kind has its own version, that of its newest object.
            newest = 0

            def note(item: Json) -> None:
                nonlocal newest
                newest = max(newest, int(item["metadata"]["resourceVersion"]))

            client.each(path, note)
            while self._versions.get(path, 0) < newest:
                assert time.monotonic() < deadline, f"the watch of {path} lags"
                time.sleep(0.02)

    # -- Azure -----------------------------------------------------------------------------------------------------

    def reimaged(self, group: SetState, machine: Machine) -> None:
        self.disks.append(Disk(time.time(), group.content["id"].lower(), machine.id, machine.disk))

    def _group(self, path: str) -> SetState | None:
        head, mark, rest = path.lower().partition(_SETS)
        return self.scale_sets.sets.get(f"{head}{mark}{rest.partition('/')[0]}")

    def _look(self, request: Request) -> None:
        """Remember the state of a request's scale set before the request is answered."""
        group = self._group(request.path)
        if group is None:
            return
        self.scale_sets.settle()
        policy = group.content["properties"]["upgradePolicy"]
        self._before = {
            "at": time.time(),
            "scale_set": group.content["id"].lower(),
            "vm_ids": {machine.id: machine.vm_id.lower() for machine in group.machines.values()}
            if request.method == "POST"
            else {},
            "mode": policy["mode"],
            "is_upgraded_by_azure": bool(
                (policy.get("automaticOSUpgradePolicy") or {}).get("enableAutomaticOSUpgrade")
            ),
            "tag": (group.content.get("tags") or {}).get(HOLD_TAG, ""),
            "models": {path: each.image for path, each in self.scale_sets.sets.items()}
            if request.method != "GET"
            else {},
        }

    def _answered(self, request: Request, answer: Answer | None) -> None:
        if self._group(request.path) is None:
            return
        if self._before is None:  # refused before anything else
            self._look(request)
        assert self._before is not None
        until = self._before["at"]
        if request.method == "POST" and answer and answer.status < 300:
            until += self.scale_sets.tasks[-1].due - self.scale_sets.clock()
        status = answer.status if answer else 0
        sent = Sent(
            method=request.method,
            path=request.path,
            body=request.body,
            if_match=request.headers.get("if-match", ""),
            status=status,
            until=until,
            **self._before,
        )
        self._before = None
        self.sent.append(sent)

    # -- the cluster -----------------------------------------------------------------------------------------------

    def _follow(self, client: Kube, path: str, take: Callable[[Json, bool], None]) -> None:
        version = ""
        while not self._stop.is_set():
            with suppress(KubeError):
                if not version:
                    version = client.each(path, lambda item: self._noted(path, item, take, is_gone=False))
                query = f"watch=1&resourceVersion={version}&allowWatchBookmarks=true&timeoutSeconds=300"
                for event in client.watch(f"{path}?{query}", idle=_IDLE_SECONDS):
                    if event["type"] == "ERROR":
                        version = ""
                        break
                    version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] != "BOOKMARK":
                        self._noted(path, event["object"], take, is_gone=event["type"] == "DELETED")
            self._stop.wait(0.1)

    def _noted(self, path: str, item: Json, take: Callable[[Json, bool], None], *, is_gone: bool) -> None:
        take(item, is_gone)
        self._versions[path] = max(self._versions.get(path, 0), int(item["metadata"]["resourceVersion"]))

    def _node(self, item: Json, is_gone: bool) -> None:
        conditions = item.get("status", {}).get("conditions") or ()
        record = fence.record_of(item)
        taints = item["spec"].get("taints") or ()
        state = NodeState(
            at=time.time(),
            name=item["metadata"]["name"],
            is_gone=is_gone,
            is_ready=any(c["type"] == "Ready" and c["status"] == "True" for c in conditions),
            is_cordoned=fence.is_cordoned(item),
            run=record.run if record else "",
            is_barred=any(entry["key"] == taint.TAINT for entry in taints),
        )
        self.nodes.append(state)

    def _pod(self, item: Json, is_gone: bool) -> None:
        self.pods.append(PodState(time.time(), is_gone, item))


def audited(events: Iterable[Mapping[str, Any]], agent: str, since: float) -> Iterator[Mapping[str, Any]]:
    """Yield the requests that clients with this user agent sent to the API server since a moment."""
    for event in events:
        is_its = event.get("userAgent") == agent and event["stage"] == "ResponseComplete"
        if is_its and moment(event) >= since:
            yield event


def moment(event: Mapping[str, Any]) -> float:
    """Return when a request of the audit log was answered."""
    return datetime.fromisoformat(event["stageTimestamp"]).timestamp()
