"""JSON as dataclasses: no conversions, no unknown keys, and all problems are reported at once.

A field's type decides which JSON it accepts: ``str``, ``int``, ``float`` (any number), ``bool``, ``Path`` (a string),
``Literal``, ``tuple[T, ...]`` (a list), ``Mapping[str, T]`` and dataclasses (an object), and unions of these with None
or each other. ``field(metadata={"key": "from"})`` sets a key other than the field's name;
``field(metadata={"read": function})`` is for values that no type describes: ``function(value, path)`` returns the
field's value.

A dataclass may have a method ``problems()`` that yields the rules it breaks, each a sentence that begins with the path
of a field: ``port must be at most 65535, not 70000``. Shared rules are at the end of this module.
"""

from __future__ import annotations

import functools
import json
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

# How much of a value a message shows.
_SHOWN_CHARACTERS = 80

T = TypeVar("T")


class DecodeError(ValueError):
    """A document doesn't match its type. ``problems`` are sentences, each beginning with a field's path."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def decode(kind: type[T], value: Any, path: str = "") -> T:
    """Return a JSON document as a value of this type. Raises DecodeError with all problems.

    ``path`` is the value's location for messages; empty for a whole document.
    """
    return typing.cast(T, _decode(kind, value, path))


def _decode(kind: Any, value: Any, path: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind):
        return _dataclass(kind, value, path)
    if origin in (types.UnionType, typing.Union):
        return _union(arguments, value, path)
    if origin is tuple:
        _require(isinstance(value, list | tuple), kind, value, path)
        return tuple(_each((arguments[0], item, f"{path}[{n}]") for n, item in enumerate(value)))
    if origin is Mapping:
        _require(isinstance(value, dict), kind, value, path)
        values = _each((arguments[1], item, _join(path, key)) for key, item in value.items())
        return dict(zip(value, values, strict=True))
    _require(_is_of(kind, value), kind, value, path)
    return kind(value) if kind in (float, Path) else value


def _is_of(kind: Any, value: Any) -> bool:
    """Return whether a value is of a type that contains no other types."""
    if kind is Any:
        return True
    if typing.get_origin(kind) is Literal:
        return any(type(value) is type(choice) and value == choice for choice in typing.get_args(kind))
    if isinstance(value, bool) or kind is bool:
        return kind is bool and isinstance(value, bool)
    return isinstance(value, {float: int | float, Path: str}.get(kind, kind))


def _each(items: Iterator[tuple[Any, Any, str]]) -> list[Any]:
    """Decode values, each with its type and path. Raises DecodeError with the problems of all of them."""
    values, problems = [], []
    for kind, value, path in items:
        try:
            values.append(_decode(kind, value, path))
        except DecodeError as error:
            problems += error.problems
    if problems:
        raise DecodeError(problems)
    return values


def _union(kinds: tuple[Any, ...], value: Any, path: str) -> Any:
    if value is None and types.NoneType in kinds:
        return None
    others = [kind for kind in kinds if kind is not types.NoneType]
    if len(others) == 1:
        return _decode(others[0], value, path)
    for kind in others:
        try:
            return _decode(kind, value, path)
        except DecodeError:
            continue
    raise DecodeError([f"{_name(path)} must be {' or '.join(map(_article, kinds))}, not {shown(value)}"])


def _dataclass(kind: Any, value: Any, path: str) -> Any:
    _require(isinstance(value, dict), kind, value, path)
    keys = {field.metadata.get("key", field.name): field for field in fields(kind) if field.init}
    problems = [f"{_join(path, key)} is not a known key" for key in value if key not in keys]
    absent = [key for key, field in keys.items() if key not in value and _is_required(field)]
    problems += [f"{_join(path, key)} is missing" for key in absent]
    hints = _hints(kind)
    values: dict[str, Any] = {}
    wrong = []
    for key in keys.keys() & value.keys():
        field = keys[key]
        read = field.metadata.get("read")
        try:
            values[field.name] = (
                read(value[key], _join(path, key))
                if read
                else _decode(hints[field.name], value[key], _join(path, key))
            )
        except DecodeError as error:
            wrong += error.problems
            absent += [key] if _is_required(field) else []
    problems += wrong
    # Check the rules anyway, with defaults for values that can't be read, so that all problems are reported at once.
    result = None if absent else kind(**values)
    if result is not None and hasattr(result, "problems"):
        problems += [_join(path, problem) for problem in result.problems()]
    if problems:
        raise DecodeError(sorted(problems))
    return result


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _is_required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _require(is_right: bool, kind: Any, value: Any, path: str) -> None:
    if not is_right:
        raise DecodeError([f"{_name(path)} must be {_article(kind)}, not {shown(value)}"])


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _name(path: str) -> str:
    return path or "the document"


def _article(kind: Any) -> str:
    """Return how a message names a type."""
    if typing.get_origin(kind) is Literal:
        return f"one of {', '.join(filter(None, typing.get_args(kind)))}"
    names = {str: "a string", Path: "a string", int: "an integer", float: "a number", bool: "true or false"}
    if typing.get_origin(kind) is tuple:
        return "a list"
    return "null" if kind is types.NoneType else names.get(kind, "an object")


def shown(value: Any) -> str:
    """Return a value as JSON, shortened for a message."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


# -- rules -------------------------------------------------------------------------------------------------------


def one_of(path: str, value: str, choices: Collection[str]) -> Iterator[str]:
    """Yield a problem unless the value is one of the choices; the message omits an empty choice."""
    if value not in choices:
        yield f"{path} must be one of {', '.join(filter(None, choices))}, not {shown(value)}"


def within(path: str, value: float, least: float, most: float) -> Iterator[str]:
    """Yield a problem unless the number is within these limits, inclusive."""
    if not least <= value <= most:
        yield f"{path} must be {least:g} to {most:g}, not {shown(value)}"


def at_least(path: str, value: float, least: float) -> Iterator[str]:
    """Yield a problem if the number is below the limit."""
    if not value >= least:
        yield f"{path} must be at least {least:g}, not {shown(value)}"


def absolute(path: str, value: str) -> Iterator[str]:
    """Yield a problem unless the value is an absolute path."""
    if not value.startswith("/"):
        yield f"{path} must be an absolute path, not {shown(value)}"


def host_and_port(path: str, value: str) -> Iterator[str]:
    """Yield a problem unless the value is ``HOST:PORT``."""
    host, _, port = value.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 65536):
        yield f"{path} must be HOST:PORT, not {shown(value)}"
