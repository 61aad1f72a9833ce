"""The journal of publishing one build: which requests were intended, and which were completed.

The service is the source of truth: a resumed run queries it. The journal keeps the version's number and the day its
life began, lets only one process at a time publish a build, and is the account of what was done. It has no secrets.
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
    """A record; ``at`` is its time, in seconds since 1970."""

    at: float


class Opened(_Record):
    """The first record: the build is published as this version; ``sha256`` is the VHD's."""

    kind: Literal["opened"] = "opened"
    version: str
    sha256: str
    unverified: str = ""


class Intent(_Record):
    """A request is about to be sent."""

    kind: Literal["intent"] = "intent"
    step: str


class Done(_Record):
    """A step was completed; ``details`` are figures, such as the bytes sent."""

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
    """The version is in every region, and nothing is left of the upload."""

    kind: Literal["finished"] = "finished"


Record = Annotated[Opened | Intent | Done | Region | Failed | Finished, Field(discriminator="kind")]
Journal = journal.Journal[Record]
_FORMAT: journal.Format[Record] = journal.Format(
    TypeAdapter(Record),
    # Everything else can be queried from the service again.
    lambda record: isinstance(record, Opened | Intent | Finished),
    full="free some space there, then rerun the same command to resume",
    damaged="move it away: what is uploaded and published is recognized by its digest",
    busy="one process publishes a build: wait for it or end it, then rerun the same command",
)


def journal_of(output: Path, gallery: str, definition: str, build: str) -> Path:
    """Return the path of the journal of a build in a gallery's definition."""
    return output / "publish" / gallery / definition / f"{build}.jsonl"


def statement_of(journal: Path) -> Path:
    """Return the path of the signed statement about a build, next to the journal of its publication."""
    return journal.with_suffix(".intoto.json")


def open_journal(
    path: Path, on_wait: Callable[[list[int]], None] | None = None
) -> AbstractContextManager[Journal]:
    """Open a journal for appending; waits and raises as ``system.journal.open_journal`` does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return journal.open_journal(path, _FORMAT, on_wait)


def read_journal(path: Path) -> list[Record]:
    """Return a journal's records, none if it doesn't exist; raises as ``system.journal.read_journal`` does."""
    return journal.read_journal(path, _FORMAT) if path.exists() else []
