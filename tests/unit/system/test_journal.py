"""A journal of any records: what must last is on disk, and a damaged line is distinguished from a torn one."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from image_builder.errors import ImageBuilderError
from image_builder.strict_yaml import Strict
from image_builder.system.journal import Format, holders, open_journal, read_journal


class Sum(Strict):
    total: int


FORMAT = Format(TypeAdapter(Sum), lambda record: record.total > 1, "full", "damaged", "busy")


def test_records_that_must_last_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    with open_journal(tmp_path / "j", FORMAT) as journal:
        monkeypatch.setattr(os, "fsync", synced.append)
        journal.append(Sum(total=1))
        assert synced == []
        journal.append(Sum(total=2))
        assert len(synced) == 1
    assert read_journal(tmp_path / "j", FORMAT) == [Sum(total=1), Sum(total=2)]


def test_a_record_that_could_not_be_synced_is_not_in_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with open_journal(tmp_path / "j", FORMAT) as journal:
        with monkeypatch.context() as broken:
            broken.setattr(os, "fsync", fail)
            with pytest.raises(OSError, match="Input/output"):
                journal.append(Sum(total=2))
        journal.append(Sum(total=3))
    assert read_journal(tmp_path / "j", FORMAT) == [Sum(total=3)]


def test_a_torn_line_is_taken_away_and_a_damaged_one_has_the_formats_hint(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_bytes(b'{"n":1,"total":1}\n{"n":2,"to')
    with open_journal(path, FORMAT) as journal:
        journal.append(Sum(total=3))
    assert read_journal(path, FORMAT) == [Sum(total=1), Sum(total=3)]
    path.write_bytes(b'{"n":1,"other":1}\n')
    with pytest.raises(ImageBuilderError) as caught:
        read_journal(path, FORMAT)
    assert caught.value.hint == "damaged"


def test_who_waits_is_told_for_whom_and_opens_it_then(tmp_path: Path) -> None:
    path = tmp_path / "j"
    told: list[list[int]] = []
    with ExitStack() as first, ThreadPoolExecutor(1) as pool:
        journal = first.enter_context(open_journal(path, FORMAT))

        def wait() -> tuple[Sum, ...]:
            def let_go(processes: list[int]) -> None:
                told.append(processes)
                journal.append(Sum(total=7))
                first.close()

            with open_journal(path, FORMAT, let_go) as second:
                return second.records

        assert pool.submit(wait).result(timeout=30) == (Sum(total=7),)
    assert told == [[os.getpid()]]
    with open_journal(path, FORMAT), pytest.raises(ImageBuilderError, match="another process writes"):
        open_journal(path, FORMAT).__enter__()


def test_who_writes_a_journal_is_found(tmp_path: Path) -> None:
    with open_journal(tmp_path / "journal", FORMAT) as journal:
        assert holders(journal.path) == [os.getpid()]
    assert holders(tmp_path / "journal") == []
