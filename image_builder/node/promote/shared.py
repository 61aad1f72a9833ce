"""What the workers share: the next item, the bucket of the rate, the bytes under way, and whether to stop.

An anonymous file in memory, locked by record locks: the kernel gives a dead process' lock back.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from image_builder.node.promote import pace

_HEAD = struct.Struct("=qqdd")  # the next item, whether to stop, the bucket's tokens, its time
_COUNT = struct.Struct("=q")
_NEVER = 1 << 60  # more than any number of items


class Stopped(Exception):  # noqa: N818 (nothing went wrong)
    """The work is given up: another worker failed."""


class Shared:
    """The memory of ``workers`` workers; made before they are forked. ``rate`` is in bytes per second, 0 for none."""

    def __init__(self, workers: int, rate: int) -> None:
        self._rate = rate
        self._workers = workers
        size = _HEAD.size + workers * _COUNT.size
        self._fd = os.memfd_create("promote", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, size)
        self._memory = mmap.mmap(self._fd, size)
        _HEAD.pack_into(self._memory, 0, 0, 0, 0.0, time.monotonic())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._memory.close()
        os.close(self._fd)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep the other processes out; not for use inside itself."""
        fcntl.lockf(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def stop(self) -> None:
        """Tell all workers to give up."""
        with self.locked():
            following, _, tokens, at = _HEAD.unpack_from(self._memory)
            _HEAD.pack_into(self._memory, 0, following, 1, tokens, at)

    def no_more(self) -> None:
        """Let copies under way end, and no other begin. Within ``locked``."""
        _, stop, tokens, at = _HEAD.unpack_from(self._memory)
        _HEAD.pack_into(self._memory, 0, _NEVER, stop, tokens, at)

    def check(self) -> None:
        """Raise Stopped after ``stop``."""
        if _HEAD.unpack_from(self._memory)[1]:
            raise Stopped

    def next_item(self) -> int:
        """Take the number of the next item. Within ``locked``."""
        following, stop, tokens, at = _HEAD.unpack_from(self._memory)
        _HEAD.pack_into(self._memory, 0, following + 1, stop, tokens, at)
        return int(following)

    def in_flight(self) -> int:
        """Return the bytes that copies under way may take, all of them. Within ``locked``."""
        return sum(
            _COUNT.unpack_from(self._memory, _HEAD.size + n * _COUNT.size)[0] for n in range(self._workers)
        )

    def set_in_flight(self, worker: int, count: int) -> None:
        """Say how many bytes this worker's copy may take. Only the worker itself writes this."""
        _COUNT.pack_into(self._memory, _HEAD.size + worker * _COUNT.size, count)

    def take(self, cost: int) -> float:
        """Take bytes from the bucket of all; return the seconds to wait."""
        with self.locked():
            following, stop, tokens, at = _HEAD.unpack_from(self._memory)
            bucket, seconds = pace.take(pace.Bucket(tokens, at), time.monotonic(), self._rate, cost)
            _HEAD.pack_into(self._memory, 0, following, stop, bucket.tokens, bucket.at)
        return seconds

    def pacer(self) -> pace.Pacer:
        """Return one worker's share of the rate; its ``spend`` raises Stopped after ``stop``."""

        def exchange(cost: int) -> float:
            self.check()
            return self.take(cost) if self._rate else 0.0

        return pace.Pacer(exchange, self._sleep)

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (remaining := end - time.monotonic()) > 0:
            time.sleep(min(remaining, 0.5))
            self.check()
