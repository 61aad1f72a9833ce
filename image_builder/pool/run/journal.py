"""The journal of a rollout, next to its plan."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from image_builder.pool.run.records import RECORD, Record, must_last
from image_builder.system import journal
from image_builder.system.journal import in_use

__all__ = [
    "FORMAT",
    "Journal",
    "in_use",
    "journal_of",
    "open_journal",
    "read_journal",
    "real_plan",
    "requests_of",
]

Journal = journal.Journal[Record]
FORMAT: journal.Format[Record] = journal.Format(
    RECORD,
    must_last,
    full="make room there, then image-builder pool resume: hosts told to join are probed first",
    damaged="restore it from a copy, or make a new plan in another file: hosts that joined are recognised",
    busy="a run has one driver: wait for it or end it, then resume",
)


def real_plan(plan: Path) -> Path:
    """Return the plan that the files of its run are next to: the target, if it is a symbolic link.

    If they were named after the link, two processes could drive one run.
    """
    return plan.resolve() if plan.is_symlink() else plan


def journal_of(plan: Path) -> Path:
    """Return the path of the journal of a plan's run, next to the plan."""
    return _beside(plan, "journal")


def requests_of(plan: Path) -> Path:
    """Return the path of the journal of a roll's requests to Azure, next to the run's journal."""
    return _beside(plan, "requests")


def _beside(plan: Path, kind: str) -> Path:
    real = real_plan(plan)
    return real.with_name(f"{real.name}.{kind}.jsonl")


def open_journal(path: Path) -> AbstractContextManager[Journal]:
    """Open a rollout's journal for appending; raises as ``system.journal.open_journal`` does."""
    return journal.open_journal(path, FORMAT)


def read_journal(path: Path) -> list[Record]:
    """Return the records of a rollout's journal; raises as ``system.journal.read_journal`` does."""
    return journal.read_journal(path, FORMAT)
