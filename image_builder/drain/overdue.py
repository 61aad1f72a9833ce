"""Whether a drain's deadline has passed: that decides for good, and costs jobs, so no single clock is believed."""

from __future__ import annotations

from collections.abc import Callable

from image_builder.node.net.kube import Client


class Overdue:
    """A deadline, in seconds since the epoch, by the API server's clock as its answers give it.

    The clock of this machine may have been set, or stood still while the machine was suspended; it (``wall``) counts
    only until there is an answer. Two answers in a row have to agree, since one of several API servers may be wrong.
    """

    def __init__(self, client: Client, deadline: float, wall: Callable[[], float]) -> None:
        self._client, self._deadline, self._wall = client, deadline, wall
        self._answers, self._has_answer = 0, False

    @property
    def is_over(self) -> bool:
        """Return whether it has passed, according to the last two checks."""
        return self._answers > 1

    @property
    def is_unsure(self) -> bool:
        """Return whether it has passed according to the last check alone."""
        return self._answers == 1

    def check(self) -> bool:
        """Look at the last answer's time; return whether the deadline has passed."""
        served_at = self._client.served_at
        now = self._wall() if served_at is None else served_at
        if served_at is not None and not self._has_answer:
            self._answers, self._has_answer = 0, True
        self._answers = self._answers + 1 if now >= self._deadline else 0
        return self.is_over
