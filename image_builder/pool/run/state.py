"""The state of a run: of each host, of each wave, and of all of it; ``progress.py`` changes it, and nothing else does.

waiting  to be probed; one that was touched has to be found out first: whether it joined, or which image it runs
probing -> ready  reached, and not a member yet, or of another image
joining -> joined -> verifying
ended    with an outcome
deferred it was busy in its wave, and will be in the last one
gone     no longer in the inventory

Of a roll, in the place of joining:
resting -> awaiting      in the last wave, until it is idle, and ready then
draining -> drained -> reimaging -> joined -> verifying
settled -> freeing       its outcome is known, its cordon has to be taken back
broken -> restoring      it failed in a run that stopped, and gets the image back that it had
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, get_args

from image_builder.pool.plan.model import Cell, Host, Outcome, Step
from image_builder.pool.plan.plan import Plan
from image_builder.pool.plan.waves import Wave
from image_builder.pool.run.gates import Reading, Verdict

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
# A step is begun on hosts of these states, or has to follow before anything is known of them.
IN_WORK: tuple[State, ...] = tuple(s for s in OPEN if s not in ("waiting", "ready", "resting"))
# The state of a host while a step is in work on it.
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

    ``tries`` counts the intents of each step, ``starts`` those of joining, or of a new image, since the journal was
    opened, ``row`` the failures in a row that were no verdict. ``last`` is how the last attempt to join ended, or how
    a host will end that has yet to be freed or restored. ``since`` is when the step in progress was begun, ``delay``
    the join slot before it, ``not_before`` when the next one may be, ``until`` how long the last attempt to join may
    take. ``seconds`` are the last durations of each step, ``phases`` those that the host told. ``restored`` tells of a
    host that failed whether it has its image back; None where nobody tried. ``unsent`` counts the attempts at another
    image of which it is certain that nothing was sent, ``empty`` is a host that has our cordon and nothing to do,
    ``awaited`` one that became idle in the last wave, maybe with our cordon; that wave waits for it until ``idle_by``.
    ``unit`` are the hosts whose gangs it shares: they are drained together or not at all. ``missing`` is one that could
    take no job before a roll.
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
        """Whether it was told to join, or to take another image, in this run."""
        return self.tries["bootstrap"] > 0 or self.tries["reimage"] > self.unsent

    @property
    def verified(self) -> bool:
        """Whether the suite came to a result on it, good or bad."""
        outcome = self.outcome
        return (
            bool(self.tries["verify"]) and outcome is not None and (outcome.ok or outcome.phase == "verify")
        )

    @property
    def unavailable(self) -> bool:
        """Whether it can take no job: empty, touched and not yet fine, or ended in anything but that; or never could.

        A host that is cordoned and has work yet does that.
        """
        if self.state == "gone":
            return False
        if self.state == "ended":
            return self.outcome is None or self.outcome.is_failure or self.missing
        return self.touched or self.empty or self.missing


@dataclass
class WaveStatus:
    """One wave. ``at`` has its hosts by state, in the order in which they came into it; ``unfinished`` counts the open.

    ``sample`` are the hosts to verify, ``not_ready_before`` the nodes that were NotReady when it began.
    """

    wave: Wave
    sample: frozenset[str]
    at: dict[State, dict[str, None]] = field(default_factory=dict)
    began: float | None = None
    passed: float | None = None
    failed: int = 0
    signatures: Counter[str] = field(default_factory=Counter)
    not_ready_before: int = 0
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
        """Its hosts. Who is gone may be another machine by now, in a wave of its own."""
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
    # Of which a host is fine with what the run makes of it.
    proven: set[Cell] = field(default_factory=set)
    # Whether it is known who was missing when this process began, and which canaries are idle.
    surveyed: bool = False
    chosen: bool = False
    next_join: float = 0.0
    reading: Reading | None = None
    verdict: Verdict = "hold"
    reasons: tuple[str, ...] = ()
    read_at: float | None = None
    red_at: float | None = None
    red_since: float | None = None
    stopped: str = ""
    stop_asked: bool = False
    finished: bool = False

    @property
    def open_waves(self) -> list[WaveStatus]:
        """The waves that began and in which a host isn't finished."""
        return [wave for wave in self.waves[: self.began] if wave.unfinished]

    @property
    def current(self) -> WaveStatus | None:
        """The wave that began last."""
        return self.waves[self.began - 1] if self.began else None
