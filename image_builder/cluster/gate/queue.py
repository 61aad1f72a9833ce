"""The queue of nodes to act on: each once, and not too many per second.

The clock is handed in, so that nothing here waits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from image_builder.node.net.retry import backoff

# A node whose change is refused again and again is not asked for more often than this.
_LONGEST_WAIT = 300.0


@dataclass
class Queue:
    """``rate`` is how many may be taken in a second, ``burst`` how many at once after a pause.

    Not for several threads at once: its owner has the lock.
    """

    rate: float
    burst: int
    chance: Callable[[], float]
    _due: dict[str, float] = field(default_factory=dict)
    _failures: dict[str, int] = field(default_factory=dict)
    _tokens: float = -1.0
    _filled: float = 0.0

    def __len__(self) -> int:
        return len(self._due)

    def add(self, name: str, now: float) -> None:
        """Ask for a node's turn; one that waits after a failure goes on waiting."""
        self._due.setdefault(name, now)

    def drop(self, name: str) -> None:
        """Forget a node: there is nothing to be done for it."""
        self._due.pop(name, None)
        self._failures.pop(name, None)

    def failed(self, name: str, now: float, retry_after: float | None = None) -> None:
        """Put a node back, later and later."""
        times = self._failures.get(name, 0)
        self._failures[name] = times + 1
        wait = backoff(times, retry_after=retry_after, cap=_LONGEST_WAIT, chance=self.chance)
        self._due[name] = now + wait

    def take(self, now: float) -> tuple[str | None, float]:
        """Return the next node, or None and the seconds until there may be one (infinity: none is waiting)."""
        if not self._due:
            return None, float("inf")
        self._fill(now)
        if self._tokens < 1:
            return None, (1 - self._tokens) / self.rate
        name, due = next(iter(self._due.items()))
        if due > now:
            name, due = min(self._due.items(), key=lambda item: item[1])
            if due > now:
                return None, due - now
        self._tokens -= 1
        del self._due[name]
        return name, 0.0

    def _fill(self, now: float) -> None:
        if self._tokens < 0:
            self._tokens = self.burst
        self._tokens = min(float(self.burst), self._tokens + (now - self._filled) * self.rate)
        self._filled = now
