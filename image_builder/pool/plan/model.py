"""The data of pools: hosts, their scale sets, shares of them, and outcomes of hosts.

Everything here is frozen and strict: the same models are what a plan and a journal hold as JSON.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from typing import Annotated, Literal, NamedTuple, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from image_builder.definition.connection import Hop

# The one class that a host ends in. `dropped` is a connection that broke after it was made, `bastion` that the way to
# the host is the fault, `failed` a phase on the host that said so itself, `unknown` that nobody can tell whether the
# host joined. `skipped` is a host that stayed busy, or was somebody else's: as it was before, and no failure. `busy` is
# how a step ends, and no host: it is taken later.
Class = Literal[
    "ok",
    "refused",
    "timeout",
    "bastion",
    "auth",
    "host key",
    "sudo",
    "dropped",
    "failed",
    "unknown",
    "skipped",
    "busy",
]
CLASSES: tuple[Class, ...] = tuple(kind for kind in get_args(Class) if kind != "busy")
# What says nothing about the host's own state, so that asking again may be answered otherwise.
UNREACHED: frozenset[Class] = frozenset({"refused", "timeout", "bastion", "dropped"})

# What a run does: bring nodes up; verify those that come up by themselves; verify any; bring running ones to an image.
Mode = Literal["bootstrap", "verify", "check", "roll"]
Step = Literal["probe", "await", "drain", "bootstrap", "reimage", "verify", "free", "restore"]
_BRING_UP: tuple[Step, ...] = ("probe", "bootstrap", "verify")
STEPS: dict[Mode, tuple[Step, ...]] = {
    "bootstrap": _BRING_UP,
    "verify": _BRING_UP,
    "check": _BRING_UP,
    "roll": ("probe", "await", "drain", "reimage", "verify", "free", "restore"),
}
# Whether a host is what the run makes of it, as far as a step could tell: a member of the cluster, or, in a roll, of
# the new image.
Joined = Literal["yes", "no", "unknown"]

_SHARE = re.compile(r"[0-9]+|[0-9]+(?:\.[0-9]+)?%")
_MAX_DETAIL = 500


class Strict(BaseModel):
    """Frozen data that takes no other types and no unknown keys. Written as JSON, tuples are lists."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


def _share(text: str) -> str:
    if not _SHARE.fullmatch(text):
        raise ValueError(f"must be a number of hosts or a percentage, such as 12 or 2.5%, got `{text}`")
    if text.endswith("%") and Fraction(text[:-1]) > 100:
        raise ValueError(f"more than all: `{text}`")
    return text


# A number of hosts (`12`) or a percentage (`2.5%`) of some number of them.
Share = Annotated[str, AfterValidator(_share)]


def at_most(share: Share, total: int) -> int:
    """Return how many of ``total`` hosts a share is, rounded down: what a budget allows."""
    return int(_exact(share, total))


def at_least(share: Share, total: int) -> int:
    """Return how many of ``total`` hosts a share is, rounded up and at least one: what a wave takes."""
    return max(1, math.ceil(_exact(share, total)))


@cache  # a run asks for the same few budgets at every event
def _exact(share: Share, total: int) -> Fraction:
    # Not floating point: 2 % of 600 hosts is 12, not 11.999.
    return Fraction(share[:-1]) / 100 * total if share.endswith("%") else Fraction(share)


class Cell(NamedTuple):
    """What makes hosts alike. A canary stands for one of these."""

    vm_size: str
    zone: str
    image: str


def _is_empty(value: object) -> bool:
    return not value


