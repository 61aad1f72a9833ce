"""Copy items with several processes. A worker only makes copies; the agent itself syncs and exchanges them.

Each worker takes the next item, copies it into the staging directory under the item's number, and reports it in one
line of JSON: ``{"item": 3}``, or ``{"item": 3, "code": "promote.store", "reason": "...", "damaged": true}``.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import select
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from image_builder.node.errors import NodeError
from image_builder.node.promote.copy import SourceError, copy_file, copy_tree
from image_builder.node.promote.plan import Item, Room, refusal
from image_builder.node.promote.shared import Shared, Stopped

_PR_SET_PDEATHSIG = 1
_NICE = 19
_DAMAGED = frozenset([errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.ENODATA])
_FULL = frozenset([errno.ENOSPC, errno.EDQUOT])


@dataclass(frozen=True)
class Job:
    """The workers' job. ``flush`` as in ``copy_tree``."""

    items: Sequence[Item]
    staging: Path
    reserve_percent: float
    flush: bool


@dataclass(frozen=True)
class ItemResult:
    """A worker's report on an item: ``code`` is empty if it was copied. ``damaged``: the store seems to be damaged."""

    item: int
    code: str = ""
    reason: str = ""
    damaged: bool = False


class Workers:
    """Worker processes, from their start until each has ended."""

    def __init__(self, job: Job, shared: Shared) -> None:
        self._job, self._shared = job, shared
        self._pipes: dict[int, int] = {}  # read end of a pipe: process id of the worker
        self._rest: dict[int, bytes] = {}

    def start(self, number: int) -> None:
        """Start another worker; ``number`` counts them from 0. Raises OSError."""
        job = self._job
        read_end, write_end = os.pipe()
        parent = os.getpid()
        try:
            child = os.fork()
        except OSError:
            os.close(read_end)
            os.close(write_end)
            raise
        if child == 0:
            os.close(read_end)
            _work(job, self._shared, number, write_end, parent)
        os.close(write_end)
        self._pipes[read_end] = child
        self._rest[read_end] = b""

    def results(self, seconds: float) -> list[ItemResult] | None:
        """Return the results that arrive within ``seconds``, possibly none; None once all workers have ended.

        Raises NodeError if a worker ended in a way that only a bug or a kill explains.
        """
        if not self._pipes:
            return None
        messages: list[ItemResult] = []
        for pipe in select.select(list(self._pipes), [], [], seconds)[0]:
            if data := os.read(pipe, 1 << 16):
                *lines, self._rest[pipe] = (self._rest[pipe] + data).split(b"\n")
                messages += [ItemResult(**json.loads(line)) for line in lines]
            else:
                self._reap(pipe)
        return messages

    def _reap(self, pipe: int) -> None:
        child = self._pipes.pop(pipe)
        os.close(pipe)
        _, status = os.waitpid(child, 0)
        if status:
            code = os.waitstatus_to_exitcode(status)
            raise NodeError("promote.worker", f"a process that copied layers ended with {code}")

    def end(self) -> None:
        """Stop the running workers and wait for them."""
        self._shared.stop()
        for child in self._pipes.values():
            os.kill(child, signal.SIGKILL)
        for pipe, child in self._pipes.items():
            os.close(pipe)
            os.waitpid(child, 0)
        self._pipes.clear()


@contextmanager
def running(job: Job, count: int, rate: int) -> Iterator[tuple[Workers, Shared]]:
    """Start ``count`` workers; none is left after the block, however it ends."""
    with Shared(count, rate) as shared:
        workers = Workers(job, shared)
        try:
            for number in range(count):
                workers.start(number)
            yield workers, shared
        finally:
            workers.end()


def _work(job: Job, shared: Shared, number: int, pipe: int, parent: int) -> NoReturn:
    """Run a worker. Workers die with the agent: without it, nothing would exchange what they copy."""
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            os.nice(_NICE)
            _copy_items(job, shared, number, lambda message: _say(pipe, message))
            status = 0
    except Stopped:
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _say(pipe: int, message: dict[str, Any]) -> None:
    os.write(pipe, json.dumps(message).encode() + b"\n")


def _copy_items(job: Job, shared: Shared, number: int, say: Callable[[dict[str, Any]], None]) -> None:
    pacer = shared.pacer()
    while True:
        shared.check()
        shared.set_in_flight(number, 0)
        with shared.locked():
            index = shared.next_item()
            if index >= len(job.items):
                return
            item = job.items[index]
            reason = refusal(room(job.staging), item.bytes, shared.in_flight(), job.reserve_percent)
            if reason:
                shared.no_more()
            else:
                shared.set_in_flight(number, item.bytes)
        if reason:
            say({"item": index, "code": "promote.space", "reason": reason})
            return
        copy = copy_tree if item.link.directory else copy_file
        try:
            copy(item.link.target, job.staging / str(index), pacer.spend, flush=job.flush)
        except SourceError as error:
            say(
                {
                    "item": index,
                    "code": "promote.store",
                    "reason": str(error),
                    "damaged": error.code in _DAMAGED,
                }
            )
            return
        except OSError as error:
            code, reason = disk_error(error)
            say({"item": index, "code": code, "reason": reason})
            return
        say({"item": index})


def disk_error(error: OSError) -> tuple[str, str]:
    """Return the code and the reason for an error of the local disk."""
    code = "promote.space" if error.errno in _FULL else "promote.io"
    where = f"{error.filename}: " if error.filename else ""
    return code, f"{where}{os.strerror(error.errno or errno.EIO)}"


def room(path: Path) -> Room:
    """Return the size and free space of the filesystem that contains ``path``. Raises OSError."""
    info = os.statvfs(path)
    return Room(
        total=info.f_blocks * info.f_frsize,
        free=info.f_bavail * info.f_frsize,
        files=info.f_files,
        free_files=info.f_favail,
    )
