"""JSON values and the canonical encoding that is hashed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

JSON = None | bool | int | float | str | Sequence["JSON"] | Mapping[str, "JSON"]


def canonical(value: JSON) -> bytes:
    """Return the encoding of a JSON value that is hashed: sorted keys, no spaces, UTF-8."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=_plain)
    return text.encode()


def _plain(value: object) -> dict[str, JSON]:
    """Turn a mapping that isn't a dict (a frozen view of one) into a dict. Raises TypeError for anything else."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not a JSON value")


def digest(value: JSON) -> str:
    """Return the SHA-256 of a JSON value, in hex."""
    return hashlib.sha256(canonical(value)).hexdigest()
