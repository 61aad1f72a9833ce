"""Kubelets of any number of nodes in one process: they report to the API server as real ones do, but run nothing.

Each node is registered, reports that it is Ready and renews its lease. Each pod that is bound to a node runs at once,
is deleted when its grace period is over, and ends when it is told to; a pod that doesn't tolerate a node's
``NoExecute`` taints is refused. This follows kwok, as far as a drain needs it.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from image_builder.node.net.kube import (
    NOT_FOUND,
    STRATEGIC_MERGE,
    Client,
    KubeError,
    path_of_node,
    path_of_pod,
)

AGENT = "simulated-kubelets"
_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
# A node's lease lasts 40 s, and the node controller waits for 50 s.
_RENEW_SECONDS = 15.0
_ROOM = {"cpu": "64", "memory": "256Gi", "pods": "110", "nvidia.com/gpu": "8"}
_INFO = (
    *("architecture", "containerRuntimeVersion", "kernelVersion", "kubeProxyVersion", "kubeletVersion"),
    *("machineID", "operatingSystem", "osImage", "systemUUID"),
)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def ready(boot_id: str) -> dict[str, Any]:
    """Return the status that a kubelet reports when it has started in this boot."""
    now = _now()
    condition = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}
    return {
        "conditions": [{**condition, "lastHeartbeatTime": now, "lastTransitionTime": now}],
        "capacity": _ROOM,
        "allocatable": _ROOM,
        "nodeInfo": {**dict.fromkeys(_INFO, "lab"), "bootID": boot_id},
    }


class Kubelets:
    """``connect`` opens a connection: one for the watch, one for each of ``workers`` threads and one for each caller's.

    A pod that is deleted ends after ``grace`` seconds, or sooner if its own grace period is shorter.
    """

    def __init__(self, connect: Callable[[], Client], *, workers: int = 4, grace: float = 1.0) -> None:
        self.nodes: dict[str, str] = {}
        self._connect, self._grace = connect, grace
        self._local = threading.local()
        self._clients: list[Client] = []
        self._pool = ThreadPoolExecutor(workers)
        self._stop = threading.Event()
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._lock = threading.Condition()
        self._started: set[str] = set()
        self._ending: set[str] = set()
        self._watch = connect()
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._follow, self._renew, self._wait)
        ]

    def __enter__(self) -> Kubelets:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._watch.interrupt()
        with self._lock:
            self._lock.notify()
        for thread in self._threads:
            thread.join(30)
        self._pool.shutdown(cancel_futures=True)
        for client in self._clients:
            client.close()

    # -- nodes -----------------------------------------------------------------------------------------------------

    def register(self, names: Iterable[str], **labels: str) -> None:
        """Register nodes, all at once, including those whose Node object was deleted."""
        list(self._pool.map(lambda name: self._register(name, labels), names))

    def boot(self, name: str) -> str:
        """Reboot a node's machine; return its new boot id."""
        self.nodes[name] = str(uuid.uuid4())
        self._tolerant(lambda: self._report(name))
        return self.nodes[name]

    def _register(self, name: str, labels: Mapping[str, str]) -> None:
        node = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **labels}},
        }
        with suppress(KubeError):  # a kubelet adopts an existing object
            self._client.request("POST", "/api/v1/nodes", node)
        self.nodes.setdefault(name, str(uuid.uuid4()))
        self._report(name)
        self._beat(name)

    def _report(self, name: str) -> None:
        status = {"status": ready(self.nodes[name])}
        self._client.request("PATCH", f"{path_of_node(name)}/status", status, STRATEGIC_MERGE)

    def _beat(self, name: str) -> None:
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": stamp}
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name}}
        try:
            self._client.request("PATCH", f"{_LEASES}/{name}", {"spec": spec}, STRATEGIC_MERGE)
        except KubeError as error:
            if error.status == NOT_FOUND:
                with suppress(KubeError):
                    self._client.request("POST", _LEASES, {**lease, "spec": spec})

    def _renew(self) -> None:
        while not self._stop.wait(_RENEW_SECONDS):
            with suppress(KubeError, RuntimeError):
                list(self._pool.map(self._beat, list(self.nodes)))

    # -- pods ------------------------------------------------------------------------------------------------------

    def finish(self, namespace: str, name: str, phase: str = "Succeeded") -> None:
        """End a pod's work; its container is not started again."""
        status = {"phase": phase, "conditions": [self._condition("Ready", "False")]}
        self._client.request(
            "PATCH", f"{path_of_pod(namespace, name)}/status", {"status": status}, STRATEGIC_MERGE
        )

    def _follow(self) -> None:
        version = ""
        while not self._stop.is_set():
            with suppress(KubeError):
                if not version:
                    version = self._watch.each("/api/v1/pods", self._take)
                query = f"watch=1&resourceVersion={version}&allowWatchBookmarks=true&timeoutSeconds=300"
                for event in self._watch.watch(f"/api/v1/pods?{query}", idle=90.0):
                    if event["type"] == "ERROR":
                        version = ""
                        break
                    version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] in ("ADDED", "MODIFIED"):
                        self._take(event["object"])

    def _take(self, pod: dict[str, Any]) -> None:
        meta = pod["metadata"]
        if pod["spec"].get("nodeName") not in self.nodes:
            return
        if "deletionTimestamp" in meta and meta["uid"] not in self._ending:
            self._ending.add(meta["uid"])
            grace = min(self._grace, float(meta.get("deletionGracePeriodSeconds") or 0))
            self._later(grace, lambda: self._remove(meta))
        elif pod.get("status", {}).get("phase") == "Pending" and meta["uid"] not in self._started:
            self._started.add(meta["uid"])
            self._later(0, lambda: self._start(pod))

    def _later(self, seconds: float, work: Callable[[], object]) -> None:
        with self._lock:
            heapq.heappush(self._due, (time.monotonic() + seconds, next(self._numbers), work))
            self._lock.notify()

    def _wait(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                pause = self._due[0][0] - time.monotonic() if self._due else 60.0
                if pause > 0:
                    self._lock.wait(pause)
                    continue
                _, _, work = heapq.heappop(self._due)
            with suppress(RuntimeError):  # the pool is closed
                self._pool.submit(self._tolerant, work)

    def _tolerant(self, work: Callable[[], object]) -> None:
        """Do the work; if the API server is unreachable, retry after a second."""
        try:
            work()
        except KubeError as error:
            if not error.status:
                self._later(1.0, work)

    def _start(self, pod: Mapping[str, Any]) -> None:
        meta = pod["metadata"]
        if self._refuses(pod):
            self.finish(meta["namespace"], meta["name"], "Failed")
            return
        conditions = [self._condition(kind, "True") for kind in ("Initialized", "ContainersReady", "Ready")]
        status = {"phase": "Running", "startTime": _now(), "conditions": conditions}
        path = f"{path_of_pod(meta['namespace'], meta['name'])}/status"
        self._client.request("PATCH", path, {"status": status}, STRATEGIC_MERGE)

    def _refuses(self, pod: Mapping[str, Any]) -> bool:
        """Return whether a taint keeps a pod from being started, as a kubelet's own admission does."""
        node = self._client.find(path_of_node(pod["spec"]["nodeName"])) or {"spec": {}}
        keys = [t["key"] for t in node["spec"].get("taints") or () if t["effect"] == "NoExecute"]
        tolerations = pod["spec"].get("tolerations") or ()
        return not all(any(t.get("key") in (None, key) for t in tolerations) for key in keys)

    def _remove(self, meta: Mapping[str, Any]) -> None:
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": meta["uid"]}}
        body = {"apiVersion": "v1", "kind": "DeleteOptions", **options}
        self._client.request("DELETE", path_of_pod(meta["namespace"], meta["name"]), body)

    @staticmethod
    def _condition(kind: str, status: str) -> dict[str, str]:
        return {"type": kind, "status": status, "lastTransitionTime": _now()}

    @property
    def _client(self) -> Client:
        """Return this thread's connection."""
        if not hasattr(self._local, "client"):
            self._local.client = self._connect()
            self._clients.append(self._local.client)
        client: Client = self._local.client
        return client
