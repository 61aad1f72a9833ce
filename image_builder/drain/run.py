"""The loop that drains hosts until each is empty or skipped.

Apart from the API server's state, it knows only how long it has waited: after a kill, another drain of the same run
continues from the annotations.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from image_builder.drain import event, fence
from image_builder.drain.ask import ask
from image_builder.drain.evict import Answer, evict
from image_builder.drain.fence import Record
from image_builder.drain.ladder import Action, Host, Tenant, decide
from image_builder.drain.observe import CURRENT, REMEMBERED, Cordoned, Looker, version_of
from image_builder.drain.overdue import Overdue
from image_builder.drain.policy import Policy
from image_builder.node.net.kube import Client, KubeError
from image_builder.node.net.retry import backoff

State = Literal["empty", "skipped"]
Tell = Callable[[str], None]
# Why a host whose cordon a person removed is skipped: it is left alone.
UNCORDONED = "somebody uncordoned it"
_chance: Callable[[], float] = random.random


@dataclass(frozen=True)
class Outcome:
    """How the drain of a host ended: ``empty`` and cordoned, or ``skipped`` and freed, unless that is denied.

    ``tenants`` are the pods that caused the skip, ``node`` is the Node that was empty, ``evicted`` are the pods that
    were evicted from it. ``is_final``: waiting for its pods is no use, as a change of it is denied, or a person
    uncordoned it.
    """

    host: str
    state: State
    reason: str = ""
    tenants: tuple[Tenant, ...] = ()
    node: dict[str, Any] | None = field(default=None, compare=False, repr=False)
    evicted: tuple[str, ...] = ()
    is_final: bool = False


@dataclass
class _Visit:
    """What is remembered of a host while it is drained; seconds are monotonic."""

    began: float
    # The Node as it was last read, which a patch tests.
    node: dict[str, Any] | None = None
    node_uid: str = ""
    record: Record | None = None
    # The version of the Node since our last change.
    version: str = REMEMBERED
    fenced: float | None = None
    idle_since: float | None = None
    # When the next look is worthwhile: an idle host has to settle first.
    due: float = 0.0
    # Why the API server refuses what is to be done with it.
    denied: str = ""
    evicted: list[str] = field(default_factory=list)
    evicted_owners: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _Attempt:
    """A requested eviction: when to retry it (monotonic seconds), and the answer."""

    due: float
    message: str = ""
    refusal: str = ""


def free(
    client: Client, name: str, run: str, seen: dict[str, Any] | None = None, *, now: float | None = None
) -> bool:
    """Remove our cordon from a host and post an Event; return whether this run had one there. Raises KubeError.

    ``seen`` is the Node as it was last read.
    """
    if uid := fence.free(client, name, run, seen):
        at = time.time() if now is None else now
        # The host is free even if the Event can't be posted.
        with suppress(KubeError):
            event.post(client, event.event(name, uid, "NodeFreed", f"freed by {run}", at, step=str(at)))
    return bool(uid)


def occupied(looker: Looker, document: Mapping[str, Any], run: str, since: str = REMEMBERED) -> str:
    """Return why a Node, as just read, isn't both empty and cordoned by a run; empty if it is. Raises KubeError.

    ``since`` is the version that the look at its pods must not be older than.
    """
    record = fence.record_of(document)
    if record is None or record.run != run or not fence.is_cordoned(document):
        return UNCORDONED
    tenants = looker.tenants(document["metadata"]["name"], time.time(), since)
    return f"{tenants[0].pod} runs on it" if tenants else ""


class Drain:
    """A drain in progress. ``turn`` looks at the hosts that are due and takes the next steps; ``outcomes`` has those
    that are done.

    ``clock`` is monotonic, ``wall`` the time of day, both in seconds. After ``deadline`` (``Overdue``) it evicts pods
    whatever their owners say: its mode is `evict` from then on, and each host's timeout starts again. ``cordoned`` is
    shared with parallel drains, and needs the right to list Nodes. ``is_last``: nobody looks again at a host that was
    found empty, so this drain does, at the current state of its pods.
    """

    def __init__(
        self,
        client: Client,
        run: str,
        policy: Policy,
        tell: Tell,
        *,
        deadline: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        cordoned: Cordoned | None = None,
        is_last: bool = True,
    ) -> None:
        self.outcomes: dict[str, Outcome] = {}
        # Hosts that were taken on only to drain whole gangs.
        self.partners: set[str] = set()
        self._client, self._run, self._policy, self._tell = client, run, policy, tell
        self._clock, self._wall, self._overdue = clock, wall, Overdue(client, deadline, wall)
        # When owners were overruled (monotonic): no host's timeout counts from before that.
        self._overruled: float | None = None
        self._looker, self._is_last = Looker(client, policy, cordoned), is_last
        self._visits: dict[str, _Visit] = {}
        self._attempts: dict[str, _Attempt] = {}
        self._is_mute = False

    def add(self, names: Iterable[str]) -> None:
        """Take on hosts that aren't in the drain yet."""
        for name in names:
            if name not in self._visits:
                self._visits[name] = _Visit(self._clock())

    def drop(self, name: str) -> None:
        """Drop a host from the drain and leave it as it is."""
        self.outcomes[name] = Outcome(name, "skipped", "it is no longer needed")

    @property
    def open_hosts(self) -> list[str]:
        """Return the hosts that are neither empty nor skipped."""
        return [name for name in self._visits if name not in self.outcomes]

    @property
    def pause(self) -> float:
        """Return the seconds until the next turn is due."""
        return max(self._policy.poll_seconds, len(self.open_hosts) / self._policy.looks_per_second)

    def turn(self) -> None:
        """Look once, and act. Raises KubeError: nothing is decided from an incomplete look."""
        if not self._due:
            return  # nobody is asked, so that nothing new is known about the deadline either
        self._overdue.check()
        looks = self._looks()
        if self._overruled is None and not self._overdue.check() and self._overdue.is_unsure:
            looks = self._looks()  # nothing is decided before another answer
            self._overdue.check()
        if self._overruled is None and self._overdue.is_over:
            self._overrule()
            looks = self._looks()
        elsewhere = self._elsewhere(looks)
        if self._policy.whole_gangs and self._policy.mode != "idle-only":
            partners = {name for members in elsewhere.values() for name in members} - self._visits.keys()
            self.add(sorted(partners))
            self.partners |= partners
            if partners:
                return  # their gangs may extend to further hosts
        was_denied = False
        actions = decide(looks, elsewhere, self._policy, self._clock())
        # Evictions come last: they can't be undone, and a denial of anything else may save a gang from them.
        for action in sorted(actions, key=lambda action: action.verb == "evict"):
            if was_denied and action.verb == "evict":
                continue  # the pods may be of a host that the next turn skips, or of its gangs
            try:
                self._do(action, looks[action.host])
            except KubeError as error:
                if not fence.is_denied(error):
                    raise
                # Its next look decides about it and all hosts of its gangs; other hosts may be allowed what it is not.
                self._visits[action.host].denied, self._visits[action.host].due = error.message, 0.0
                was_denied = True

    @property
    def _due(self) -> list[str]:
        return [name for name in self.open_hosts if self._visits[name].due <= self._clock()]

    def _looks(self) -> dict[str, Host]:
        """Return the hosts that are due as they are now."""
        return {name: host for name in self._due if (host := self._look(name)) is not None}

    def _overrule(self) -> None:
        self._overruled, self._looker.overrules = self._clock(), True
        self._policy = self._policy.model_copy(update={"mode": "evict"})
        for visit in self._visits.values():
            visit.fenced = None if visit.fenced is None else max(visit.fenced, self._overruled)

    def release(self) -> None:
        """Remove our cordons from hosts that aren't empty yet: the drain ends here. Raises KubeError."""
        for name in self.open_hosts:
            self._end(Outcome(name, "skipped", self._freed(name, "the drain was interrupted")))

    # -- looking ---------------------------------------------------------------------------------------------------

    def _look(self, name: str) -> Host | None:
        """Return a host as it is now; None if its Node object is gone but may come back."""
        visit, now = self._visits[name], self._clock()
        document = self._looker.node(name, is_cordoned=visit.fenced is not None, since=visit.version)
        if document is None:
            if not visit.node_uid:
                return Host(name, visit.began, obstacle="there is no such node")
            waited = now - (visit.began if visit.fenced is None else visit.fenced)
            is_over = waited >= self._policy.max_wait_seconds
            return Host(name, visit.began, obstacle="its Node object was deleted") if is_over else None
        obstacle = visit.denied or self._settle_cordon(name, visit, document)
        visit.node, visit.node_uid = document, document["metadata"]["uid"]
        tenants = tuple(self._with_attempt(name, t) for t in self._looker.tenants(name, self._wall()))
        visit.idle_since = None if tenants else now if visit.idle_since is None else visit.idle_since
        visit.due = self._settled(visit)
        return Host(name, visit.began, visit.fenced, visit.idle_since, obstacle, tenants)

    def _settled(self, visit: _Visit) -> float:
        """Return when a host without tenants has settled, before which nothing is decided about it; 0 if it is busy."""
        if visit.idle_since is None:
            return 0.0
        since = visit.idle_since if visit.fenced is None else max(visit.idle_since, visit.fenced)
        return since + self._policy.settle_seconds

    def _settle_cordon(self, name: str, visit: _Visit, document: Mapping[str, Any]) -> str:
        """Compare a Node's cordon with what we know of it; return what is in the way.

        A Node that somebody deleted registers again without its cordon, and then gets the same one back.
        """
        record, is_cordoned = fence.record_of(document), fence.is_cordoned(document)
        if record and record.run != self._run:
            return f"it is held by {record.run}"
        if record and visit.fenced is None:
            visit.fenced = self._clock() - max(0.0, self._wall() - record.since)
            if self._overruled is not None:
                visit.fenced = max(visit.fenced, visit.began)
            self._tell(f"{name}: its drain continues")
        visit.record = record or visit.record
        if record and is_cordoned:
            return ""
        is_new = bool(visit.node_uid) and visit.node_uid != document["metadata"]["uid"]
        if visit.record and not is_cordoned and (is_new or self._policy.insist):
            if not is_new:  # that person also meant to remove any cordon from before ours
                visit.record = replace(visit.record, was_unschedulable=False)
            try:
                changed = fence.send(self._client, name, fence.recordon(document, visit.record))
                visit.version = version_of(changed) or REMEMBERED
            except KubeError as error:
                if not fence.is_denied(error):
                    raise
                visit.denied = error.message
                return visit.denied
            visit.idle_since = None  # pods bound before this may not be visible yet
            self._tell(f"{name}: cordoned again")
            return ""
        if record or (visit.record and not is_cordoned):
            return UNCORDONED
        if is_cordoned and not self._policy.take_cordoned:
            return "cordoned by somebody else"
        return ""

    def _with_attempt(self, host: str, tenant: Tenant) -> Tenant:
        attempt, owner = self._attempts.get(tenant.pod.uid), tenant.pod.owner
        if attempt:
            return replace(tenant, refusal=attempt.refusal, blocked=attempt.message)
        # Another pod of its owner was evicted from this host, and this one came afterwards.
        is_back = owner is not None and owner.uid in self._visits[host].evicted_owners
        if is_back and tenant.pod.tolerates_cordons:
            return replace(tenant, refusal="it comes back to this host: it tolerates cordons")
        return tenant

    def _elsewhere(self, hosts: Mapping[str, Host]) -> dict[str, set[str]]:
        """Return where the members of the hosts' gangs run, requested only if it is about to matter."""
        mode = self._policy.mode
        if mode == "idle-only":
            return {}
        tenants = [
            tenant
            for host in hosts.values()
            for tenant in host.tenants
            if tenant.gang and (host.fenced is None or (mode == "evict" and tenant.is_evictable))
        ]
        gangs = {tenant.gang for tenant in tenants}
        spread = self._looker.spread(tenant.pod.namespace for tenant in tenants)
        return {gang: spread.get(gang, set()) for gang in gangs}

    # -- acting ----------------------------------------------------------------------------------------------------

    def _do(self, action: Action, host: Host) -> None:
        match action.verb:
            case "fence":
                self._fence(host.name)
            case "ask":
                self._ask(host, action.tenants)
            case "evict":
                for tenant in action.tenants:
                    self._evict(host.name, tenant)
            case "empty":
                visit = self._visits[host.name]
                if self._is_last and self._looker.tenants(host.name, self._wall(), CURRENT):
                    visit.idle_since, visit.due = None, 0.0
                    return
                self._end(Outcome(host.name, "empty", node=visit.node, evicted=tuple(visit.evicted)))
            case "skip":
                visit = self._visits[host.name]
                is_final = bool(visit.denied) or action.reason == UNCORDONED
                self._post(host.name, "DrainSkipped", f"{action.reason} ({self._run})")
                reason, evicted = self._freed(host.name, action.reason), tuple(visit.evicted)
                self._end(
                    Outcome(host.name, "skipped", reason, host.tenants, evicted=evicted, is_final=is_final)
                )

    def _freed(self, name: str, reason: str) -> str:
        """Remove our cordon from a host; return the reason for that, and why the cordon stays if that is denied."""
        try:
            free(self._client, name, self._run, now=self._wall())
        except KubeError as error:
            if not fence.is_denied(error):
                raise
            return f"{reason}; its cordon stays: {error.message}"
        return reason

    def _end(self, outcome: Outcome) -> None:
        self.outcomes[outcome.host] = outcome
        self._tell(f"{outcome.host}: {outcome.state}{f', {outcome.reason}' if outcome.reason else ''}")

    def _post(self, host: str, reason: str, message: str) -> None:
        """Post an Event on a host whose Node was seen. The drain goes on if that fails, and reports it only once."""
        visit, now = self._visits[host], self._wall()
        if not visit.node_uid:
            return
        since = visit.record.since if visit.record else visit.began
        try:
            event.post(self._client, event.event(host, visit.node_uid, reason, message, now, step=str(since)))
        except KubeError as error:
            if not self._is_mute:
                self._tell(f"{host}: no Event {reason}: {error.message}")
            self._is_mute = True

    def _fence(self, name: str) -> None:
        visit = self._visits[name]
        document = visit.node
        # The patch tests the state that was decided from; if that has changed, the next turn decides again.
        if document is None or fence.record_of(document):
            return
        if fence.is_cordoned(document) and not self._policy.take_cordoned:
            return
        record, patch = fence.cordon(document, self._run, self._wall())
        began = self._clock()
        if changed := fence.send(self._client, name, patch):
            visit.record, visit.fenced, visit.version = record, began, version_of(changed) or REMEMBERED
            visit.due = self._settled(visit)
            self._tell(f"{name}: cordoned")
            self._post(name, "NodeCordoned", f"cordoned, to be drained ({self._run})")

    def _ask(self, host: Host, tenants: Iterable[Tenant]) -> None:
        assert host.fenced is not None
        patience = self._policy.max_wait_seconds
        if self._policy.mode == "evict":
            patience = min(patience, self._policy.checkpoint_seconds)
        now = self._wall()
        by = now + patience - (self._clock() - host.fenced)
        for tenant in tenants:
            ask(self._client, tenant.pod, self._run, by, now)
            self._tell(f"{host.name}: {tenant.pod} was asked to save its work")

    def _evict(self, host: str, tenant: Tenant) -> None:
        pod, now = tenant.pod, self._clock()
        attempt = self._attempts.get(pod.uid)
        if attempt and now < attempt.due:
            return
        reply = evict(self._client, pod)
        due = now + backoff(0, retry_after=reply.retry_seconds, chance=_chance)
        refusal = reply.message if reply.answer is Answer.REFUSED else ""
        self._attempts[pod.uid] = _Attempt(due, reply.message, refusal)
        if reply.answer is Answer.ACCEPTED:
            visit = self._visits[host]
            visit.evicted.append(str(pod))
            if pod.owner:
                visit.evicted_owners.add(pod.owner.uid)
            why = f", {tenant.verdict.reason}" if self._overruled is not None else ""
            self._tell(f"{host}: {pod} is evicted{why}")
            self._post(host, "PodEvicted", f"{pod} is evicted ({self._run}){why}")
        elif reply.message and (attempt is None or attempt.message != reply.message):
            self._tell(f"{host}: {pod} is not evicted: {reply.message}")
