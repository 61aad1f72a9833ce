"""Values of an inventory as plain JSON, and their places in it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from image_builder.canonical import JSON

# A vaulted value is replaced by {VAULT_KEY: sha256 of its ciphertext}: a change shows, the secret does not.
VAULT_KEY = "__vault__"
VAULT_HINT = "give the password with --vault-password-file FILE or ANSIBLE_VAULT_PASSWORD_FILE"

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TEMPLATE = re.compile(r"\{\{|\{%|\{#")


@dataclass(frozen=True, order=True)
class Place:
    """A line of a file; ``line`` is 0 where only the file is known."""

    path: str
    line: int = 0

    def __str__(self) -> str:
        path = self.path
        with suppress(ValueError):
            path = str(Path(path).relative_to(Path.cwd()))
        return f"{path}:{self.line}" if self.line else path


def is_vaulted(value: JSON) -> bool:
    """Tell whether ``value`` is, holds, or was made from the stand-in of a vaulted value."""
    return any(VAULT_KEY in text for text in strings(value))


def is_template(value: JSON) -> bool:
    """Tell whether ``value`` holds Jinja anywhere, keys included."""
    return any(_TEMPLATE.search(text) for text in strings(value))


def strings(value: JSON) -> Iterator[str]:
    """Yield every string in ``value``, keys of mappings included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings(item)


def words(text: str) -> frozenset[str]:
    """Return the identifiers in ``text``."""
    return frozenset(_WORD.findall(text))


def join_path(parts: Sequence[str | int]) -> str:
    """Return ``image_base.components[0]`` for its parts."""
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
