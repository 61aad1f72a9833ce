"""A fleet in simulated time: thousands of hosts with faults, one clock that jumps to what happens next.

Nothing here waits. The driver is the real one; what it does is recorded, so that a test can compare it with
what it may do. The distribution of durations follows facts about real nodes: half of them join within 30 s,
95 % within 60 s.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, cycle
from typing import Literal

from image_builder.pool.plan.model import OK, Host, Joined, Outcome, Pool, ScaleSet, Step, ended, failed
from image_builder.pool.plan.plan import Plan, PlannedFrom, make_plan
from image_builder.pool.plan.policy import Policy
from image_builder.pool.run.driver import Event, Work, run
from image_builder.pool.run.gates import Reading
from image_builder.pool.run.progress import apply, begin
from image_builder.pool.run.records import Opened, Record
from image_builder.pool.run.state import Progress

START = 1_000_000.0
_MEDIAN, _SIGMA = 30.0, math.log(2) / 1.645

Fate = Literal["well", "hangs before", "hangs after"] | Outcome
# What can be permanently wrong with a host, evenly spread.
FAULTS: tuple[Outcome, ...] = (
    ended("refused"),
    ended("timeout"),
    ended("auth"),
    ended("host key"),
    ended("sudo"),
    failed("image", 11),
    failed("disk", 31),
    failed("disk", 32),
    failed("gpu", 61),
    failed("gpu", 62),
    failed("ready", 91),
    failed("verify", 101),
)


def make_hosts(number_of_hosts: int, cells: int = 8, scale_set: int = 100) -> list[Host]:
    """Return hosts in scale sets of 100, as with InfiniBand, over VM size x zone x image."""
    hosts = []
    for n in range(number_of_hosts):
        number = n // scale_set
        hosts.append(
            Host(
                name=f"gpu-{number:02}-{n:06}",
                address=f"10.{n // 65536}.{n // 256 % 256}.{n % 256}",
                pool="gpu",
                scale_set=f"gpu-{number:02}",
                vm_size=f"size-{number % cells // 4}",
                zone=str(number % 2 + 1),
                image=f"image-{number % 4 // 2}",
            )
        )
    return hosts


def make(number_of_hosts: int, policy: Policy | None = None, pools: Sequence[str] = ("gpu",)) -> Plan:
    """Return the plan of this many hosts; their scale sets belong to the pools in turn."""
    hosts = make_hosts(number_of_hosts)
    sets = Counter(host.scale_set for host in hosts)
    pool_of = dict(zip(sets, cycle(pools), strict=False))
    hosts = [host.model_copy(update={"pool": pool_of[host.scale_set]}) for host in hosts]
    described = [
        Pool(
            name=pool,
            scale_sets=tuple(
                ScaleSet(name=n, capacity=c, hosts=c) for n, c in sets.items() if pool_of[n] == pool
            ),
        )
        for pool in pools
    ]
    return make_plan(PlannedFrom(paths=("hosts.yml",), digest="d"), described, hosts, policy or Policy())


@dataclass
class Faults:
    """What goes wrong. ``token_gap`` is the seconds at the end of each ``token_seconds`` in which tokens are refused.

    ``throttled`` are spans in seconds since the start in which the API servers answer a tenth of requests with 429.
    """

    failures: float = 0.0
    hangs: float = 0.0
    token_seconds: float = 900.0
    token_gap: float = 0.0
    throttled: Sequence[tuple[float, float]] = ()
    fates: dict[str, Fate] = field(default_factory=dict)
    seed: int = 1

    def fate(self, name: str) -> Fate:
        if name in self.fates:
            return self.fates[name]
        drawn = random.Random(f"{self.seed}/{name}")
        chance = drawn.random()
        if chance < self.failures:
            return drawn.choice(FAULTS)
        if chance < self.failures + self.hangs:
            return drawn.choice(["hangs before", "hangs after"])
        return "well"


# With 2.5 % failing, a budget of 2 % would stop the run, as it should.
WIDE = Policy(wave_budget="7%", budget="5%")
BAD_DAY = Faults(failures=0.02, hangs=0.005, token_gap=15.0, throttled=[(3000, 3200)])


@dataclass
class World:
    """The fleet. What happened to it is recorded here as the hosts know it, not as the driver thinks."""

    plan: Plan
    faults: Faults
    time: float = START
    # The number of hosts on which a step can be in work at once, and the number on which each step is.
    places: int = 10**6
    at_work: Counter[Step] = field(default_factory=Counter)
    events: list[tuple[float, int, Event]] = field(default_factory=list)
    order: Iterator[int] = field(default_factory=count)
    joins: Counter[str] = field(default_factory=Counter)
    slots: list[float] = field(default_factory=list)
    slices: list[int] = field(default_factory=list)
    touched: set[str] = field(default_factory=set)
    # When joining ends on a host, which until then only says that it is trying.
    over: dict[str, float] = field(default_factory=dict)
    fine: set[str] = field(default_factory=set)
    # The most hosts at once that were told to join and aren't known to be fine.
    most_unavailable: int = 0
    refused_tokens: int = 0
    red_starts: int = 0
    reading: Reading = field(default_factory=Reading)
    check: Callable[[], None] = lambda: None

    def now(self) -> float:
        return self.time

    def wait(self, until: float) -> Sequence[Event]:
        self.check()
        self.most_unavailable = max(self.most_unavailable, len(self.touched) - len(self.fine))
        if not self.events or self.events[0][0] > until:
            self.time = max(self.time, until)
            return ()
        self.time = max(self.time, self.events[0][0])
        events = []
        while self.events and self.events[0][0] <= self.time:
            event = heapq.heappop(self.events)[2]
            if event.outcome.ok and (event.step == "verify" or self._joined_unsampled(event)):
                self.fine.add(event.host)
            self.at_work[event.step] -= 1
            events.append(event)
        return events

    @cached_property
    def sample(self) -> frozenset[str]:
        return frozenset(name for wave in self.plan.waves for name in wave.verify)

    def _joined_unsampled(self, event: Event) -> bool:
        """Return whether a host was told to join, did, and isn't one of those that the plan verifies."""
        is_told = event.joined == "yes" and event.host in self.touched
        return is_told and event.host in self.plan.host and event.host not in self.sample

    def _later(self, seconds: float, work: Work, step: Step, outcome: Outcome, joined: Joined) -> None:
        event = Event(work.host.name, step, work.attempt, outcome, joined, seconds)
        self.at_work[step] += 1
        heapq.heappush(self.events, (self.time + work.delay + seconds, next(self.order), event))

    def begin(self, step: Step, work: Sequence[Work]) -> None:
        {"probe": self.probe, "bootstrap": self.bootstrap, "verify": self.verify}[step](work)

    def missing(self, _hosts: Sequence[Host]) -> dict[str, str]:
        return {}

    def idle(self, _cells: Sequence[Sequence[Host]], _each: int) -> Collection[str]:
        return ()

    def turn(self) -> str | None:
        return ""

    def probe(self, work: Sequence[Work]) -> None:
        for w in work:
            fate = self.faults.fate(w.host.name)
            joined: Joined = "yes" if self.joins[w.host.name] else "no"
            if isinstance(fate, Outcome) and fate.kind != "failed":
                self._later(10.0 if fate.kind == "timeout" else 0.2, w, "probe", fate, "unknown")
            elif fate in ("hangs before", "hangs after") and w.host.name in self.touched:
                pass  # it stopped answering altogether
            else:
                tries = self.over.get(w.host.name, 0.0) - self.time
                self._later(max(0.3, tries), w, "probe", OK, joined)

    def bootstrap(self, work: Sequence[Work]) -> None:
        self.slices.append(len(work))
        for w in work:
            name, fate = w.host.name, self.faults.fate(w.host.name)
            slot = self.time + w.delay
            self.slots.append(slot)
            self.touched.add(name)
            self.red_starts += self._is_red(self.time)
            drawn = random.Random(f"{self.faults.seed}/{name}/{w.attempt}")
            seconds = _MEDIAN * math.exp(drawn.gauss(0, _SIGMA))
            if fate == "hangs before":
                continue
            if self._token_refused(slot):
                self.refused_tokens += 1
                self._later(3.0, w, "bootstrap", failed("credentials", 71), "no")
            elif isinstance(fate, Outcome) and fate.phase not in ("verify", "ready"):
                self._later(seconds / 2, w, "bootstrap", fate, "no")
            else:
                self.joins[name] += 1
                if isinstance(fate, Outcome) and fate.phase == "ready":
                    self._later(seconds + 60, w, "bootstrap", fate, "yes")
                elif fate != "hangs after":
                    self.over[name] = slot + seconds
                    self._later(seconds, w, "bootstrap", OK, "yes")

    def verify(self, work: Sequence[Work]) -> None:
        for w in work:
            fate = self.faults.fate(w.host.name)
            self._later(8.0, w, "verify", fate if isinstance(fate, Outcome) else OK, "yes")

    def give_up(self, _host: str, _step: Step, _attempt: int) -> Joined:
        return "unknown"

    def conclude(self) -> None:
        pass

    def unplanned(self, _hosts: Sequence[Host]) -> dict[str, str]:
        return {}

    def room(self, step: Step) -> int:
        return self.places - self.at_work[step]

    def gate(self) -> Reading:
        if self._is_red(self.time):
            return self.reading.model_copy(update={"requests": 30_000, "throttled": 3_000})
        return self.reading.model_copy(update={"requests": 30_000})

    def _is_red(self, at: float) -> bool:
        return any(a <= at - START < b for a, b in self.faults.throttled)

    def _token_refused(self, at: float) -> bool:
        gap = self.faults.token_gap
        return bool(gap) and (at - START) % self.faults.token_seconds >= self.faults.token_seconds - gap


def simulate(
    plan: Plan,
    faults: Faults,
    *,
    world: World | None = None,
    stop_asked: Callable[[], bool] = lambda: False,
) -> tuple[Progress, World, list[Record]]:
    """Drive a whole rollout; return its final progress, the fleet, and the records."""
    world = world or World(plan, faults)
    progress = begin(plan)
    records: list[Record] = [Opened(at=world.time, plan=plan.digest)]
    apply(progress, records[0])
    run(progress, world, records.append, stop_asked)
    return progress, world, records
