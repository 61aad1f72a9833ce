"""A busy fleet in simulated time that gets another image: jobs, cordons, scale sets, instances.

Nothing here waits. The driver is the real one; what it does to nodes and scale sets is recorded here from their point
of view, and every limit is checked at each moment.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import ceil, inf
from typing import Any, Literal

from image_builder.drain import fence
from image_builder.drain.handover import Handover
from image_builder.drain.ladder import Tenant
from image_builder.drain.pods import Class, Pod, Verdict
from image_builder.node.net.kube import Client
from image_builder.node.net.kubeconfig import Access, Pem
from image_builder.pool.plan.model import OK, Host, Joined, Outcome, Step, ended, failed
from image_builder.pool.plan.plan import Plan
from image_builder.pool.plan.policy import Policy, Roll
from image_builder.pool.run.driver import Event, Work, run
from image_builder.pool.run.gates import Reading
from image_builder.pool.run.progress import apply, begin
from image_builder.pool.run.records import Emptied, Opened, Record
from image_builder.pool.run.state import Progress
from tests.support.pools.simulated.rollouts import START, make

OLD, NEW = "old", "new"
BUSY = "pod train-0 of Job train"
# What a driver may take to release hosts beyond the limits, or, after one was killed, to find out about one.
SOON, MOMENT = 10.0, 60.0
# A request to the API server.
_REQUEST = 0.002
REIMAGE, BOOT = 360.0, 480.0
# The time until a last look finds that a host is in use after all.
LATE = 2000.0
_LONGEST = 100 * 86400.0
# What can go wrong with a host: a new image that never comes, that fails its preflight or its checks, an answer that is
# lost although the request was accepted, a request that is lost, a node that comes back with its old image once, last
# looks after which it is always too late to send anything.
Fate = Literal[
    "well",
    "never back",
    "preflight",
    "checks",
    "answer lost",
    "request lost",
    "old once",
    "foreign cordon",
    "busy late",
    "late looks",
    "disruption budget",
]


@dataclass
class Node:
    """A node as it is: ``busy_until`` is when its job ends, ``cordoned`` by whom, ``awaited`` if while at work."""

    build: str = OLD
    busy_until: float = 0.0
    cordoned: str = ""
    awaited: bool = False
    away: bool = False
    reimages: Counter[str] = field(default_factory=Counter)


class Cluster(Client):
    """The API server as a driver sees it that awaits hosts: Nodes, whether they are at work, and changed cordons.

    ``seconds`` is how long the requests of the driver's thread have taken since the world's time, ``changes`` counts
    its patches.
    """

    def __init__(self, world: World) -> None:
        super().__init__(Access("https://simulated", Pem(text="")))
        self.world, self.seconds, self.changes = world, 0.0, 0

    def now(self) -> float:
        return self.world.time + self.seconds

    def node(self, name: str, **_: object) -> dict[str, Any]:
        self.seconds += _REQUEST
        node = self.world.nodes[name]
        marks = {"a": "b"}
        if node.cordoned == "us":
            marks[fence.CORDON] = fence.Record(self.world.plan.run, START).text()
        spec = {"unschedulable": True} if node.cordoned else {}
        return {"metadata": {"name": name, "uid": name, "annotations": marks}, "spec": spec}

    def tenants(self, name: str, _now: float) -> tuple[Tenant, ...]:
        self.seconds += _REQUEST
        if self.world.nodes[name].busy_until <= self.now():
            return ()
        gang = f"work/Job {self.world.gangs[name][0]}" if name in self.world.gangs else ""
        return (Tenant(_POD, Verdict(Class.WAIT, "has GPUs"), gang),)

    def request(self, method: str, path: str, _body: Any = None, _type: str = "") -> dict[str, Any]:
        self.seconds += _REQUEST
        if method == "PATCH":
            self.changes += 1
            node = self.world.nodes[path.rpartition("/")[2]]
            assert not node.cordoned
            node.cordoned, node.awaited = "us", True
        return {"metadata": {}}


_POD = Pod("train", "train-0", "uid", "", None, {}, {})


@dataclass
class World:
    """The fleet and its scale sets. ``lost`` are jobs that were running when their node was reimaged.

    ``gangs`` are the hosts that each host's job runs on, ``evicted`` those whose job was evicted, and when.
    """

    plan: Plan
    fates: dict[str, Fate] = field(default_factory=dict)
    jobs: Callable[[str], float] = lambda _: 0.0
    time: float = START
    nodes: dict[str, Node] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)
    events: list[tuple[float, int, Event]] = field(default_factory=list)
    over: set[tuple[str, Step, int]] = field(default_factory=set)
    # The numbers of events that don't happen.
    void: set[int] = field(default_factory=set)
    order: Iterator[int] = field(default_factory=count)
    is_red: Callable[[], bool] = lambda: False
    # When the API server is away, which nodes of others aren't Ready, and how long requests have been pending.
    outage: tuple[float, float] = (0.0, 0.0)
    foreign: Callable[[], int] = lambda: 0
    pending: Callable[[], Sequence[float]] = lambda: ()
    not_ready: set[str] = field(default_factory=set)
    cordoned_before: set[str] = field(default_factory=set)
    missing_before: set[str] = field(default_factory=set)
    surveyed_at: float = 0.0
    lost: list[str] = field(default_factory=list)
    gangs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    evicted: dict[str, float] = field(default_factory=dict)
    together: set[str] = field(default_factory=set)
    turned_at: float | None = None
    azure_away_until: float = 0.0
    concluded_at: float | None = None
    scaled_out: dict[str, str] = field(default_factory=dict)
    most_unavailable: int = 0
    most_fenced: int = 0
    # For how long more hosts were empty at most than may be away, and since when.
    longest_over: float = 0.0
    over_since: float | None = None
    rested: set[str] = field(default_factory=set)
    # Hosts of the last wave, as the driver's thread waits for them; when its next turn is, if any is due.
    awaited: dict[str, Work] = field(default_factory=dict)
    turn_at: float = inf
    log: list[tuple[float, str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for host in self.plan.hosts:
            self.nodes[host.name] = Node(busy_until=START + self.jobs(host.name))
            self.models[host.scale_set] = OLD
            if self.fates.get(host.name) == "foreign cordon":
                self.nodes[host.name].cordoned = "somebody"
        self.kill()

    def kill(self) -> None:
        """End the driver: what it started goes on; what it waits for reaches no driver."""
        self.events.clear()
        self.awaited.clear()
        # Nodes become Ready without a driver.
        self.not_ready = {name for name in self.not_ready if self.nodes[name].away}
        self.turn_at = inf
        self.cluster = Cluster(self)
        self.handover = Handover(
            self.cluster,
            self.plan.run,
            self.roll.drain,
            self.plan.max_fenced,
            deadline=self.roll.deadline_at,
            wall=self.cluster.now,
        )
        self.handover._looker = self.cluster  # type: ignore[assignment]

    @property
    def roll(self) -> Roll:
        return self.plan.policy.rolls or Roll()

    def now(self) -> float:
        return self.time

    def missing(self, _hosts: Sequence[Host]) -> dict[str, str] | None:
        if self.time < self.surveyed_at:
            return None
        held = {name for name, node in self.nodes.items() if node.cordoned == "us"}
        return dict.fromkeys(self.missing_before - held, "NotReady")

    def idle(self, cells: Sequence[Sequence[Host]], each: int) -> list[str]:
        idle = []
        for hosts in cells:
            nodes = [(host.name, self.nodes[host.name]) for host in hosts]
            names = [name for name, node in nodes if node.busy_until <= self.time and not node.cordoned]
            idle += names[:each]
        return idle

    def room(self, _step: Step) -> int:
        return 10**6

    def gate(self) -> Reading:
        if self._returns_at(self.time) > self.time:
            return Reading(unread="connection refused")
        throttled = 3_000 if self.is_red() else 0
        foreign = [f"other-{number}" for number in range(self.foreign())]
        return Reading(
            requests=30_000,
            throttled=throttled,
            fallen=(*self.not_ready, *foreign),
            nodes=len(self.nodes) + len(foreign),
            pending=tuple(self.pending()),
        )

    def _returns_at(self, at: float) -> float:
        """Return when the API server answers, asked at this time."""
        begins, ends = self.outage
        return ends if begins <= at < ends else at

    def wait(self, until: float) -> Sequence[Event]:
        self._check()
        first = self.events[0][0] if self.events else inf
        if self.turn_at <= min(until, first):
            self.time = max(self.time, self.turn_at)
            self._turn()
            return ()
        if first > until:
            self.time = max(self.time, until)
            return ()
        self.time = max(self.time, self.events[0][0])
        events = []
        while self.events and self.events[0][0] <= self.time:
            _, number, event = heapq.heappop(self.events)
            if number not in self.void and (event.host, event.step, event.attempt) not in self.over:
                self._happen(event)
                events.append(event)
        return events

    def _check(self) -> None:
        """Check the limits: hosts that are empty and cordoned by us, or away, in total and in each zone.

        A host of the last wave that becomes empty beyond the limits is released at once. A host that was cordoned
        before the run counts as away even before it is in work.
        """
        assert self.time < START + _LONGEST, "it never ends"
        away, emptied = list[str](), list[str]()
        for name, node in self.nodes.items():
            is_empty = node.cordoned == "us" and node.busy_until <= self.time
            if name in self.missing_before:
                away.append(name)
            elif is_empty and node.awaited:
                emptied.append(name)
                assert self.time - node.busy_until < MOMENT, name
            elif node.away or (is_empty and (node.reimages or name not in self.cordoned_before)):
                away.append(name)
        is_over = len(away) + len(emptied) > self.plan.max_unavailable
        self.over_since = (self.time if self.over_since is None else self.over_since) if is_over else None
        if self.over_since is not None:
            self.longest_over = max(self.longest_over, self.time - self.over_since)
        fenced = sum([node.awaited and node.busy_until > self.time for node in self.nodes.values()])
        self.most_fenced = max(self.most_fenced, fenced)
        assert fenced <= self.plan.max_fenced
        self.most_unavailable = max(self.most_unavailable, len(away))
        assert len(away) <= self.plan.max_unavailable, away
        zones = Counter(host.zone for host in self.plan.hosts)
        for zone, number in Counter(self.plan.host[n].zone for n in away).items():
            assert number <= max(1, zones[zone] // 2), zone

    def _later(
        self,
        seconds: float,
        w: Work,
        step: Step,
        outcome: Outcome,
        joined: Joined = "unknown",
        emptied: Emptied = Emptied(),  # noqa: B008 (it never changes)
    ) -> None:
        event = Event(w.host.name, step, w.attempt, outcome, joined, seconds, emptied=emptied)
        ends = self.time + seconds
        if step != "probe":
            # Nothing is drained, joins or takes pods again without an API server.
            ends = max(ends, self._returns_at(ends) + 1.0) if self._returns_at(ends) > ends else ends
        self.last = (ends, next(self.order), event)
        heapq.heappush(self.events, self.last)

    def _happen(self, event: Event) -> None:
        node = self.nodes[event.host]
        if event.step in ("reimage", "restore") and not node.away:
            self.not_ready.discard(event.host)
        is_let_go = event.step == "free" or (event.step == "drain" and event.outcome.kind == "busy")
        if is_let_go and node.cordoned == "us":
            node.cordoned = ""
        if event.step in ("free", "restore"):
            node.awaited = False

    def begin(self, step: Step, work: Sequence[Work]) -> None:
        self.together = {w.host.name for w in work}
        for w in work:
            self.log.append((self.time, step, w.host.name))
            getattr(self, f"_{step}")(w, self.nodes[w.host.name], self.fates.get(w.host.name, "well"))

    def turn(self) -> str | None:
        if self.azure_away_until == inf:
            return "no answer"
        if self.time < self.azure_away_until:
            return None
        self.turned_at = self.time
        self.models = dict.fromkeys(self.models, OLD)
        return ""

    def conclude(self) -> None:
        self.concluded_at = self.time

    def unplanned(self, hosts: Sequence[Host]) -> dict[str, str]:
        assert {host.name for host in hosts} <= self.nodes.keys()
        return self.scaled_out

    def give_up(self, host: str, step: Step, attempt: int) -> Joined:
        self.over.add((host, step, attempt))
        is_unsent = step == "reimage" and not self.nodes[host].reimages.total()
        return "no" if is_unsent else "unknown"

    def _await(self, w: Work, _node: Node, _fate: Fate) -> None:
        """Wait for a host; the drains' thread does, with what the driver has for that."""
        self.rested.add(w.host.name)
        self.awaited[w.host.name] = w
        self.handover.add([w.host.name])
        self.turn_at = min(self.turn_at, self.time + self.roll.drain.poll_seconds)

    def _turn(self) -> None:
        """Let the driver look at awaited hosts, and report what it finds, as ``steps.drains`` does."""
        self.cluster.seconds = 0.0
        before = self.cluster.changes
        due = 0
        for name, unit in self.handover.turn():
            due += 1
            w = self.awaited.pop(name)
            # The driver takes what has been reported meanwhile all at once.
            seconds = ceil(self.cluster.seconds * 5) / 5
            self._later(seconds, w, "await", OK, emptied=Emptied(unit=unit))
        for name, w in list(self.awaited.items()):
            if w.until <= self.time:
                assert self.handover.pod(name) == str(_POD)
                self.handover.drop(name)
                del self.awaited[name]
                self._later(self.cluster.seconds, w, "await", ended("busy", BUSY))
        self.turn_at = self._next_turn(is_quiet=not due and self.cluster.changes == before)

    def _next_turn(self, *, is_quiet: bool) -> float:
        """Return when the next turn is: those in which nothing can be seen or done are left out."""
        soon = self.time + max(self.roll.drain.poll_seconds, self.cluster.seconds)
        ends = [min(self.nodes[name].busy_until, w.until) for name, w in self.awaited.items()]
        if not ends:
            return inf
        is_known = all(visit.is_known for visit in self.handover._visits.values())
        if not is_quiet or not is_known:
            return soon
        deadline = self.roll.deadline_at
        return max(soon, min([*ends, *([deadline] if deadline > self.time else [])]))

    def _probe(self, w: Work, node: Node, _fate: Fate) -> None:
        if node.away:
            self._later(10.0, w, "probe", ended("timeout"))
        else:
            self._later(0.3, w, "probe", OK, "yes" if node.build == NEW else "no")

    def _drain(self, w: Work, node: Node, fate: Fate) -> None:
        if fate == "foreign cordon":
            self._later(0.1, w, "drain", ended("skipped", "cordoned by somebody else"))
            return
        node.cordoned, node.awaited = "us", False
        is_over = self.time >= self.roll.deadline_at
        # A host that was idle in the last wave isn't waited for again.
        patience = 0.0 if w.host.name in self.rested and not is_over else self.roll.drain.max_wait_seconds
        due = max(self.time, self.roll.deadline_at)
        is_whole = {*self.gangs.get(w.host.name, ())} <= self.together
        evicted: tuple[str, ...] = ()
        if node.busy_until > due and due - self.time <= patience and is_whole and fate != "disruption budget":
            node.busy_until = self.evicted[w.host.name] = due
            evicted = (BUSY,)
        remaining = max(0.0, node.busy_until - self.time)
        if remaining > patience:
            self._later(patience, w, "drain", ended("busy", BUSY))
        else:
            self._later(remaining + 1.0, w, "drain", OK, emptied=Emptied(evicted=evicted, gpus=8))

    def _reimage(self, w: Work, node: Node, fate: Fate) -> None:
        assert node.cordoned == "us" and self.turned_at is None
        if fate == "request lost" and node.reimages[NEW] == 0 and w.attempt == 1:
            self._later(30.0, w, "reimage", ended("timeout", "no answer"), "no")
            return
        if fate == "busy late":
            self._later(LATE, w, "reimage", ended("busy", "a pod runs on it"), "no")
            return
        if fate == "late looks":
            return
        self.models[w.host.scale_set] = NEW
        self._replace(w, node, NEW)
        took = REIMAGE + BOOT
        match fate:
            case "never back":
                node.away = True
            case "answer lost":
                self._later(60.0, w, "reimage", ended("unknown", "the answer was lost"))
            case "old once" if node.reimages[NEW] == 1:
                node.build = OLD
                self._later(took, w, "reimage", ended("unknown", "it runs the previous build"))
            case "preflight":
                self._later(took, w, "reimage", failed("preflight", 61, "a GPU has ECC errors"))
            case _:
                self._later(took, w, "reimage", OK, "yes")

    def _replace(self, w: Work, node: Node, build: str) -> None:
        if node.busy_until > self.time:
            self.lost.append(w.host.name)
        self.not_ready.add(w.host.name)
        node.build = build
        node.reimages[build] += 1

    def _verify(self, w: Work, node: Node, fate: Fate) -> None:
        bad = fate == "checks" and node.build == NEW
        self._later(20.0, w, "verify", failed("verify", 101, "test_gpu") if bad else OK)

    def _free(self, w: Work, _node: Node, _fate: Fate) -> None:
        self.handover.drop(w.host.name)
        self.awaited.pop(w.host.name, None)
        self._later(0.2, w, "free", OK)

    def _restore(self, w: Work, node: Node, fate: Fate) -> None:
        assert set(self.models.values()) == {OLD}, "no host goes back before its scale set"
        # A driver that was killed meanwhile has its request in its journal: the next one waits for the result.
        if not node.reimages[OLD]:
            self._replace(w, node, OLD)
        if fate != "never back":
            node.cordoned = ""
            self._later(REIMAGE + BOOT, w, "restore", OK)
        else:
            self._later(REIMAGE + BOOT, w, "restore", ended("timeout"))


