"""The refusal of a request: an HTTP status, a code for programs, a message for people."""

from __future__ import annotations


class RefusedError(Exception):
    """A request is refused.

    The node acts on ``status``: it retries after 409, 429 and 5xx, and gives up after anything else. ``code`` is one of
    those in docs/reference/token-broker.md. No part contains a secret, since all of it is sent and logged.
    ``retry_after`` is in seconds, 0 for none.
    """

    def __init__(self, status: int, code: str, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.retry_after = status, code, message, retry_after


def unproven(code: str, message: str) -> RefusedError:
    """Return the refusal of a caller whose identity is not proven."""
    return RefusedError(401, code, message)


def forbidden(code: str, message: str) -> RefusedError:
    """Return the refusal of a caller that is known but not allowed."""
    return RefusedError(403, code, message)
