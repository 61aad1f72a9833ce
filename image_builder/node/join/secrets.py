"""Does a text hold a secret? What every process of a machine can read must not."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

# What a secret looks like, and what to call it. What is found is never told.
_PATTERNS: Mapping[str, re.Pattern[str]] = {
    "a bootstrap token": re.compile(r"(?<![a-z0-9.])[a-z0-9]{6}\.[a-z0-9]{16}(?![a-z0-9.])"),
    "a private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
    "a signed token": re.compile(r"eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"),
    "credentials of HTTP": re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9+/_=.-]{8,}"),
    "a shared access signature": re.compile(r"[?&]sig=[A-Za-z0-9%+/=]{8,}"),
    "a password in an address": re.compile(r"[a-z]+://[^/@\s:]*:[^/@\s]+@"),
    "a vaulted value": re.compile(r"\$ANSIBLE_VAULT;"),
}


def found(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path of each secret in a JSON value, keys included, and what it is."""
    if isinstance(value, str):
        yield from ((path, name) for name, pattern in _PATTERNS.items() if pattern.search(value))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            for _, name in found(str(key)):
                yield path or "(a key)", name
            yield from found(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from found(item, f"{path}[{number}]")