def plan(hosts: int, **policy: object) -> Plan:
    """Return the plan of a roll over this many hosts."""
    rolled = {"mode": "roll", **policy}
    own = {name: rolled.pop(name) for name in Roll.model_fields if name in rolled}
    if own:
        rolled["roll"] = Roll.model_validate(own)
    return make(hosts, Policy.model_validate(rolled))


def mixed_jobs(seed: int, longest: float) -> Callable[[str], float]:
    """Return how much longer each host's job lasts: one of ten hosts is idle, the others are somewhere in a job."""

    def rest(name: str) -> float:
        drawn = random.Random(f"{seed}/{name}")
        return 0.0 if drawn.random() < 0.1 else drawn.random() * longest

    return rest


def roll(world: World, stop_asked: Callable[[], bool] = lambda: False) -> tuple[Progress, list[Record]]:
    """Drive a roll to its end; return its progress and the records."""
    progress = begin(world.plan)
    records: list[Record] = [Opened(at=world.time, plan=world.plan.digest)]
    apply(progress, records[0])
    run(progress, world, records.append, stop_asked)
    return progress, records


def check_end(world: World, progress: Progress) -> None:
    """Check what must hold after every end: no job lost, no cordon of ours except on hosts that failed."""
    assert world.lost == []
    for name, node in world.nodes.items():
        status = progress.hosts[name]
        assert node.reimages[NEW] <= 1 + progress.plan.policy.retries and node.reimages[OLD] <= 1
        if node.cordoned == "us":
            assert status.outcome and status.outcome.is_failure and status.touched and not status.restored
        if status.outcome and status.outcome.ok:
            assert node.build == NEW and not node.cordoned
        if world.fates.get(name) == "foreign cordon":
            assert node.cordoned == "somebody" and node.build == OLD
