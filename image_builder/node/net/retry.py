"""Deadlines, and retries until a deadline.

Thousands of nodes that were refused together must not come back together: see ``backoff``.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

# The longest wait between two attempts, and the longest that a server may ask for; in seconds.
LONGEST_WAIT, LONGEST_RETRY_AFTER = 600.0, 3600.0

T = TypeVar("T")


class NotYet(Exception):  # noqa: N818 (no error as long as there is time)
    """It may go better later. ``error`` is what it comes to if not; ``after`` the seconds that were asked for."""

    def __init__(self, error: Exception, after: float | None = None) -> None:
        super().__init__(str(error))
        self.error, self.after = error, after


@dataclass(frozen=True)
class Deadline:
    """A deadline. ``until`` is its time on the monotonic clock, in seconds. ``chance`` returns numbers in [0, 1)."""

    until: float
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    chance: Callable[[], float] = random.random

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """Return a deadline ``seconds`` from now."""
        return cls(time.monotonic() + seconds)

    @property
    def remaining(self) -> float:
        """Return the seconds that are left, never less than 0."""
        return max(0.0, self.until - self.clock())

    def attempt(self, most: float = math.inf) -> float:
        """Return how long one attempt may take: the time left, at most ``most`` seconds, but at least one second."""
        return max(1.0, min(most, self.remaining))

    def sooner(self, seconds: float) -> Deadline:
        """Return a deadline ``seconds`` from now, or this one's time if that is earlier."""
        return Deadline(min(self.until, self.clock() + seconds), self.clock, self.sleep, self.chance)

    def poll(self, seconds: float) -> bool:
        """Wait ``seconds`` or until the deadline, whichever comes first; return whether there was any time left."""
        if (remaining := self.remaining) <= 0:
            return False
        self.sleep(min(seconds, remaining))
        return True

    def wait(self, seconds: float) -> bool:
        """Wait exactly ``seconds`` if there is more time left than that; return whether there was."""
        if seconds >= self.remaining:
            return False
        self.sleep(seconds)
        return True


def backoff(
    attempt: int,
    *,
    retry_after: float | None = None,
    base: float = 1.0,
    cap: float = LONGEST_WAIT,
    chance: Callable[[], float] = random.random,
) -> float:
    """Return the seconds to wait after a failed attempt; the first attempt is number 0.

    Full jitter: anywhere between 0 and a limit that doubles from ``base`` up to ``cap``, so that nodes that failed
    together don't come back together. The wait that the server asked for (Retry-After) is added to that.
    ``chance`` returns numbers in [0, 1).
    """
    limit = min(cap, base * 2.0 ** min(attempt, 60))
    retry_seconds = min(max(retry_after or 0.0, 0.0), LONGEST_RETRY_AFTER)
    return retry_seconds + chance() * limit


def patiently(
    ask: Callable[[], T],
    deadline: Deadline,
    *,
    base: float = 1.0,
    cap: float = 10.0,
    tell: Callable[[str], None] | None = None,
) -> T:
    """Ask until there is an answer. Raises the error of the last NotYet if there is no time for another attempt.

    ``base`` and ``cap`` are as in ``backoff``. ``tell`` is called before each wait.
    """
    attempt = 0
    while True:
        try:
            return ask()
        except NotYet as delay:
            wait = backoff(attempt, retry_after=delay.after, base=base, cap=cap, chance=deadline.chance)
            if tell:
                tell(f"{delay}; again in {wait:.0f} s")
            if not deadline.wait(wait):
                raise delay.error from delay
        attempt += 1
