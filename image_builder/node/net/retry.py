"""Time that is running out, and asking again while there is some.

Thousands of nodes that were refused together must not come back together: ``backoff``.
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
    """``until`` is what the monotonic clock says then, in seconds. ``chance`` gives numbers in [0, 1)."""

    until: float
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    chance: Callable[[], float] = random.random

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """Return a deadline so many seconds from now."""
        return cls(time.monotonic() + seconds)

    @property
    def remaining(self) -> float:
        """Return the seconds that are left, never below nothing."""
        return max(0.0, self.until - self.clock())

    def attempt(self, most: float = math.inf) -> float:
        """Return how long one attempt may take: what is left, ``most`` seconds, but never less than one."""
        return max(1.0, min(most, self.remaining))

    def sooner(self, seconds: float) -> Deadline:
        """Return a deadline so many seconds from now, or this one where that is earlier."""
        return Deadline(min(self.until, self.clock() + seconds), self.clock, self.sleep, self.chance)

    def poll(self, seconds: float) -> bool:
        """Wait so long or until the end, whatever comes first; tell whether there was time to wait at all."""
        if (remaining := self.remaining) <= 0:
            return False
        self.sleep(min(seconds, remaining))
        return True

    def wait(self, seconds: float) -> bool:
        """Wait exactly so long, where there is more time than that; tell whether there was."""
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
    """Return the seconds to wait after a failed attempt; the first is 0.

    Full jitter: anywhere between nothing and a limit that doubles from ``base`` up to ``cap``, so that nodes that
    failed together don't come back together. What the server asked for (Retry-After) is waited before that.
    ``chance`` gives numbers in [0, 1).
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
    """Ask until there is an answer; raises the error of the last NotYet when the time for the next is not there.

    ``base`` and ``cap`` are as of ``backoff``. ``tell`` is called before each wait.
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
