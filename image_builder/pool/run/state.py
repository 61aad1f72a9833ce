"""The state of a run: of each host, of each wave, and overall; it changes only through ``progress.py``.

waiting  to be probed; for one that was touched, to find out first whether it joined or which image it runs
probing -> ready  reached, but not a member yet, or not on the new image yet
joining -> joined -> verifying
ended    with an outcome
deferred was busy in its wave, and will be in the last one
gone     no longer in the inventory

In a roll, instead of joining:
resting -> awaiting      in the last wave, until it is idle, and then ready
draining -> drained -> reimaging -> joined -> verifying
settled -> freeing       its outcome is known, its cordon has to be removed
broken -> restoring      it failed in a run that stopped, and gets its previous image back
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, get_args

from image_builder.pool.plan.model import Cell, Host, Outcome, Step
from image_builder.pool.plan.plan import Plan
from image_builder.pool.plan.waves import Wave
from image_builder.pool.run.gates import Reading, Role, Verdict

State = Literal[
    "waiting",
    "probing",
    "ready",
    "resting",
    "awaiting",
    "draining",
    "drained",
    "joining",
    "reimaging",
    "joined",
    "verifying",
    "settled",
    "freeing",
    "broken",
    "restoring",
    "deferred",
    "ended",
    "gone",
]
_CLOSED = frozenset({"deferred", "ended", "gone"})
OPEN: tuple[State, ...] = tuple(s for s in get_args(State) if s not in _CLOSED)
# On hosts in these states a step has begun, or must follow before anything is known about them.
IN_WORK: tuple[State, ...] = tuple(s for s in OPEN if s not in ("waiting", "ready", "resting"))
# The state of a host while a step runs on it.
RUNNING: dict[Step, State] = {
    "probe": "probing",
    "await": "awaiting",
    "drain": "draining",
    "bootstrap": "joining",
    "reimage": "reimaging",
    "verify": "verifying",
    "free": "freeing",
    "restore": "restoring",
}


@dataclass(slots=True)
class HostStatus:
    """One host.

    ``tries`` counts the intents of each step, ``starts`` those of joining or of a new image since the journal was
    opened, ``row`` the inconclusive failures in a row. ``last`` is how the last attempt to join ended, or how a host
    that has yet to be freed or restored will end. ``since`` is when the step in progress began, ``delay`` the join slot
    before it, ``not_before`` when the next one may begin, ``until`` when the last attempt to join runs out of time.
    ``seconds`` are the last durations of each step, ``phases`` those that the host reported. ``restored`` is whether a
    failed host has its image back; None if that wasn't tried. ``unsent`` counts the attempts at a new image for which
    certainly nothing was sent. ``empty``: it has our cordon and no work. ``awaited``: it became idle in the last wave,
    maybe with our cordon; that wave waits for it until ``idle_by``. ``unit`` are the hosts whose gangs it shares: they
    are drained together or not at all. ``missing``: it couldn't take jobs before a roll.
    """

    host: Host
    wave: int
    state: State = "waiting"
    outcome: Outcome | None = None
    last: Outcome | None = None
    tries: dict[Step, int] = field(default_factory=lambda: dict.fromkeys(RUNNING, 0))
    starts: int = 0
    row: int = 0
    since: float = 0.0
    delay: float = 0.0
    not_before: float = 0.0
    until: float = 0.0
    started: float | None = None
    ended_at: float | None = None
    seconds: dict[Step, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    restored: bool | None = None
    unsent: int = 0
    empty: bool = False
    awaited: bool = False
    idle_by: float = 0.0
    unit: tuple[str, ...] = ()
    missing: bool = False

    @property
    def touched(self) -> bool:
        """Return whether it was told to join, or to take the new image, in this run."""
        return self.tries["bootstrap"] > 0 or self.tries["reimage"] > self.unsent

    @property
    def verified(self) -> bool:
        """Return whether the suite gave a result on it, good or bad."""
        outcome = self.outcome
        return (
            bool(self.tries["verify"]) and outcome is not None and (outcome.ok or outcome.phase == "verify")
        )

    @property
    def unavailable(self) -> bool:
        """Return whether it can't take jobs: it is empty, was touched and isn't fine yet, failed, or never could.

        A cordoned host that still has work is doing that.
        """
        if self.state == "gone":
            return False
        if self.state == "ended":
            return self.outcome is None or self.outcome.is_failure or self.missing
        return self.touched or self.empty or self.missing


@dataclass
class WaveStatus:
    """One wave. ``at`` has its hosts by state, in the order in which they entered it; ``unfinished`` counts open ones.

    ``sample`` are the hosts to verify.
    """

    wave: Wave
    sample: frozenset[str]
    at: dict[State, dict[str, None]] = field(default_factory=dict)
    began: float | None = None
    passed: float | None = None
    failed: int = 0
    signatures: Counter[str] = field(default_factory=Counter)
    unfinished: int = 0

    def add(self, name: str, state: State) -> None:
        self.at.setdefault(state, {})[name] = None
        self.unfinished += state not in _CLOSED

    def remove(self, name: str, state: State) -> None:
        del self.at[state][name]
        self.unfinished -= state not in _CLOSED

    def names(self, *states: State) -> list[str]:
        return [name for state in states for name in self.at.get(state, ())]

    def count(self, *states: State) -> int:
        return sum([len(self.at[state]) for state in states if state in self.at])

    @property
    def present(self) -> list[str]:
        """Return its hosts, except gone ones, whose names may be another machine's by now, in another wave."""
        return [name for state, names in self.at.items() if state != "gone" for name in names]


@dataclass
class Progress:
    """The state of a run."""

    plan: Plan
    hosts: dict[str, HostStatus] = field(default_factory=dict)
    waves: list[WaveStatus] = field(default_factory=list)
    records: int = 0
    opened: int = 0
    began: int = 0
    unavailable: int = 0
    # Unavailable hosts by zone.
    zones: Counter[str] = field(default_factory=Counter)
    failed: int = 0
    signatures: Counter[str] = field(default_factory=Counter)
    # Cells of which at least one host has ended well.
    proven: set[Cell] = field(default_factory=set)
    # Whether the missing hosts are known since this process began, and whether idle canaries have been chosen.
    surveyed: bool = False
    chosen: bool = False
    next_join: float = 0.0
    reading: Reading | None = None
    verdict: Verdict = "hold"
    reasons: tuple[str, ...] = ()
    read_at: float | None = None
    red_at: float | None = None
    red_since: float | None = None
    # When the control plane last couldn't be read, and other nodes that weren't Ready within the gate's patience.
    unread_at: float | None = None
    elsewhere: list[tuple[float, int]] = field(default_factory=list)
    stopped: str = ""
    stop_asked: bool = False
    finished: bool = False

    @property
    def is_unread(self) -> bool:
        """Return whether the control plane can't be read."""
        return bool(self.reading and self.reading.unread)

    def role(self, node: str) -> Role:
        """Return what a node is to this run."""
        status = self.hosts.get(node)
        if status is None or status.state == "gone":
            return "other"
        if status.outcome is not None and status.outcome.ok:
            return "fine"
        return "changing" if status.touched else "other"

    @property
    def open_waves(self) -> list[WaveStatus]:
        """Return the waves that have begun and have unfinished hosts."""
        return [wave for wave in self.waves[: self.began] if wave.unfinished]

    @property
    def current(self) -> WaveStatus | None:
        """Return the wave that began last."""
        return self.waves[self.began - 1] if self.began else None
