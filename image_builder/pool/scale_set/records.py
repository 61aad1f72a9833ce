"""The records of requests that replace instances, one per line of a journal.

Each request is recorded before it is sent. A process that continues after another one was killed learns from the
records what may have been sent, and from Azure and the nodes what became of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from image_builder.pool.plan.model import Strict
from image_builder.system import journal

Verb = Literal["upgrade", "reimage", "restart"]
Result = Literal["done", "refused", "not accepted", "failed", "gone", "unknown"]


class _Record(Strict):
    """``at`` is the time in seconds since 1970, by the clock of the machine that drives the scale set."""

    at: float


class Replacement(_Record):
    """An upgrade, a reimage or a restart of an instance is about to be sent.

    ``vm_id`` and ``boot_id`` are those of the machine and its boot before the request; ``version`` (an id) and
    ``build`` are those that it should run.
    """

    kind: Literal["replacement"] = "replacement"
    verb: Verb
    scale_set: str
    instance: str
    vm_id: str
    boot_id: str
    version: str
    build: str


class Accepted(_Record):
    """Azure accepted the last request for an instance; ``operation`` is the address where it reports on progress."""

    kind: Literal["accepted"] = "accepted"
    scale_set: str
    instance: str
    operation: str


class Settled(_Record):
    """What became of the last request for an instance; ``detail`` is Azure's error, if there was one.

    `refused` is Azure's response, `not accepted` is what was found out after none arrived. `unknown` is final as well:
    nothing more is sent to such an instance.
    """

    kind: Literal["settled"] = "settled"
    scale_set: str
    instance: str
    outcome: Result
    detail: str = ""


class Model(_Record):
    """A scale set's model is about to name another version."""

    kind: Literal["model"] = "model"
    scale_set: str
    before: str
    after: str


class Suspension(_Record):
    """A running service of a scale set is about to be suspended; ``over`` is set once it runs again."""

    kind: Literal["suspension"] = "suspension"
    scale_set: str
    service: str
    over: bool = False


Record = Annotated[Replacement | Accepted | Settled | Model | Suspension, Field(discriminator="kind")]
Journal = journal.Journal[Record]
_FORMAT: journal.Format[Record] = journal.Format(
    TypeAdapter(Record),
    # What became of a request can be found out again, but not that it may have been sent.
    lambda record: isinstance(record, Replacement | Model | Suspension),
    full="free some space there, then rerun the same command to resume",
    damaged="restore it from a copy: without it, what was sent to Azure is unknown",
    busy="a run has one driver: wait for it or end it, then rerun the same command",
)


@dataclass(frozen=True)
class Request:
    """A request for an instance, and what the journal says about it."""

    sent: Replacement
    operation: str = ""
    settled: Settled | None = None


def open_journal(path: Path) -> AbstractContextManager[Journal]:
    """Open a journal for appending; raises as ``system.journal.open_journal`` does."""
    return journal.open_journal(path, _FORMAT)


def read_journal(path: Path) -> list[Record]:
    """Return the records of a journal; raises as ``system.journal.read_journal`` does."""
    return journal.read_journal(path, _FORMAT)


def suspended(records: Iterable[Record], scale_set: str) -> set[str]:
    """Return the services of a scale set that were suspended, according to the journal, and haven't been resumed."""
    services: set[str] = set()
    for record in records:
        if isinstance(record, Suspension) and record.scale_set == scale_set:
            (services.discard if record.over else services.add)(record.service)
    return services


def requests(records: Iterable[Record], scale_set: str, instance: str) -> list[Request]:
    """Return the requests for an instance, in order."""
    history: list[Request] = []
    for record in records:
        if isinstance(record, Model | Suspension) or (record.scale_set, record.instance) != (
            scale_set,
            instance,
        ):
            continue
        match record:
            case Replacement():
                history.append(Request(record))
            case Accepted():
                history[-1] = replace(history[-1], operation=record.operation)
            case Settled():
                history[-1] = replace(history[-1], settled=record)
    return history
