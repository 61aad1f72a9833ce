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

# The one class that a host ends in. `dropped`: the connection broke after it was established. `bastion`: the fault is
# on the way to the host. `failed`: the host itself reported a failed phase. `unknown`: it can't be determined whether
# the host joined. `skipped`: the host stayed busy, or was taken out of service by somebody else; it is left as it was,
# and isn't a failure. `busy` is how a step ends, never a host, which is taken later.
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
# Classes that say nothing about the host's own state, so that a retry may end differently.
UNREACHED: frozenset[Class] = frozenset({"refused", "timeout", "bastion", "dropped"})

# What a run does: bring nodes up; verify nodes that come up by themselves; verify any nodes; roll out an image to
# running nodes.
Mode = Literal["bootstrap", "verify", "check", "roll"]
Step = Literal["probe", "await", "drain", "bootstrap", "reimage", "verify", "free", "restore"]
_BRING_UP: tuple[Step, ...] = ("probe", "bootstrap", "verify")
STEPS: dict[Mode, tuple[Step, ...]] = {
    "bootstrap": _BRING_UP,
    "verify": _BRING_UP,
    "check": _BRING_UP,
    "roll": ("probe", "await", "drain", "reimage", "verify", "free", "restore"),
}
# Whether a host is in the run's target state, as far as a step could tell: it is a member of the cluster or, in a
# roll, runs the new image.
Joined = Literal["yes", "no", "unknown"]

_SHARE = re.compile(r"[0-9]+|[0-9]+(?:\.[0-9]+)?%")
_MAX_DETAIL = 500


class Strict(BaseModel):
    """Frozen data that neither converts types nor accepts unknown keys. In JSON, tuples are lists."""

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
    """Return a share of ``total`` hosts as a number, rounded down: what a budget allows."""
    return int(_exact(share, total))


def at_least(share: Share, total: int) -> int:
    """Return a share of ``total`` hosts as a number, rounded up and at least one: the size of a wave."""
    return max(1, math.ceil(_exact(share, total)))


@cache  # a run asks for the same few budgets at every event
def _exact(share: Share, total: int) -> Fraction:
    # Not floating point: 2 % of 600 hosts is 12, not 11.999.
    return Fraction(share[:-1]) / 100 * total if share.endswith("%") else Fraction(share)


class Cell(NamedTuple):
    """What similar hosts have in common. A canary represents one cell."""

    vm_size: str
    zone: str
    image: str


def _is_empty(value: object) -> bool:
    return not value


class Host(Strict):
    """One host, as the inventory describes it. ``zone`` is empty if its scale set has no zones.

    ``vm_id`` is Azure's id of the instance: a host of the same name with a different one is a different machine.
    ``user``, ``key`` (a private key file) and ``hops`` are how to log in to it, if the inventory says so.
    ``scale_set_id`` and ``instance`` identify its scale set and its instance in Resource Manager.
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
    """What a roll brings its hosts to: a gallery image version (its id), and the build that it contains.

    ``before`` are the versions that the models of the scale sets name now, by scale set id: the way back.

    A rollback ``undoes`` a roll: it takes over that run's marks on the nodes, and changes all models first. ``broken``
    are hosts that failed in that roll and were left cordoned.

    Any other roll has the version's signed ``statement`` (a DSSE envelope), or the reason for doing without:
    ``unproven``.
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
    """A set of scale sets, since InfiniBand spans only one placement group of at most 100 machines."""

    name: str
    scale_sets: tuple[ScaleSet, ...]

    @property
    def hosts(self) -> int:
        return sum(s.hosts for s in self.scale_sets)


class Outcome(Strict):
    """How a step ended on a host; for the last step, how the host ended.

    ``phase`` and ``code`` say what failed (only for `failed`): the phase of ``node-agent join``, or a step such as
    ``bootstrap`` or ``verify``, and its number for the failure. ``detail`` is for people, and is never compared.
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
        """Return what identical failures have in common: ``timeout``, ``failed disk 31``."""
        return f"failed {self.phase} {self.code}" if self.kind == "failed" else self.kind


OK = Outcome(kind="ok")


def failed(phase: str, code: int, detail: str = "") -> Outcome:
    """Return the outcome of a failed phase or step."""
    return Outcome(kind="failed", phase=writable(phase), code=code, detail=writable(detail))


def ended(kind: Class, detail: str = "") -> Outcome:
    """Return an outcome of any other class."""
    return Outcome(kind=kind, detail=writable(detail))


def writable(text: str) -> str:
    """Return a host's text in a form that a journal can hold: not too long, and without lone surrogates."""
    return text[:_MAX_DETAIL].encode("utf-8", "replace").decode()


def rank(name: str) -> str:
    """Return a sort key for a host, derived only from its name: random, yet the same in every plan."""
    return hashlib.sha256(name.encode()).hexdigest()


def quantile(values: Sequence[float], share: float) -> float:
    """Return the nearest-rank quantile of at least one value: 0.95 of 20 values is the 19th."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
