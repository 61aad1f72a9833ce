"""The journal of publishing: what it keeps, and which process may write to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from image_builder.errors import ImageBuilderError
from image_builder.gallery.journal import (
    Done,
    Failed,
    Finished,
    Intent,
    Opened,
    Record,
    Region,
    journal_of,
    open_journal,
    read_journal,
)

RECORDS: list[Record] = [
    Opened(at=1.0, version="2026.1125.0", sha256="0" * 64, unverified="a fire"),
    Intent(at=2.0, step="disk"),
    Done(at=3.0, step="pages", details={"bytes_sent": 5}),
    Region(at=4.0, name="westus3", state="Completed"),
    Failed(at=5.0, step="version", message="né\n"),
    Finished(at=6.0),
]


def test_a_journal_gives_back_what_was_written(tmp_path: Path) -> None:
    path = journal_of(tmp_path, "nodes", "worker", "6e340b9cffb3")
    assert read_journal(path) == []
    with open_journal(path) as journal:
        for record in RECORDS:
            journal.append(record)
    assert read_journal(path) == RECORDS


def test_one_process_publishes_a_build(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    with (
        open_journal(path),
        pytest.raises(ImageBuilderError, match="another process writes"),
        open_journal(path),
    ):
        pass
