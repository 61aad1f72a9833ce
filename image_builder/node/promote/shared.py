"""What the workers share: the next item, the bucket of the rate, the bytes under way, and whether to stop.

An anonymous file in memory, locked by record locks: the kernel gives a dead process' lock back. The rate, in bytes per
second of all workers together, is ours to keep: with the scheduler ``none``, the default of NVMe, the kernel has no
priorities between the readers of a disk. The core is a token bucket without a clock: its state goes in and out.
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
# What was not spent is kept for no longer than this: a burst is what slows a reader.
BURST_SECONDS = 0.05
# A worker asks the shared bucket once for so many bytes at least, not for each small file.
QUANTUM = 1 << 18


@dataclass(frozen=True)
class Bucket:
    """Bytes that may be spent at a time, in seconds of a clock that only goes forward; below 0 they are owed."""

    tokens: float = 0.0
    at: float = 0.0


def take(bucket: Bucket, now: float, rate: float, cost: float) -> tuple[Bucket, float]:
    """Return the bucket after ``cost`` bytes were taken, and the seconds to wait before they are used.

    ``rate`` is in bytes per second and above 0. A cost is never refused: it is owed, and whoever comes next waits
    longer, so that several takers together keep the rate.
    """
    earned = max(0.0, now - bucket.at) * rate
    tokens = min(bucket.tokens + earned, rate * BURST_SECONDS) - cost
    return Bucket(tokens, max(now, bucket.at)), max(0.0, -tokens / rate)


class Pacer:
    """One worker's share. ``exchange`` takes from the bucket of all and returns the seconds to wait."""

    def __init__(self, exchange: Callable[[int], float], sleep: Callable[[float], None]) -> None:
        self._exchange = exchange
        self._sleep = sleep
        self._owed = 0

    def spend(self, cost: int) -> None:
        """Take note of ``cost`` bytes, and wait where all workers together are ahead of the rate."""
        self._owed += cost
        if self._owed >= QUANTUM:
            owed, self._owed = self._owed, 0
            if (seconds := self._exchange(owed)) > 0:
                self._sleep(seconds)


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
