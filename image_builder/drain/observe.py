"""A host's Node object and pods: as the API server remembers them, or not older than a version, or right now.

A list of the current state makes the API server read all objects of the cluster from etcd, however few it returns; one
from its memory makes it read none. So what is only waited for is looked up there, and only a last look needs more.
"""

from __future__ import annotations

import threading
import time
import urllib.parse
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from image_builder.drain.ask import CHECKPOINT
from image_builder.drain.gangs import gang_of
from image_builder.drain.ladder import Tenant
from image_builder.drain.pods import Class, Owner, Pod, classify, moment, owner_of, pod_from
from image_builder.drain.policy import Policy
from image_builder.node.net.kube import Client, path_of_node

# Requests for Nodes within this many seconds of each other share one answer, if there are more than a few.
_MOMENT, _FEW = 0.8, 1
# Versions to look from: whatever the API server remembers, and the current state. Without a limit, since that would
# make the server read from etcd.
REMEMBERED, CURRENT = "0", ""
_PODS = "/api/v1/pods"
_UNFINISHED = "status.phase!=Succeeded,status.phase!=Failed"


@dataclass(frozen=True)
class Job:
    """What a Job adds to its pods: its own controller, and when it must have ended (seconds since the epoch)."""

    parent: Owner | None
    deadline: float | None


def job_from(document: Mapping[str, Any]) -> Job:
    started = moment((document.get("status") or {}).get("startTime"))
    seconds = (document.get("spec") or {}).get("activeDeadlineSeconds")
    ends = started + float(seconds) if started is not None and seconds is not None else None
    return Job(owner_of(document), ends)


def version_of(document: Mapping[str, Any] | None) -> str:
    """Return the version of an object as the API server wrote it, empty for none."""
    return str(((document or {}).get("metadata") or {}).get("resourceVersion") or "")


def is_since(version: str, since: str) -> bool:
    """Return whether a version isn't older than another; not if either is unknown."""
    return since == REMEMBERED or (version.isdecimal() and since.isdecimal() and int(version) >= int(since))


