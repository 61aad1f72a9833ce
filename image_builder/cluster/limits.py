"""Rate limits: token buckets, one for each caller of a service, or one for a queue of nodes to act on.

The time is passed in, so nothing here waits.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

from image_builder.node.net.retry import backoff

# Full buckets are forgotten, but only once there are this many, and then whenever their number has doubled.
_MANY = 10_000
# The longest wait before the next attempt at a node whose change keeps being refused.
_LONGEST_WAIT = 300.0


@dataclass
class Bucket:
    """Holds up to ``burst`` tokens and gets ``per_second``. ``at`` is when it had ``tokens``, and never goes back."""

    burst: float
    per_second: float
    tokens: float
    at: float = 0.0

    def wait(self, now: float) -> float:
        """Return the seconds until there is a token to take, 0 if there is one."""
        self.tokens = min(self.burst, self.tokens + (now - self.at) * self.per_second)
        self.at = now
        return max(0.0, (1 - self.tokens) / self.per_second)


class Limiter:
    """Buckets by key, each holding ``burst`` tokens and refilled at ``per_second``. Thread-safe."""

    def __init__(self, burst: int, per_second: float) -> None:
        self._burst, self._rate = float(burst), per_second
        self._buckets: dict[str, Bucket] = {}
        self._many = _MANY
        self._lock = threading.Lock()

    def take(self, key: str, now: float) -> float:
        """Take a token and return 0, or return the seconds until there is one."""
        with self._lock:
            if len(self._buckets) >= self._many:
                self._forget(now)
            bucket = self._buckets.setdefault(key, Bucket(self._burst, self._rate, self._burst, now))
            wait = bucket.wait(now)
            if not wait:
                bucket.tokens -= 1
            return wait

    def _forget(self, now: float) -> None:
        age = self._burst / self._rate
        self._buckets = {key: bucket for key, bucket in self._buckets.items() if now - bucket.at < age}
        self._many = max(_MANY, 2 * len(self._buckets))


def whole_seconds(seconds: float) -> int:
    """Return the value for a Retry-After header: rounded up, and never 0."""
    return max(1, math.ceil(seconds))


class Queue:
    """The nodes to act on, each once. ``rate`` may be taken per second, ``burst`` at once after a pause.

    Not thread-safe: its owner holds the lock.
    """

    def __init__(self, rate: float, burst: int, chance: Callable[[], float]) -> None:
        self._bucket, self._chance = Bucket(burst, rate, burst), chance
        self._due: dict[str, float] = {}
        self._failures: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._due)

    def add(self, name: str, now: float) -> None:
        """Queue a node; one that waits after a failure keeps waiting."""
        self._due.setdefault(name, now)

    def drop(self, name: str) -> None:
        """Forget a node for which there is nothing to do."""
        self._due.pop(name, None)
        self._failures.pop(name, None)

    def failed(self, name: str, now: float, retry_after: float | None = None) -> None:
        """Put a node back, with a longer wait after each failure."""
        times = self._failures.get(name, 0)
        self._failures[name] = times + 1
        wait = backoff(times, retry_after=retry_after, cap=_LONGEST_WAIT, chance=self._chance)
        self._due[name] = now + wait

    def take(self, now: float) -> tuple[str | None, float]:
        """Return the next node, or None and the seconds until there may be one (infinity: none is waiting)."""
        if not self._due:
            return None, float("inf")
        if wait := self._bucket.wait(now):
            return None, wait
        name, due = next(iter(self._due.items()))
        if due > now:
            name, due = min(self._due.items(), key=lambda item: item[1])
            if due > now:
                return None, due - now
        self._bucket.tokens -= 1
        del self._due[name]
        return name, 0.0
