"""A journal: JSON lines that are only ever appended, by one process at a time.

Each line is a record with its number. A process that is killed leaves a torn last line at worst, which the next
one removes; a line that is missing or damaged anywhere else is an error, since what follows can't be trusted.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from image_builder.errors import ImageBuilderError, SpaceError
from image_builder.node import files

# A process that only looks at a lock holds it for a few microseconds.
_LOOK_SECONDS = 0.5
_LOCKS = Path("/proc/locks")

R = TypeVar("R", bound=BaseModel)


@dataclass(frozen=True)
class Format(Generic[R]):
    """The records of a kind of journal: how a line is read, and which must be on the disk before work goes on.

    ``full``, ``damaged`` and ``busy`` are the hints for a full disk, a line that isn't a record, and a journal that
    another process is writing.
    """

    record: TypeAdapter[R]
    must_last: Callable[[R], bool]
    full: str
    damaged: str
    busy: str


@dataclass
class Journal(Generic[R]):
    """An open journal. ``records`` are those that it had when it was opened."""

    path: Path
    records: tuple[R, ...]
    _format: Format[R] = field(repr=False)
    _fd: int = field(repr=False)
    _next: int = field(repr=False)
    _size: int = field(repr=False)

    def append(self, record: R) -> None:
        """Write a record, durably if it must last. Raises SpaceError or OSError; the journal is then as before."""
        line = _line(self._next, record)
        try:
            _write(self._fd, line)
            if self._format.must_last(record):
                os.fsync(self._fd)
        except OSError as error:
            os.ftruncate(self._fd, self._size)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise SpaceError(f"no space left: {self.path}", hint=self._format.full) from error
            raise
        self._next += 1
        self._size += len(line)


@contextmanager
def open_journal(
    path: Path, format: Format[R], on_wait: Callable[[list[int]], None] | None = None
) -> Iterator[Journal[R]]:
    """Open a journal for appending, creating it if needed; no other process can until the block ends.

    If another process has it open, ``on_wait`` is called with the holders that can be seen, and the journal is opened
    once they release it; without ``on_wait``, that is an error. Raises ImageBuilderError for that error or a damaged
    line, and OSError.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        if not _lock(fd):
            if on_wait is None:
                raise ImageBuilderError(f"another process writes {path}", hint=format.busy)
            on_wait(holders(path))
            fcntl.flock(fd, fcntl.LOCK_EX)
        data = _read(fd)
        records, size = parse(data, str(path), format)
        if size < len(data):
            os.ftruncate(fd, size)
        os.fsync(fd)
        files.sync_directory(path.absolute().parent)
        yield Journal(path, tuple(records), format, fd, len(records) + 1, size)
    finally:
        os.close(fd)


def read_journal(path: Path, format: Format[R]) -> list[R]:
    """Return the records of a journal, whose run may still be going on. Raises ImageBuilderError, OSError."""
    return parse(path.read_bytes(), str(path), format)[0]


def in_use(path: Path) -> bool:
    """Return whether a process holds the lock of a journal, or of a slice's directory. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(fd)


def parse(data: bytes, where: str, format: Format[R]) -> tuple[list[R], int]:
    """Return the records in a journal's bytes, and their size in bytes; a torn last line is left out.

    Raises ImageBuilderError for any other line that isn't a record, or isn't the next one.
    """
    records: list[R] = []
    size = 0
    lines = data.splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        record = _record(line, number, format)
        if record is None:
            if number == len(lines) and _is_torn(line):
                break
            raise ImageBuilderError(
                f"{where}:{number}: the journal is damaged: this is not record number {number}",
                hint=format.damaged,
            )
        records.append(record)
        size += len(line)
    return records, size


def _record(line: bytes, number: int, format: Format[R]) -> R | None:
    prefix = b'{"n":%d,' % number
    if not line.startswith(prefix) or not line.endswith(b"\n"):
        return None
    try:
        return format.record.validate_json(b"{" + line[len(prefix) :])
    except ValidationError:
        return None


def _is_torn(line: bytes) -> bool:
    """Return whether a line is incomplete. After a power cut it can be partly zeros and still end in a line break."""
    try:
        json.loads(line)
    except ValueError:
        return True
    return not line.endswith(b"\n")


def _line(number: int, record: BaseModel) -> bytes:
    content = record.model_dump_json()
    return f'{{"n":{number},{content[1:]}\n'.encode()


def _write(fd: int, line: bytes) -> None:
    # A full disk takes what fits, and reports an error only on the next write.
    while line:
        line = line[os.write(fd, line) :]


def _read(fd: int) -> bytes:
    os.lseek(fd, 0, os.SEEK_SET)
    with os.fdopen(os.dup(fd), "rb") as file:
        return file.read()


def _lock(fd: int) -> bool:
    """Take the lock, unless another process keeps it; wait for one that only looks at it (``in_use``)."""
    deadline = time.monotonic() + _LOOK_SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN):
                raise
            if time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS / 50)
                continue
            return False
        return True


def holders(path: Path) -> list[int]:
    """Return the processes that hold an exclusive flock(2) on a file, as far as they are visible from here."""
    identity = path.stat()
    return [
        pid
        for pid, inode in _locks(_LOCKS.read_text(encoding="ascii"))
        if inode == identity.st_ino and _has_open(pid, identity)
    ]


def _locks(text: str) -> Iterator[tuple[int, int]]:
    """Yield (process, inode) of each exclusive flock: ``1: FLOCK  ADVISORY  WRITE 123 fe:01:456 0 EOF``."""
    for line in text.splitlines():
        fields = line.split()
        if fields[1:4] == ["FLOCK", "ADVISORY", "WRITE"] and int(fields[4]) > 0:
            yield int(fields[4]), int(fields[5].rpartition(":")[2])


def _has_open(pid: int, identity: os.stat_result) -> bool:
    """Return whether a process has a file open: an inode's number is unique only in its filesystem."""
    with suppress(OSError):  # it has ended, or belongs to another user
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if os.path.samestat(entry.stat(), identity):
                    return True
    return False
