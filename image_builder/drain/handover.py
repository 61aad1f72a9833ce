"""Waits for busy hosts until each is idle between two jobs, without leaving a host empty while others are awaited.

A scheduler refills a host within a second of its job's end, sooner than anybody sees that it is idle. So the hosts
whose jobs end first are cordoned beforehand: their jobs go on, and none follow. The others are noticed when they are
idle. Once a host is idle, it is no longer awaited, and is left as it is.

A cordoned host that becomes idle stays empty until that is noticed, so these hosts are looked at in a rotation of their
own. The hosts of a gang become idle together: one host of each is looked at in every turn, and all others as soon as
one is idle.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from image_builder.drain import event, fence
from image_builder.drain.gangs import units
from image_builder.drain.observe import Looker
from image_builder.drain.overdue import Overdue
from image_builder.drain.policy import Policy
from image_builder.node.net.kube import Client, KubeError

# One in this many looks is at hosts without our cordon, even if there are too many with it for one turn.
_OTHERS = 5


@dataclass
class _Visit:
    """The result of the last look at a host: when its last job ends (seconds since the epoch), one pod, its cordon."""

    is_known: bool = False
    ends: float = math.inf
    pod: str = ""
    gangs: frozenset[str] = frozenset()
    is_fenced: bool = False
    is_free: bool = False


class Due(NamedTuple):
    """A host to be drained now: it is idle, or the deadline has passed. ``unit``: the hosts that share its gangs."""

    name: str
    unit: tuple[str, ...] = ()


class Handover:
    """Hosts that are awaited; at most ``max_fenced`` of them are cordoned while they work.

    A cordon that somebody else set or removed stays as it is. After ``deadline``, in seconds since the epoch, hosts are
    no longer awaited.
    """

    def __init__(
        self,
        client: Client,
        run: str,
        policy: Policy,
        max_fenced: int,
        *,
        deadline: float = math.inf,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._client, self._run, self._wall = client, run, wall
        self._overdue = Overdue(client, deadline, wall)
        self._max_fenced = 0 if policy.mode == "idle-only" else max_fenced
        self._looker = Looker(client, policy)
        # The number of hosts to look at in one turn.
        self._looks = max(1, round(policy.looks_per_second * policy.poll_seconds))
        # The host that was looked at longest ago comes first.
        self._visits: dict[str, _Visit] = {}
        # Hosts whose cordon the API server denies: they are awaited without one.
        self._denied: set[str] = set()

    def add(self, names: Iterable[str]) -> None:
        """Start waiting for hosts that aren't awaited yet."""
        for name in names:
            self._visits.setdefault(name, _Visit())

    def drop(self, name: str) -> None:
        """Stop waiting for a host and leave it as it is."""
        self._visits.pop(name, None)

    def pod(self, name: str) -> str:
        """Return a pod that runs on an awaited host; empty if the host hasn't been looked at yet."""
        return self._visits[name].pod

    def turn(self) -> Iterator[Due]:
        """Look at as many hosts as are due, yield those that are idle, and cordon those that are next.

        After the deadline, all hosts are due as soon as it is known which share a gang. Raises KubeError.
        """
        self._overdue.check()
        gangs = self._gangs()
        names, looked = deque(self._next(gangs)), set[str]()
        while names:
            name = names.popleft()
            if name in looked or name not in self._visits:
                continue
            looked.add(name)
            visit, before = self._look(name), self._visits.pop(name, _Visit())
            if visit:
                self._visits[name] = visit
                continue
            yield Due(name)
            for gang in before.gangs:
                names.extendleft(gangs.pop(gang, ()))
        # If an earlier driver was killed, its cordons have to be seen first.
        if not all(visit.is_known for visit in self._visits.values()):
            return
        if not self._overdue.check():
            self._fence()
            return
        spread: dict[str, set[str]] = {}
        for name, visit in self._visits.items():
            for gang in visit.gangs:
                spread.setdefault(gang, set()).add(name)
        for unit in units(self._visits, spread):
            for name in sorted(unit):
                yield Due(name, tuple(sorted(unit)) if len(unit) > 1 else ())
        self._visits.clear()

    def _gangs(self) -> dict[str, list[str]]:
        """Return the hosts with our cordon on which each gang was last seen; who was looked at longest ago is first."""
        gangs: dict[str, list[str]] = defaultdict(list)
        for name, visit in self._visits.items():
            if visit.is_fenced:
                for gang in visit.gangs:
                    gangs[gang].append(name)
        return gangs

    def _next(self, gangs: Mapping[str, list[str]]) -> list[str]:
        """Return the hosts to look at in this turn: first one of each gang on several hosts with our cordon, the
        largest first, then those with our cordon, then others; each time who was looked at longest ago.
        """
        sizes = Counter({gang: len(names) for gang, names in gangs.items() if len(names) > 1})
        first = [gangs[gang][0] for gang, _ in sizes.most_common(self._looks // 2)]
        fenced = [name for name, visit in self._visits.items() if visit.is_fenced]
        others = [name for name, visit in self._visits.items() if not visit.is_fenced]
        left = min(len(others), max(1, self._looks // _OTHERS))
        names = list(islice(dict.fromkeys([*first, *fenced]), max(1, self._looks - left)))
        return names + others[: max(left, self._looks - len(names))]

    def _look(self, name: str) -> _Visit | None:
        """Return what a host is working on, None if it is idle or gone."""
        document = self._looker.node(name)
        tenants = self._looker.tenants(name, self._wall())
        if document is None or not tenants:
            return None
        record, is_cordoned = fence.record_of(document), fence.is_cordoned(document)
        return _Visit(
            is_known=True,
            ends=max(math.inf if t.pod.deadline is None else t.pod.deadline for t in tenants),
            pod=str(tenants[0].pod),
            gangs=frozenset(tenant.gang for tenant in tenants if tenant.gang),
            is_fenced=is_cordoned and record is not None and record.run == self._run,
            is_free=not is_cordoned and record is None,
        )

    def _fence(self) -> None:
        """Cordon the hosts whose jobs end first, as many as allowed."""
        room = self._max_fenced - sum(visit.is_fenced for visit in self._visits.values())
        free = [
            (visit.ends, name)
            for name, visit in self._visits.items()
            if visit.is_free and name not in self._denied
        ]
        for _, name in heapq.nsmallest(min(room, self._looks), free):
            document, visit = self._looker.node(name), self._visits[name]
            visit.is_free = False
            if document is None or fence.is_cordoned(document) or fence.record_of(document):
                continue
            record, patch = fence.cordon(document, self._run, self._wall())
            try:
                visit.is_fenced = fence.send(self._client, name, patch) is not None
            except KubeError as error:
                if not fence.is_denied(error):
                    raise
                self._denied.add(name)
                continue
            if visit.is_fenced:
                self._post(document, record)

    def _post(self, document: Mapping[str, Any], record: fence.Record) -> None:
        """Post an Event that says why a host takes no more jobs; the rollout goes on if that fails."""
        name, uid, since = document["metadata"]["name"], document["metadata"]["uid"], record.since
        message = f"cordoned while its jobs go on, to be emptied by {self._run}"
        with suppress(KubeError):
            cordoned = event.event(name, uid, "NodeCordoned", message, since, step=str(since))
            event.post(self._client, cordoned)
