"""The journal's bytes: appended, read back, torn at any byte."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from image_builder.errors import ImageBuilderError, SpaceError
from image_builder.pool.plan.model import OK, failed
from image_builder.pool.plan.plan import Plan
from image_builder.pool.run.gates import Reading
from image_builder.pool.run.journal import FORMAT, in_use, journal_of, open_journal, read_journal
from image_builder.pool.run.records import (
    Began,
    Changed,
    Finished,
    Gated,
    Intent,
    Opened,
    Passed,
    Record,
    Result,
    Stopped,
    must_last,
)
from image_builder.system.journal import parse
from tests.support.pools.simulated.rollouts import make, make_hosts

PLAN: Plan = make(9)
RECORDS: list[Record] = [
    Opened(at=1.5, plan="p", retry=True),
    Changed(at=2, gone=("a",), updated=tuple(make_hosts(2)), new=tuple(make_hosts(9)), waves=PLAN.waves),
    Gated(at=3, reading=Reading(requests=3, unread="né\n"), verdict="hold", reasons=("because",)),
    Began(at=4, wave=0),
    Intent(at=5, step="bootstrap", hosts=("a", "b"), delays={"a": 0.0, "b": 0.2}),
    Result(
        at=6,
        host="a",
        step="bootstrap",
        attempt=1,
        outcome=failed("disk", 31, "é\r\n"),
        joined="no",
        seconds=2.5,
        phases={"disk": 1.5},
    ),
    Result(at=6, host="b", step="probe", attempt=2, outcome=OK),
    Passed(at=7, wave=0, failed=1, stragglers=2),
    Stopped(at=8, reason="enough"),
    Finished(at=9),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


def _written(path: Path) -> bytes:
    with open_journal(path) as journal:
        for record in RECORDS:
            journal.append(record)
    return path.read_bytes()


def test_every_record_is_read_back_as_it_was(path: Path) -> None:
    data = _written(path)
    assert read_journal(path) == RECORDS
    assert data.count(b"\n") == len(RECORDS)


def test_what_is_appended_later_goes_on(path: Path) -> None:
    _written(path)
    with open_journal(path) as journal:
        assert list(journal.records) == RECORDS
        journal.append(Finished(at=10))
    assert read_journal(path) == [*RECORDS, Finished(at=10)]


def test_torn_at_any_byte_it_has_what_was_whole(path: Path) -> None:
    data = _written(path)
    ends = [n + 1 for n, byte in enumerate(data) if byte == 10]
    for cut in range(len(data)):
        records, size = parse(data[:cut], "j", FORMAT)
        whole = sum(end <= cut for end in ends)
        assert records == RECORDS[:whole]
        assert size == ([0, *ends])[whole]


@pytest.mark.parametrize("tail", [b"\0" * 40, b"\0" * 40 + b"\n", b'{"n":11,"kind":"fin', b'{"n":11,\0\0}\n'])
def test_a_torn_end_is_taken_away_before_anything_is_appended(path: Path, tail: bytes) -> None:
    data = _written(path)
    path.write_bytes(data + tail)
    with open_journal(path) as journal:
        assert path.read_bytes() == data
        journal.append(Finished(at=10))
    assert read_journal(path)[-1] == Finished(at=10)


@given(st.integers(0, len(RECORDS) - 2), st.data())
def test_damage_before_the_end_is_an_error(number: int, data: st.DataObject) -> None:
    lines = [b'{"n":%d,%s\n' % (n, r.model_dump_json()[1:].encode()) for n, r in enumerate(RECORDS, 1)]
    lines[number] = data.draw(
        st.sampled_from([b"\n", b"{}\n", lines[number + 1], lines[number][:-3] + b"\n"])
    )
    with pytest.raises(ImageBuilderError, match=f"j:{number + 1}: the journal is damaged"):
        parse(b"".join(lines), "j", FORMAT)


def test_a_line_that_is_missing_is_an_error(path: Path) -> None:
    lines = _written(path).splitlines(keepends=True)
    for number in range(len(lines) - 1):
        with pytest.raises(ImageBuilderError, match="damaged"):
            parse(b"".join(lines[:number] + lines[number + 1 :]), "j", FORMAT)
    # The last one may be missing: that is a run that was killed a moment before.
    assert parse(b"".join(lines[:-1]), "j", FORMAT)[0] == RECORDS[:-1]


def test_a_whole_last_line_with_the_wrong_number_is_no_torn_one(path: Path) -> None:
    data = _written(path)
    with pytest.raises(ImageBuilderError, match=":11: the journal is damaged"):
        parse(data + data.splitlines(keepends=True)[-1], "j", FORMAT)


def test_it_has_one_writer(path: Path) -> None:
    with open_journal(path):
        assert in_use(path)
        with pytest.raises(ImageBuilderError, match="another process writes"), open_journal(path):
            pass
        assert read_journal(path) == []
    assert not in_use(path)


def test_who_looks_whether_a_run_goes_on_keeps_nobody_from_starting_it(path: Path) -> None:
    """A look takes a shared lock for a moment: `pool status` during `pool run`."""
    with open_journal(path):
        pass
    fd = os.open(path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    looked = threading.Timer(0.1, os.close, (fd,))
    looked.start()
    with open_journal(path) as journal:
        assert journal.records == ()
    looked.join()


def test_what_could_not_be_written_leaves_no_half_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    with open_journal(path) as journal:
        journal.append(RECORDS[0])
        before = path.read_bytes()

        def full(fd: int, data: bytes) -> int:
            if len(data) < 30:
                raise OSError(28, "No space left on device")
            return write(fd, data[:-20])

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(SpaceError, match=f"no space left: {path}") as caught:
            journal.append(RECORDS[1])
        assert "pool resume" in str(caught.value.hint), "it is not the store that is full"
        monkeypatch.undo()
        assert path.read_bytes() == before
        journal.append(RECORDS[3])
    assert read_journal(path) == [RECORDS[0], RECORDS[3]]


def test_only_an_intent_that_cannot_be_repeated_waits_for_the_disk(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    with open_journal(path) as journal:
        monkeypatch.setattr(os, "fsync", synced.append)
        for record in RECORDS:
            before = len(synced)
            journal.append(record)
            assert (len(synced) > before) == must_last(record)
    assert len(synced) == 5
    assert must_last(RECORDS[4])
    assert not must_last(Intent(at=5, step="probe", hosts=("a",)))
    assert not must_last(Intent(at=5, step="verify", hosts=("a",)))


def test_it_lies_beside_its_plan() -> None:
    assert journal_of(Path("/x/h100.plan.json")) == Path("/x/h100.plan.json.journal.jsonl")
