"""The part of JSON Schema that our schemas use, with only the standard library. Reports all problems at once.

https://json-schema.org/draft/2020-12. An unknown keyword raises an error: a rule must never be silently ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

_NOTES = frozenset({"$schema", "$id", "$defs", "title", "description", "default", "examples"})
_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
}


class RepeatedKeyError(ValueError):
    """An object has the same key twice: it is undefined which value counts."""


def load(text: str | bytes) -> Any:
    """Parse a JSON text. Raises ValueError, also for a repeated key, NaN and Infinity."""
    return json.loads(text, object_pairs_hook=_once, parse_constant=_refuse)


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise RepeatedKeyError(f"`{key}` occurs twice")
        result[key] = value
    return result


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not a JSON number")


def problems(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any] | None = None) -> list[str]:
    """Return all problems, each as ``PATH: PROBLEM``. Never shows a value: it may be a secret."""
    return [f"{path or '(all)'}: {problem}" for path, problem in _check(value, schema, root or schema, "")]


def _check(
    value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], path: str
) -> Iterator[tuple[str, str]]:
    schema = _followed(schema, root)
    if "type" in schema and not _TYPES[schema["type"]](value):
        yield path, f"must be {_article(schema['type'])}, not {_name(value)}"
        return
    for keyword, rule in schema.items():
        if keyword in _NOTES or keyword in ("type", "then"):
            continue
        if keyword in _APPLIED:
            yield from _APPLIED[keyword](value, schema, root, path)
        elif problem := _SIMPLE[keyword](value, rule):
            yield path, problem


def _followed(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    while "$ref" in schema:
        target: Any = root
        for part in PurePosixPath(str(schema["$ref"])).parts[1:]:
            target = target[part]
        schema = {**target, **{key: rule for key, rule in schema.items() if key != "$ref"}}
    return schema


def _article(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aio" else f"a {kind}"


def _name(value: Any) -> str:
    return next((_article(name) for name, is_one in _TYPES.items() if is_one(value)), "null")


def _properties(value: Any, schema: Mapping[str, Any], root: Any, path: str) -> Iterator[tuple[str, str]]:
    if not isinstance(value, dict):
        return
    properties = schema["properties"]
    for key, item in value.items():
        if key in properties:
            yield from _check(item, properties[key], root, _below(path, key))


def _additional(value: Any, schema: Mapping[str, Any], root: Any, path: str) -> Iterator[tuple[str, str]]:
    rule, properties = schema["additionalProperties"], schema.get("properties", {})
    for key, item in value.items() if isinstance(value, dict) else ():
        if key in properties:
            continue
        if rule is False:
            yield _below(path, key), "unknown key"
        else:
            yield from _check(item, rule, root, _below(path, key))


def _names(value: Any, schema: Mapping[str, Any], root: Any, path: str) -> Iterator[tuple[str, str]]:
    for key in value if isinstance(value, dict) else ():
        for _, problem in _check(key, schema["propertyNames"], root, ""):
            yield _below(path, key), f"as a key: {problem}"


def _items(value: Any, schema: Mapping[str, Any], root: Any, path: str) -> Iterator[tuple[str, str]]:
    for number, item in enumerate(value if isinstance(value, list) else ()):
        yield from _check(item, schema["items"], root, f"{path}[{number}]")


def _required(value: Any, schema: Mapping[str, Any], _root: Any, path: str) -> Iterator[tuple[str, str]]:
    for key in schema["required"]:
        if isinstance(value, dict) and key not in value:
            yield _below(path, key), "is missing"


def _if(value: Any, schema: Mapping[str, Any], root: Any, path: str) -> Iterator[tuple[str, str]]:
    if not any(True for _ in _check(value, schema["if"], root, path)):
        yield from _check(value, schema["then"], root, path)


def _below(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


_APPLIED: Mapping[str, Callable[[Any, Mapping[str, Any], Any, str], Iterator[tuple[str, str]]]] = {
    "properties": _properties,
    "additionalProperties": _additional,
    "propertyNames": _names,
    "items": _items,
    "required": _required,
    "if": _if,
}


def _unless(good: bool, problem: str) -> str:
    return "" if good else problem


def _same(value: Any, constant: Any) -> bool:
    return type(value) is type(constant) and bool(value == constant)


def _number(value: Any) -> bool:
    return _TYPES["number"](value)


def _matches(pattern: str, value: str) -> bool:
    # In JSON Schema `$` matches only at the end; in Python it also matches before a trailing newline.
    return bool(re.search(re.sub(r"\$$", r"\\Z", pattern), value))


_SIMPLE: Mapping[str, Callable[[Any, Any], str]] = {
    "const": lambda v, rule: _unless(_same(v, rule), f"must be {json.dumps(rule)}"),
    "enum": lambda v, rule: _unless(
        any(_same(v, choice) for choice in rule), f"must be one of {', '.join(map(str, rule))}"
    ),
    "pattern": lambda v, rule: _unless(not isinstance(v, str) or _matches(rule, v), f"must match {rule}"),
    "minLength": lambda v, rule: _unless(
        not isinstance(v, str) or len(v) >= rule, f"must have {rule} characters or more"
    ),
    "maxLength": lambda v, rule: _unless(
        not isinstance(v, str) or len(v) <= rule, f"must have at most {rule} characters"
    ),
    "minimum": lambda v, rule: _unless(not _number(v) or v >= rule, f"must be {rule} or more"),
    "maximum": lambda v, rule: _unless(not _number(v) or v <= rule, f"must be at most {rule}"),
    "exclusiveMinimum": lambda v, rule: _unless(not _number(v) or v > rule, f"must be more than {rule}"),
    "minItems": lambda v, rule: _unless(
        not isinstance(v, list) or len(v) >= rule, f"must have {rule} items or more"
    ),
    "maxItems": lambda v, rule: _unless(
        not isinstance(v, list) or len(v) <= rule, f"must have at most {rule} items"
    ),
}