class Cordoned:
    """The Nodes that take no new pods, for all callers that look at some at the same moment: one request reads all.

    A Node that isn't among them is read individually, so one cordoned since then is never taken for schedulable.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._asked: list[float] = []
        self._nodes: dict[str, dict[str, Any]] = {}
        self._until = 0.0

    def node(self, client: Client, name: str, since: str = REMEMBERED) -> dict[str, Any] | None:
        """Return a Node as of a moment ago, not older than ``since``; None if there is none. Raises KubeError."""
        with self._lock:
            now = self._clock()
            self._asked = [*(at for at in self._asked if at > now - _MOMENT), now]
            if now >= self._until and len(self._asked) > _FEW:
                self._nodes = {}
                _each(client, "/api/v1/nodes", "spec.unschedulable=true", REMEMBERED, self._take)
                self._until = now + _MOMENT
            document = self._nodes.get(name) if self._clock() < self._until else None
        if document is None or not is_since(version_of(document), since):
            return client.find(path_of_node(name))
        return document

    def _take(self, document: dict[str, Any]) -> None:
        self._nodes[document["metadata"]["name"]] = document


class Looker:
    """Looks at hosts; each Job is read only once. ``cordoned`` needs the right to list Nodes. Raises KubeError.

    ``overrules``: a deadline has passed, and the owners' wishes no longer count. ``full_reads`` is how many times the
    API server remembered too little for a last look, and had to read all pods from etcd.
    """

    def __init__(
        self, client: Client, policy: Policy, cordoned: Cordoned | None = None, *, overrules: bool = False
    ) -> None:
        self._client, self._policy, self.overrules = client, policy, overrules
        self._cordoned = cordoned
        self.full_reads = 0
        self._jobs: dict[str, Job] = {}

    def node(self, name: str, *, is_cordoned: bool = False, since: str = REMEMBERED) -> dict[str, Any] | None:
        """Return a Node object, None if there is none.

        ``is_cordoned``: it was cordoned, and probably still is; ``since`` is the version since when.
        """
        if self._cordoned and is_cordoned:
            return self._cordoned.node(self._client, name, since)
        return self._client.find(path_of_node(name))

    def tenants(self, host: str, now: float, since: str = REMEMBERED) -> tuple[Tenant, ...]:
        """Return the pods that keep a host busy; ``now`` is in seconds since the epoch.

        By default as the API server remembers them, which may be a moment ago. A last look is one ``since`` a version
        after which no pod can come, such as that of a taint, or of the current state (``CURRENT``).
        """
        selector = f"spec.nodeName={host},{_UNFINISHED}"
        pods: list[Pod] = []
        version = _each(self._client, _PODS, selector, REMEMBERED if since else CURRENT, _into(pods))
        if since and not is_since(version, since):
            self.full_reads += 1
            pods = []
            _each(self._client, _PODS, selector, CURRENT, _into(pods))
        tenants = [self._tenant(pod, now) for pod in pods]
        return tuple(tenant for tenant in tenants if tenant.verdict.kind is not Class.IGNORED)

    def tenants_of(self, hosts: Container[str], now: float) -> dict[str, list[Tenant]]:
        """Return the pods that keep hosts busy, for many hosts at once."""
        tenants: dict[str, list[Tenant]] = {}
        pods: list[Pod] = []
        # All pods of a cluster: in pages, since their text is large, and only once.
        self._client.each_page(_PODS, {"fieldSelector": f"spec.nodeName!=,{_UNFINISHED}"}, _into(pods))
        for pod in pods:
            if pod.host in hosts:
                tenants.setdefault(pod.host, []).append(self._tenant(pod, now))
        return tenants

    def spread(self, namespaces: Iterable[str]) -> dict[str, set[str]]:
        """Return the hosts of all gangs in some namespaces."""
        spread: dict[str, set[str]] = {}
        for namespace in sorted(set(namespaces)):
            pods: list[Pod] = []
            path = f"/api/v1/namespaces/{namespace}/pods"
            _each(self._client, path, f"spec.nodeName!=,{_UNFINISHED}", REMEMBERED, _into(pods))
            for pod in pods:
                if gang := gang_of(pod, self._parents(pod)):
                    spread.setdefault(gang, set()).add(pod.host)
        return spread

    def _tenant(self, pod: Pod, now: float) -> Tenant:
        job = self._job(pod)
        if job and pod.deadline is None:
            pod = replace(pod, deadline=job.deadline)
        verdict = classify(pod, self._policy, now, overruled=self.overrules)
        return Tenant(pod, verdict, gang_of(pod, self._parents(pod)), is_asked=CHECKPOINT in pod.annotations)

    def _parents(self, pod: Pod) -> dict[str, Owner]:
        job = self._job(pod)
        return {pod.owner.uid: job.parent} if pod.owner and job and job.parent else {}

    def _job(self, pod: Pod) -> Job | None:
        owner = pod.owner
        if owner is None or owner.kind != "Job" or owner.api != "batch/v1":
            return None
        if owner.uid not in self._jobs:
            path = f"/apis/batch/v1/namespaces/{pod.namespace}/jobs/{owner.name}"
            self._jobs[owner.uid] = job_from(self._client.find(path) or {"metadata": {}})
        return self._jobs[owner.uid]


def _into(pods: list[Pod]) -> Callable[[dict[str, Any]], None]:
    return lambda item: pods.append(pod_from(item))


def _each(
    client: Client, path: str, selector: str, version: str, take: Callable[[dict[str, Any]], None]
) -> str:
    """Call ``take`` for each object that a field selector picks, of a version; return the list's own version."""
    query = {"fieldSelector": selector} | ({"resourceVersion": version} if version else {})
    return client.each(f"{path}?{urllib.parse.urlencode(query)}", take)
