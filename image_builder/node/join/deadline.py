"""Time that is running out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Deadline:
    """``until`` is what the monotonic clock says then, in seconds."""

    until: float
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    @property
    def left(self) -> float:
        """Return the seconds that are left, never below nothing."""
        return max(0.0, self.until - self.clock())

    def sooner(self, seconds: float) -> Deadline:
        """Return a deadline so many seconds from now, or this one where that is earlier."""
        return Deadline(min(self.until, self.clock() + seconds), self.clock, self.sleep)

    def poll(self, seconds: float) -> bool:
        """Wait so long or until the end, whatever comes first; tell whether there was time to wait at all."""
        if (left := self.left) <= 0:
            return False
        self.sleep(min(seconds, left))
        return True

    def wait(self, seconds: float) -> bool:
        """Wait exactly so long, where there is more time than that; tell whether there was."""
        if seconds >= self.left:
            return False
        self.sleep(seconds)
        return True
