"""Rate limits: token buckets. Pure but for the lock; the time is given."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass

# Buckets are forgotten when they are full again; from so many on that is seen to, each time there are twice as many.
_MANY = 10_000


@dataclass
class _Bucket:
    tokens: float
    at: float


class Limiter:
    """Buckets by key, each of ``burst`` and filled by ``per_second``. For several threads."""

    def __init__(self, burst: int, per_second: float) -> None:
        self._burst, self._rate = float(burst), per_second
        self._buckets: dict[str, _Bucket] = {}
        self._many = _MANY
        self._lock = threading.Lock()

    def take(self, key: str, now: float) -> float:
        """Take one; return 0, or the seconds until there is one. ``now`` never goes back."""
        with self._lock:
            if len(self._buckets) >= self._many:
                self._forget(now)
            bucket = self._buckets.setdefault(key, _Bucket(self._burst, now))
            bucket.tokens = min(self._burst, bucket.tokens + (now - bucket.at) * self._rate)
            bucket.at = now
            if bucket.tokens < 1:
                return (1 - bucket.tokens) / self._rate
            bucket.tokens -= 1
            return 0.0

    def _forget(self, now: float) -> None:
        age = self._burst / self._rate
        self._buckets = {key: bucket for key, bucket in self._buckets.items() if now - bucket.at < age}
        self._many = max(_MANY, 2 * len(self._buckets))


def whole_seconds(seconds: float) -> int:
    """Return what a Retry-After says: at least as long, and never 0."""
    return max(1, math.ceil(seconds))
