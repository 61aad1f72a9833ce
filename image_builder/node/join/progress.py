"""How a phase that did not fail ended, and the keys by which two runs are compared."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Done:
    """``key`` is equal while what the phase is about is the same.

    ``number`` not 0: something is wrong that does not keep the node from joining.
    """

    key: str
    reason: str = ""
    is_skipped: bool = False
    number: int = 0


def digest(*words: str) -> str:
    """Return a short name of these words."""
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]
