"""A fleet whose jobs take days, in simulated time: the queue is never empty, and no job says when it ends."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from image_builder.pool.plan.model import OK, Host, Step, ended
from image_builder.pool.run.driver import Event, Work
from tests.support.pools.simulated.rolls import BUSY, Fate, Node, World

HOUR = 3600.0
# Hours of a job, and how many of ten jobs take that long.
MIX = ((72.0, 6), (24.0, 3), (4.0, 1))
# Hosts looked at per second under the drain's policy.
_LOOKS = 100.0


@dataclass
class Days(World):
    """``gap`` is the seconds between two jobs of a host that takes pods, ``idle_seconds`` those that hosts had no job
    because of the roll, ``reimaged`` when each host got its image.
    """

    gap: float = 600.0
    seed: int = 1
    since: dict[str, float] = field(default_factory=dict)
    queue: dict[str, Work] = field(default_factory=dict)
    sightings: dict[str, tuple[float, int, Event]] = field(default_factory=dict)
    out: set[str] = field(default_factory=set)
    jobs_begun: Counter[str] = field(default_factory=Counter)
    fenced: int = 0
    idle_seconds: float = 0.0
    reimaged: list[tuple[float, Host]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.drawn = random.Random(self.seed)
        for name, node in self.nodes.items():
            node.busy_until = self.time + self.drawn.random() * self._job(name, 0)
            if self.drawn.random() < self.gap / (self.gap + 50 * HOUR):
                node.busy_until = self.time

    def _job(self, name: str, number: int) -> float:
        """Return how many seconds a host's job takes."""
        drawn = random.Random(f"{self.seed}/{name}/{number}")
        return HOUR * drawn.choices([hours for hours, _ in MIX], [share for _, share in MIX])[0]

    def _check(self) -> None:
        self.most_unavailable = max(self.most_unavailable, len(self.out))
        assert len(self.out) <= self.plan.max_unavailable
        self.most_fenced = max(self.most_fenced, self.fenced)
        assert self.fenced <= self.plan.max_fenced

    def _advance(self, name: str, node: Node) -> None:
        """Start the jobs that a host has had since it was last looked at."""
        while not node.cordoned and self.time >= node.busy_until + self.gap:
            self.jobs_begun[name] += 1
            node.busy_until += self.gap + self._job(name, self.jobs_begun[name])

    def idle(self, cells: Sequence[Sequence[Host]], each: int) -> list[str]:
        for name, node in self.nodes.items():
            self._advance(name, node)
        return super().idle(cells, each)

    def begin(self, step: Step, work: Sequence[Work]) -> None:
        for w in work:
            self._advance(w.host.name, self.nodes[w.host.name])
            if step == "drain":
                self.since.setdefault(w.host.name, self.time)
            elif step == "reimage":
                self.reimaged.append((self.time, w.host))
        super().begin(step, work)

    def _await(self, w: Work, node: Node, _fate: Fate) -> None:
        self.rested.add(w.host.name)
        self.queue[w.host.name] = w
        self._fence()
        if not node.awaited:
            self._sight(w, node)

    def _look(self) -> float:
        """Return the seconds until a host is looked at."""
        return self.drawn.random() * (len(self.queue) + self.fenced) / _LOOKS

    def _sight(self, w: Work, node: Node) -> None:
        """Find when a look falls between two jobs of a host that isn't cordoned."""
        end, look, number = node.busy_until, self._look(), self.jobs_begun[w.host.name]
        while look >= self.gap and end < w.until:
            number += 1
            end, look = end + self.gap + self._job(w.host.name, number), self._look()
        at = max(self.time, end + look)
        outcome = OK if at < w.until else ended("busy", BUSY)
        self._later(min(at, w.until) - self.time, w, "await", outcome)
        self.sightings[w.host.name] = self.last

    def _fence(self) -> None:
        while self.queue and self.fenced < self.plan.max_fenced:
            w = self.queue.pop(next(iter(self.queue)))
            node = self.nodes[w.host.name]
            if sighting := self.sightings.pop(w.host.name, None):
                if (w.host.name, "await", w.attempt) in self.over:
                    continue
                self.void.add(sighting[1])
            self._advance(w.host.name, node)
            node.cordoned, node.awaited = "us", True
            self.since[w.host.name] = self.time
            self.fenced += 1
            at = min(max(self.time, node.busy_until) + self._look(), w.until)
            self._later(at - self.time, w, "await", OK if at < w.until else ended("busy", BUSY))

    def _happen(self, event: Event) -> None:
        node = self.nodes[event.host]
        was_cordoned = node.cordoned == "us"
        if event.step == "await":
            self.sightings.pop(event.host, None)
            self.queue.pop(event.host, None)
            if node.awaited:
                self.fenced -= 1
            self._fence()
        super()._happen(event)
        if event.step == "drain" and event.outcome.ok:
            self.out.add(event.host)
        if was_cordoned and not node.cordoned:
            self.out.discard(event.host)
            since = max(self.since.pop(event.host, self.time), node.busy_until)
            self.idle_seconds += max(0.0, self.time - since)
            node.busy_until = max(node.busy_until, self.time)
