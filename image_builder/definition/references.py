"""Which inventory variables a piece of code can read: a pure over-approximation by words.

A layer's id covers exactly the variables found here, so a missed one would be a stale image. Any occurrence
of a name as a word counts, comments and strings included; a name that is put together at run time
(``lookup('vars', …)``, ``hostvars[…]``) would escape, so roles may not do that (a unit test looks).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from image_builder.definition.values import JSON, is_template, is_vaulted, strings, words


def referenced_names(texts: Iterable[str], variables: Mapping[str, JSON]) -> frozenset[str]:
    """Return the ``variables`` whose names are words of ``texts``, or of the values of such variables."""
    found: set[str] = set()
    queue = {word for text in texts for word in words(text)} & variables.keys()
    while queue:
        name = queue.pop()
        found.add(name)
        inside = {word for text in strings(variables[name]) for word in words(text)}
        queue |= (inside & variables.keys()) - found
    return frozenset(found)


def vaulted_names(variables: Mapping[str, JSON]) -> frozenset[str]:
    """Return the variables that are vaulted, or whose templates name such a one, over others too."""
    found = {name for name, value in variables.items() if is_vaulted(value)}
    templates = {
        name: {word for text in strings(value) if is_template(text) for word in words(text)}
        for name, value in variables.items()
        if name not in found
    }
    while more := {name for name, inside in templates.items() if name not in found and inside & found}:
        found |= more
    return frozenset(found)
