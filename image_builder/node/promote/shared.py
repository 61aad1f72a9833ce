"""The state that workers share: the next item, the rate's token bucket, the bytes in flight, and whether to stop.

It is an anonymous file in memory, protected by record locks: the kernel releases a dead process's lock. The rate, in
bytes per second for all workers together, is enforced here: with the scheduler ``none``, the default for NVMe, the
kernel doesn't prioritize between the users of a disk. The core is a token bucket without a clock: its state is passed
in and returned.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

_HEAD = struct.Struct("=qqdd")  # the next item, whether to stop, the bucket's tokens, its time
_COUNT = struct.Struct("=q")
_NEVER = 1 << 60  # more than any number of items
# How long unspent tokens accumulate: bursts slow down readers.
BURST_SECONDS = 0.05
# A worker takes at least this many bytes at a time from the shared bucket, instead of once for each small file.
QUANTUM = 1 << 18


@dataclass(frozen=True)
class Bucket:
    """Bytes that may be spent (``tokens``; negative if owed) at a time of a monotonic clock (``at``, in seconds)."""

    tokens: float = 0.0
    at: float = 0.0


def take(bucket: Bucket, now: float, rate: float, cost: float) -> tuple[Bucket, float]:
    """Return the bucket after ``cost`` bytes were taken, and the seconds to wait before using them.

    ``rate`` is in bytes per second and must be above 0. A cost is never refused: it is owed, and the next taker waits
    longer, so that all takers together keep to the rate.
    """
    earned = max(0.0, now - bucket.at) * rate
    tokens = min(bucket.tokens + earned, rate * BURST_SECONDS) - cost
    return Bucket(tokens, max(now, bucket.at)), max(0.0, -tokens / rate)


class Pacer:
    """One worker's share. ``exchange`` takes bytes from the shared bucket and returns the seconds to wait."""

    def __init__(self, exchange: Callable[[int], float], sleep: Callable[[float], None]) -> None:
        self._exchange = exchange
        self._sleep = sleep
        self._owed = 0

    def spend(self, cost: int) -> None:
        """Count ``cost`` bytes as spent, and wait if all workers together exceed the rate."""
        self._owed += cost
        if self._owed >= QUANTUM:
            owed, self._owed = self._owed, 0
            if (seconds := self._exchange(owed)) > 0:
                self._sleep(seconds)


class Stopped(Exception):  # noqa: N818 (nothing went wrong)
    """The work is given up: another worker failed."""


class Shared:
    """The memory that ``workers`` workers share; create it before forking. ``rate``: bytes per second, 0: no limit."""

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
        """Keep the other processes out; not reentrant."""
        fcntl.lockf(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def stop(self) -> None:
        """Tell all workers to stop."""
        with self.locked():
            following, _, tokens, at = _HEAD.unpack_from(self._memory)
            _HEAD.pack_into(self._memory, 0, following, 1, tokens, at)

    def no_more(self) -> None:
        """Let copies in flight finish, but start no others. Call within ``locked``."""
        _, stop, tokens, at = _HEAD.unpack_from(self._memory)
        _HEAD.pack_into(self._memory, 0, _NEVER, stop, tokens, at)

    def check(self) -> None:
        """Raise Stopped after ``stop``."""
        if _HEAD.unpack_from(self._memory)[1]:
            raise Stopped

    def next_item(self) -> int:
        """Take the number of the next item. Call within ``locked``."""
        following, stop, tokens, at = _HEAD.unpack_from(self._memory)
        _HEAD.pack_into(self._memory, 0, following + 1, stop, tokens, at)
        return int(following)

    def in_flight(self) -> int:
        """Return how many bytes all copies in flight may take. Call within ``locked``."""
        return sum(
            _COUNT.unpack_from(self._memory, _HEAD.size + n * _COUNT.size)[0] for n in range(self._workers)
        )

    def set_in_flight(self, worker: int, count: int) -> None:
        """Set how many bytes this worker's copy may take. Only the worker itself writes this."""
        _COUNT.pack_into(self._memory, _HEAD.size + worker * _COUNT.size, count)

    def take(self, cost: int) -> float:
        """Take bytes from the shared bucket; return the seconds to wait."""
        with self.locked():
            following, stop, tokens, at = _HEAD.unpack_from(self._memory)
            bucket, seconds = take(Bucket(tokens, at), time.monotonic(), self._rate, cost)
            _HEAD.pack_into(self._memory, 0, following, stop, bucket.tokens, bucket.at)
        return seconds

    def pacer(self) -> Pacer:
        """Return one worker's share of the rate; its ``spend`` raises Stopped after ``stop``."""

        def exchange(cost: int) -> float:
            self.check()
            return self.take(cost) if self._rate else 0.0

        return Pacer(exchange, self._sleep)

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (remaining := end - time.monotonic()) > 0:
            time.sleep(min(remaining, 0.5))
            self.check()
