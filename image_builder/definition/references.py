"""The inventory variables that a piece of code can read: a pure over-approximation by words.

A layer's id covers exactly the variables found here, so a missed one would be a stale image. Any occurrence
of a name as a word counts, comments and strings included; a name that is put together at run time
(``lookup('vars', …)``, ``hostvars[…]``) escapes: where one is, all variables count (see ``reading``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from image_builder.canonical import JSON
from image_builder.definition.values import is_template, is_vaulted, strings, words

_CALL = re.compile(r"\b(?:lookup|query|q)\s*\(\s*(?:(['\"])([\w.]+)\1|[A-Za-z_])")
_LOOKUP = re.compile(r"\b(?:lookup|query|q)\s*\(")


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
    """Return the variables that are vaulted, or whose templates name such a one, over others too."""
    return _made_from({name for name, value in variables.items() if is_vaulted(value)}, variables)


def looked_up_names(variables: Mapping[str, JSON]) -> frozenset[str]:
    """Return the variables whose templates call a lookup, or name such a one, over others too."""
    called = {
        name
        for name, value in variables.items()
        if any(is_template(text) and _LOOKUP.search(text) for text in strings(value))
    }
    return _made_from(called, variables)


def _made_from(sources: set[str], variables: Mapping[str, JSON]) -> frozenset[str]:
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
    """Yield the plugin's name, if it is written there, and the text of every call of a lookup."""
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
