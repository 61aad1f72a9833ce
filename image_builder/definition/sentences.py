"""The variable that a program's sentence is about, as far as the sentence shows it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from image_builder.canonical import JSON
from image_builder.definition.evaluate import resolved_variables
from image_builder.definition.model import ImageDefinition
from image_builder.definition.values import join_path
from image_builder.errors import Problem

_Path = tuple[str | int, ...]
# Between the words of a name: imageGCHighThresholdPercent, --image-gc-high-threshold.
_BETWEEN = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|-")


def problem_in(definition: ImageDefinition, sentence: str, file: str) -> Problem:
    """Return a program's sentence about a file of the image as a problem of the definition.

    It is that of the variable that the sentence quotes or names; of the file, if no variable or several are meant.
    """
    values = resolved_variables(definition)
    written = definition.variables.keys() | definition.extra_variables.keys()
    scores: dict[str, tuple[int, _Path]] = {}
    for name in sorted(values.keys() & written):
        for path, text in _texts(values[name], (name,)):
            if score := _score(sentence, name, path, text):
                scores[name] = max(scores.get(name, (0, ())), (score, path), key=lambda pair: pair[0])
    best = max((score for score, _ in scores.values()), default=0)
    paths = [path for score, path in scores.values() if score == best]
    if len(paths) != 1:
        return Problem("", file, sentence)
    return Problem(definition.where(paths[0]), join_path(paths[0]), sentence)


def _texts(value: JSON, path: _Path) -> Iterator[tuple[_Path, str]]:
    """Yield the scalars in a value, each with its path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(item, (*path, key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _texts(item, (*path, number))
    elif value is not None:
        yield path, str(value)


def _score(sentence: str, name: str, path: _Path, text: str) -> int:
    """Return how much of a variable's part a sentence has: its value, its key, and the field that is named for it."""
    words = {_BETWEEN.sub("_", word.strip("-")).lower() for word in re.findall(r"[\w-]+", sentence)}
    names_it = any(len(word) > 3 and name.endswith(f"_{word}") for word in words)
    quotes = len(text) > 1 and any(_has(sentence, part) for part in (text, text.partition("=")[0]))
    keys = [part for part in path[1:] if isinstance(part, str)]
    return 2 * names_it + quotes + (bool(keys) and _has(sentence, keys[-1]))


def _has(sentence: str, text: str) -> bool:
    return re.search(rf"(?<![\w.-]){re.escape(text)}(?![\w-])", sentence) is not None
