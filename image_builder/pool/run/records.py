"""The records of a journal, one per line. Applied in order, they make the state of a run."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from image_builder.pool.plan.model import Host, Joined, Outcome, Step, Strict
from image_builder.pool.plan.waves import Wave
from image_builder.pool.run.gates import Reading, Verdict


class Emptied(Strict):
    """Details about a host that is emptied.

    ``unit`` are the hosts that share its gangs, including itself, if it is due although it is busy. ``evicted`` are
    pods that its drain evicted, ``gpus`` is the number of GPUs that are idle once it is empty.
    """

    unit: tuple[str, ...] = ()
    evicted: tuple[str, ...] = ()
    gpus: int = 0


class _Record(Strict):
    """``at`` is the time in seconds since 1970, by the clock of the machine that drives the run."""

    at: float


class Opened(_Record):
    """A process opened the journal. ``retry``: hosts that failed before are tried again.

    ``builds`` are the ids of those that hosts of each image are verified against. ``evicts`` is the deadline after
    which a roll evicts jobs, as confirmed by the user who started the process. ``unsent`` are the hosts of a roll that
    were about to get the new image, and for which certainly nothing was sent.
    """

    kind: Literal["opened"] = "opened"
    plan: str
    retry: bool = False
    builds: Mapping[str, str] = Field(default_factory=dict)
    evicts: str = Field(default="", exclude_if=operator.not_)
    unsent: tuple[str, ...] = Field(default=(), exclude_if=operator.not_)


class Changed(_Record):
    """The inventory differs from the plan: hosts that are dropped, have another address, or are new, in separate waves.

    Another machine under a known name is both dropped and new.
    """

    kind: Literal["changed"] = "changed"
    gone: tuple[str, ...] = ()
    updated: tuple[Host, ...] = ()
    new: tuple[Host, ...] = ()
    waves: tuple[Wave, ...] = ()


class Surveyed(_Record):
    """A process of a roll checked all nodes: these hosts can't take a job, for reasons other than the roll."""

    kind: Literal["surveyed"] = "surveyed"
    missing: Mapping[str, str]


class Chosen(_Record):
    """Busy canaries of a roll swap places with idle hosts of the same size, zone and image: busy name -> idle one."""

    kind: Literal["chosen"] = "chosen"
    places: Mapping[str, str]


class Rested(_Record):
    """Hosts that were busy in their waves form a last wave."""

    kind: Literal["rested"] = "rested"
    wave: Wave


class Began(_Record):
    """A wave began."""

    kind: Literal["began"] = "began"
    wave: int


class Intent(_Record):
    """A step is about to start on these hosts. ``delays`` are their join slots, in seconds."""

    kind: Literal["intent"] = "intent"
    step: Step
    hosts: tuple[str, ...]
    delays: Mapping[str, float] = Field(default_factory=dict)


class Result(_Record):
    """A step ended on a host. ``attempt`` counts the intents of that step for that host, from 1."""

    kind: Literal["result"] = "result"
    host: str
    step: Step
    attempt: int
    outcome: Outcome
    joined: Joined = "unknown"
    seconds: float = Field(default=0.0, ge=0)
    phases: Mapping[str, float] = Field(default_factory=dict)
    emptied: Emptied = Field(default=Emptied(), exclude_if=lambda emptied: emptied == Emptied())


class Gated(_Record):
    """The control plane was read, and judged."""

    kind: Literal["gated"] = "gated"
    reading: Reading
    verdict: Verdict
    reasons: tuple[str, ...] = ()


class Passed(_Record):
    """A wave passed: ``stragglers`` are still in progress, and count as failed."""

    kind: Literal["passed"] = "passed"
    wave: int
    failed: int
    stragglers: int = 0


class Stopped(_Record):
    """The run starts nothing more; running steps may finish. ``asked``: a user stopped it."""

    kind: Literal["stopped"] = "stopped"
    reason: str
    asked: bool = Field(default=False, exclude_if=operator.not_)


class Turned(_Record):
    """A stopped roll is undone: scale sets name the previous image again, and these hosts get it back.

    With a ``problem``, some scale sets may still name the new one, and no host gets the previous one back.
    """

    kind: Literal["turned"] = "turned"
    hosts: tuple[str, ...]
    problem: str = Field(default="", exclude_if=operator.not_)


class Unplanned(_Record):
    """The scale sets of a roll that ends have instances which it didn't have among its hosts, such as those that were
    scaled out meanwhile: their ids, and the versions that they run. Of a set that couldn't be read it is its own id,
    without a version.
    """

    kind: Literal["unplanned"] = "unplanned"
    instances: Mapping[str, str]


class Finished(_Record):
    """All waves are over, and every host has its class."""

    kind: Literal["finished"] = "finished"


Record = Annotated[
    Opened
    | Changed
    | Surveyed
    | Chosen
    | Rested
    | Began
    | Intent
    | Result
    | Gated
    | Passed
    | Stopped
    | Turned
    | Unplanned
    | Finished,
    Field(discriminator="kind"),
]
RECORD: TypeAdapter[Record] = TypeAdapter(Record)


def must_last(record: Record) -> bool:
    """Return whether a record has to be on disk before anything else is done.

    A step that isn't idempotent must not begin before its intent is on disk. Everything else is found out again by
    probing the hosts.
    """
    match record:
        case Opened() | Changed() | Chosen() | Rested() | Stopped() | Turned() | Finished():
            return True
        case Intent(step="bootstrap" | "reimage" | "restore"):
            return True
        case _:
            return False
