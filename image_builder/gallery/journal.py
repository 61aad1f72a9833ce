"""The journal of publishing one build: which requests were intended, and which came to their end.

The truth is the service's: a run that goes on asks it. The journal keeps the version's number and the day that its life
began, lets one process publish a build at a time, and is the account of what was done. No secret is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from image_builder.strict_yaml import Strict
from image_builder.system import journal


class _Record(Strict):
    """``at`` is the moment, in seconds since 1970."""

    at: float


class Opened(_Record):
    """A build is published as this version, by its full id; ``sha256`` is the VHD's. The first record."""

    kind: Literal["opened"] = "opened"
    version: str
    sha256: str
    unverified: str = ""


class Intent(_Record):
    """A request is about to be sent."""

    kind: Literal["intent"] = "intent"
    step: str


class Done(_Record):
    """A step came to its end; ``details`` are figures, such as the bytes sent."""

    kind: Literal["done"] = "done"
    step: str
    details: Mapping[str, Any] = Field(default_factory=dict)


class Region(_Record):
    """The state of a version's replication to a region changed."""

    kind: Literal["region"] = "region"
    name: str
    state: str


class Failed(_Record):
    """The run ended with this error."""

    kind: Literal["failed"] = "failed"
    step: str
    message: str


class Finished(_Record):
    """The version is in every region, and nothing of the upload is left."""

    kind: Literal["finished"] = "finished"


Record = Annotated[Opened | Intent | Done | Region | Failed | Finished, Field(discriminator="kind")]
Journal = journal.Journal[Record]
_FORMAT: journal.Format[Record] = journal.Format(
    TypeAdapter(Record),
    # The rest is found out again by asking the service.
    lambda record: isinstance(record, Opened | Intent | Finished),
    full="free some space there, then rerun the same command to resume",
    damaged="move it away: what is uploaded and published is recognized by its digest",
    busy="one process publishes a build: wait for it or end it, then rerun the same command",
)


def journal_of(output: Path, gallery: str, definition: str, build: str) -> Path:
    """Return where the journal of a build in a gallery's definition is."""
    return output / "publish" / gallery / definition / f"{build}.jsonl"


def statement_of(journal: Path) -> Path:
    """Return where the signed statement about a build is: beside the journal of its publication."""
    return journal.with_suffix(".intoto.json")


def open_journal(
    path: Path, on_wait: Callable[[list[int]], None] | None = None
) -> AbstractContextManager[Journal]:
    """Open a journal to append to it; waits and raises as ``system.journal.open_journal`` does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return journal.open_journal(path, _FORMAT, on_wait)


def read_journal(path: Path) -> list[Record]:
    """Return what a journal says, nothing where there is none; raises as ``system.journal.read_journal`` does."""
    return journal.read_journal(path, _FORMAT) if path.exists() else []
