"""``did you mean``, in one place."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """Return ``, did you mean `x`?`` for the closest known word, or nothing."""
    close = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.6)
    return f", did you mean `{close[0]}`?" if close else ""
