"""Time that is running out, and asking again while there is some."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from image_builder.node.join.codes import JoinError
from image_builder.node.net import kube

T = TypeVar("T")
_LONGEST_WAIT = 10.0


class NotYet(Exception):  # noqa: N818 (no error as long as there is time)
    """It may go better later. ``error`` is what it comes to if not; ``after`` the seconds that were asked for."""

    def __init__(self, number: int, message: str, after: float | None = None) -> None:
        super().__init__(message)
        self.error, self.after = JoinError(number, message), after


@dataclass(frozen=True)
class Deadline:
    """``until`` is what the monotonic clock says then, in seconds."""

    until: float
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    @property
    def remaining(self) -> float:
        """Return the seconds that are left, never below nothing."""
        return max(0.0, self.until - self.clock())

    def sooner(self, seconds: float) -> Deadline:
        """Return a deadline so many seconds from now, or this one where that is earlier."""
        return Deadline(min(self.until, self.clock() + seconds), self.clock, self.sleep)

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


def patiently(
    ask: Callable[[], T], deadline: Deadline, *, base: float = 1.0, cap: float = _LONGEST_WAIT
) -> T:
    """Ask until there is an answer; raises the JoinError of the last NotYet when the time for the next is not there.

    ``base`` and ``cap`` are the first and the longest wait's limits in seconds (``kube.backoff``).
    """
    attempt = 0
    while True:
        try:
            return ask()
        except NotYet as delay:
            if not deadline.wait(kube.backoff(attempt, retry_after=delay.after, base=base, cap=cap)):
                raise delay.error from delay
        attempt += 1