class Host(Strict):
    """One host, as the inventory has it. ``zone`` is empty where a scale set has no zones.

    ``vm_id`` is Azure's id of the instance: with another one, a host of the same name is another machine. ``user``,
    ``key`` (a private key's file) and ``hops`` are how it is logged in to, where the inventory says so.
    ``scale_set_id`` and ``instance`` are what Resource Manager calls its scale set and its place in it.
    """

    name: str = Field(min_length=1)
    address: str = Field(min_length=1)
    port: int = Field(default=22, ge=1, le=65535)
    pool: str
    scale_set: str
    vm_size: str
    zone: str = ""
    image: str
    vm_id: str = ""
    user: str = Field(default="", exclude_if=_is_empty)
    key: str = Field(default="", exclude_if=_is_empty)
    hops: tuple[Hop, ...] = Field(default=(), exclude_if=_is_empty)
    scale_set_id: str = Field(default="", exclude_if=_is_empty)
    instance: str = Field(default="", exclude_if=_is_empty)

    @property
    def cell(self) -> Cell:
        return Cell(self.vm_size, self.zone, self.image)


class Target(Strict):
    """What a roll brings its hosts to: a version of a gallery's image (its id), and the build that this is.

    ``before`` are the versions that the models of the scale sets name now, by the ids of those: the way back.

    A rollback ``undoes`` a roll: the nodes' marks of that run are its own, and all models go first. ``broken`` are
    hosts that failed in it, and that it left cordoned.

    Any other roll has the version's signed ``statement`` (a DSSE envelope), or the reason to do without: ``unproven``.
    """

    version: str
    build: str
    before: dict[str, str]
    undoes: str = Field(default="", exclude_if=_is_empty)
    broken: tuple[str, ...] = Field(default=(), exclude_if=_is_empty)
    statement: str = Field(default="", exclude_if=_is_empty)
    unproven: str = Field(default="", exclude_if=_is_empty)


class ScaleSet(Strict):
    """A scale set: ``capacity`` hosts are expected (None: unknown), ``hosts`` are listed."""

    name: str
    capacity: int | None = Field(default=None, ge=0)
    hosts: int


class Pool(Strict):
    """A pool is a set of scale sets: InfiniBand spans one placement group, at most 100 machines."""

    name: str
    scale_sets: tuple[ScaleSet, ...]

    @property
    def hosts(self) -> int:
        return sum(s.hosts for s in self.scale_sets)


class Outcome(Strict):
    """How a step ended on a host; of the last step, how the host ended.

    ``phase`` and ``code`` say what failed (only for `failed`): the phase of ``node-agent join``, ``bootstrap`` or
    ``verify``, and the phase's number. ``detail`` is for people, and never part of a comparison.
    """

    kind: Class
    phase: str = ""
    code: int = 0
    detail: Annotated[str, Field(max_length=_MAX_DETAIL)] = ""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.kind == "failed") != bool(self.phase):
            raise ValueError("`failed` has a phase, and nothing else has one")
        return self

    @property
    def ok(self) -> bool:
        return self.kind == "ok"

    @property
    def is_failure(self) -> bool:
        return self.kind not in ("ok", "skipped")

    @property
    def signature(self) -> str:
        """Return what equal failures have in common: ``timeout``, ``failed disk 31``."""
        return f"failed {self.phase} {self.code}" if self.kind == "failed" else self.kind


OK = Outcome(kind="ok")


def failed(phase: str, code: int, detail: str = "") -> Outcome:
    """Return the outcome of a host that says itself what failed."""
    return Outcome(kind="failed", phase=writable(phase), code=code, detail=writable(detail))


def ended(kind: Class, detail: str = "") -> Outcome:
    """Return an outcome of any other class."""
    return Outcome(kind=kind, detail=writable(detail))


def writable(text: str) -> str:
    """Return what a host said as a journal can hold it: not too long, and without halves of characters."""
    return text[:_MAX_DETAIL].encode("utf-8", "replace").decode()


def rank(name: str) -> str:
    """Return a host's place among others, by its name alone: random, yet the same in every plan."""
    return hashlib.sha256(name.encode()).hexdigest()


def quantile(values: Sequence[float], share: float) -> float:
    """Return the nearest-rank quantile of at least one value: 0.95 of 20 values is the 19th."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
