"""Values of an inventory as plain JSON, their places in it, and the variables that a piece of code can read.

A layer's id covers exactly the variables that ``referenced_names`` finds, so a missed one would result in a stale
image. The search is a pure over-approximation by words: any occurrence of a name as a word counts, including in
comments and strings. It misses names that are composed at run time (``lookup('vars', …)``, ``hostvars[…]``); where
there is one, all variables count (see ``reading``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from image_builder.canonical import JSON

# A vaulted value is replaced by {VAULT_KEY: sha256 of its ciphertext}: a change is visible, the secret isn't. A value
# in a vaulted file may be a template: the other key then lists the names of variables in it, and the words by which it
# may reach more than it names, or differ from play to play.
VAULT_KEY = "__vault__"
_NAMED_KEY = "__named__"
_REACHING = frozenset(
    {
        *("lookup", "query", "q", "vars", "hostvars", "groups"),
        *("now", "random", "shuffle", "strftime", "password_hash", "vault"),
    }
)
VAULT_HINT = "give the password with --vault-password-file FILE or ANSIBLE_VAULT_PASSWORD_FILE"

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TEMPLATE = re.compile(r"\{\{|\{%|\{#")
_CALL = re.compile(r"\b(?:lookup|query|q)\s*\(\s*(?:(['\"])([\w.]+)\1|[A-Za-z_])")
_LOOKUP = re.compile(r"\b(?:lookup|query|q)\s*\(")


@dataclass(frozen=True, order=True)
class Place:
    """A line of a file; ``line`` is 0 if only the file is known."""

    path: str
    line: int = 0

    def __str__(self) -> str:
        path = self.path
        with suppress(ValueError):
            path = str(Path(path).relative_to(Path.cwd()))
        return f"{path}:{self.line}" if self.line else path


def is_vaulted(value: JSON) -> bool:
    """Return whether ``value`` is, contains, or was made from the stand-in of a vaulted value."""
    return any(VAULT_KEY in text for text in strings(value))


def stand_in(ciphertext_digest: str, secret: JSON, names: Collection[str]) -> dict[str, JSON]:
    """Return the stand-in for a value of a vaulted file, which reveals only which ``names`` the secret mentions."""
    named = {word for text in strings(secret) if is_template(text) for word in words(text)}
    digest: dict[str, JSON] = {VAULT_KEY: ciphertext_digest}
    return digest | ({_NAMED_KEY: sorted(named.intersection({*names, *_REACHING}))} if named else {})


def is_open(value: JSON) -> bool:
    """Return whether ``value`` is the stand-in of a template that may give what it doesn't name, such as the time."""
    named = value.get(_NAMED_KEY) if isinstance(value, Mapping) else None
    return isinstance(named, list) and not _REACHING.isdisjoint(named)


def is_template(value: JSON) -> bool:
    """Return whether ``value`` contains Jinja anywhere, including in keys."""
    return any(_TEMPLATE.search(text) for text in strings(value))


def strings(value: JSON) -> Iterator[str]:
    """Yield every string in ``value``, including keys of mappings."""
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
    """Return the text of a path, such as ``image_base.components[0]``, from its parts."""
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def referenced_names(texts: Iterable[str], variables: Mapping[str, JSON]) -> frozenset[str]:
    """Return the ``variables`` whose names are words of ``texts``, or of the values of such variables."""
    names: set[str] = set()
    queue = {word for text in texts for word in words(text)} & variables.keys()
    while queue:
        name = queue.pop()
        names.add(name)
        inside = {word for text in strings(variables[name]) for word in words(text)}
        queue |= (inside & variables.keys()) - names
    return frozenset(names)


def vaulted_names(variables: Mapping[str, JSON]) -> frozenset[str]:
    """Return the variables that are vaulted, or whose templates name one that is, directly or through others."""
    return made_from({name for name, value in variables.items() if is_vaulted(value)}, variables)


def looked_up_names(variables: Mapping[str, JSON]) -> frozenset[str]:
    """Return the variables whose templates call a lookup, or name one that does, directly or through others."""
    called = {
        name
        for name, value in variables.items()
        if any(is_template(text) and _LOOKUP.search(text) for text in strings(value))
    }
    return made_from(called, variables)


def made_from(sources: set[str], variables: Mapping[str, JSON]) -> frozenset[str]:
    """Return the variables in ``sources``, and those whose templates name one, directly or through others."""
    if not sources:
        return frozenset()
    names = set(sources)
    templates = {
        name: {word for text in strings(value) if is_template(text) for word in words(text)}
        for name, value in variables.items()
        if name not in names
    }
    while more := {name for name, inside in templates.items() if name not in names and inside & names}:
        names |= more
    return frozenset(names)


def lookup_calls(text: str) -> Iterator[tuple[str, str]]:
    """Yield, for every lookup call, the plugin's name (empty if it isn't a literal) and the call's text."""
    for match in _CALL.finditer(text):
        depth, quote = 0, ""
        for at in range(text.index("(", match.start()), len(text)):
            char = text[at]
            if quote:
                quote = "" if char == quote else quote
            elif char in "'\"":
                quote = char
            else:
                depth += {"(": 1, ")": -1}.get(char, 0)
            if not depth:
                yield match[2] or "", text[match.start() : at + 1]
                break
