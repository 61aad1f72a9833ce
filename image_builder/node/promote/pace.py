"""How fast promotion may go: bytes per second, shared by all workers.

The rate is ours to keep: with the scheduler ``none``, the default of NVMe, the kernel has no priorities between the
readers of a disk. The core is a token bucket without a clock; the state is passed in and returned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
