"""Placeholders in an example that users must replace with their own values: REPLACE, and checksums of zeros.

The files are read as text, because a mark may be in a comment after the value, and a checksum in a file that no image
reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from image_builder.definition.values import Place
from image_builder.errors import Problem

_VARIABLES = ("group_vars", "host_vars")
_SUFFIXES = ("", ".yml", ".yaml", ".json", ".ini")
_KEY = re.compile(r"[ -]*[\"']?([A-Za-z_][A-Za-z0-9_.-]*)[\"']?\s*:(\s|$)")
# The mark in a value or in a comment behind one, unless it's SQL.
_REPLACE = re.compile(r"(?<!OR )\bREPLACE(?:_ME)?\b(?!\(| INTO\b)")
_ZEROS = re.compile(r"(?<![0-9A-Fa-f])0{64}(?![0-9A-Fa-f])")


def placeholders(inventories: Sequence[Path]) -> list[Problem]:
    """Return each line of the inventories' files that still has a placeholder; comment lines don't count."""
    return [problem for file in sorted(set(_files(inventories))) for problem in _of_file(file)]


def is_placeholder(text: str) -> bool:
    """Return whether a value is one that users must replace."""
    return bool(_ZEROS.search(text) or _REPLACE.search(text))


def _files(inventories: Sequence[Path]) -> Iterator[Path]:
    for inventory in inventories:
        folder = inventory if inventory.is_dir() else inventory.parent
        yield from [inventory] if inventory.is_file() else inventory.iterdir()
        for name in _VARIABLES:
            yield from (folder / name).rglob("*")


def _of_file(file: Path) -> Iterator[Problem]:
    if not file.is_file() or file.suffix not in _SUFFIXES or file.name.startswith("."):
        return
    key = file.stem
    for number, line in enumerate(file.read_text("utf-8", "replace").splitlines(), 1):
        if line.lstrip().startswith(("#", ";")):
            continue
        if named := _KEY.match(line):
            key = named[1]
        where = str(Place(str(file), number))
        if _ZEROS.search(line):
            yield Problem(where, key, "a checksum of zeros is a placeholder: put in the file's own SHA-256")
        elif _REPLACE.search(line):
            yield Problem(where, key, "is marked REPLACE: put in your own value, and remove the mark")
