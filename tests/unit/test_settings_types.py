"""Every type of settings and records refuses what its own declaration excludes, and names the field.

What a declaration can't say (rules between fields, forms of texts) is in the tests of the types.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

import jsonschema
import pytest
from pydantic import BaseModel, ValidationError

import image_builder
from image_builder.node import preload_settings
from image_builder.node.decode import DecodeError, decode
from image_builder.node.disk import settings as disk
from image_builder.node.gpu import settings as gpu
from image_builder.node.health import application
from image_builder.node.health import settings as health
from image_builder.node.join import settings as join
from image_builder.node.preflight import settings as preflight

# A value of each kind that JSON has.
VALUES: tuple[Any, ...] = (None, True, 3, 1.5, "no such", ["no such"], {"no such": "no such"})
ON_NODES = (
    *(disk.Settings, gpu.Settings, health.Settings, application.Settings, join.Settings, preflight.Settings),
    *(preload_settings.Preload, preload_settings.Promotion),
)


# -- dataclasses, on nodes ---------------------------------------------------------------------------------------


def takes(kind: Any, value: Any) -> bool:
    """Return whether a value is of a declared type, as far as JSON says."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return value in arguments and type(value) is type(arguments[0])
    if origin in (types.UnionType, typing.Union):
        return any(takes(argument, value) for argument in arguments)
    if kind is Any:
        return True
    own = {float: (int, float), Path: (str,), tuple: (list,), Mapping: (dict,), types.NoneType: (type(None),)}
    return type(value) in (own.get(origin or kind) or ((dict,) if is_dataclass(kind) else (kind,)))


def wrong(kind: Any) -> Iterator[tuple[str, Any]]:
    """Yield paths below a value of a declared type, each with a value that may not be there."""
    yield from (("", value) for value in VALUES if not takes(kind, value))
    arguments = [argument for argument in typing.get_args(kind) if argument is not types.NoneType]
    if is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        for field in fields(kind):
            key = field.metadata.get("key", field.name)
            # A function reads it: a text, or a mapping of numbers.
            own = "read" in field.metadata
            below = [("", value) for value in (None, True, 1.5)] if own else wrong(hints[field.name])
            yield from ((f".{key}{path}", {key: value}) for path, value in below)
    elif typing.get_origin(kind) is tuple:
        yield from ((f"[0]{path}", [value]) for path, value in wrong(arguments[0]))
    elif typing.get_origin(kind) is Mapping:
        yield from ((f".a{path}", {"a": value}) for path, value in wrong(arguments[1]))
    elif len(arguments) == 1 and typing.get_origin(kind) is not Literal:
        yield from ((path, value) for path, value in wrong(arguments[0]) if path)


def decode_problems(kind: type, document: Any) -> list[str]:
    with pytest.raises(DecodeError) as refused:
        decode(kind, document)
    return refused.value.problems


@pytest.mark.parametrize("kind", ON_NODES, ids=lambda kind: kind.__module__)
def test_a_node_refuses_values_of_other_types(kind: type) -> None:
    for path, document in wrong(kind):
        name = path.removeprefix(".") or "the document"
        assert any(f"{p} ".startswith(f"{name} must ") for p in decode_problems(kind, document)), (
            path,
            document,
        )


@pytest.mark.parametrize("kind", ON_NODES, ids=lambda kind: kind.__module__)
def test_a_node_refuses_unknown_keys_and_misses_required_ones(kind: Any) -> None:
    required = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    assert {"no_such is not a known key", *(f"{name} is missing" for name in required)} <= {
        *decode_problems(kind, {"no_such": 1})
    }
    for name, hint in typing.get_type_hints(kind).items():
        for part in filter(is_dataclass, (hint, *typing.get_args(hint))):
            unknown = {"no_such": 1}
            path, value = {tuple: ("[0]", [unknown]), Mapping: (".a", {"a": unknown})}.get(
                typing.get_origin(hint), ("", unknown)
            )
            assert f"{name}{path}.no_such is not a known key" in decode_problems(kind, {name: value}), part


# -- models ------------------------------------------------------------------------------------------------------


def strict_models() -> list[type[BaseModel]]:
    """Return all models of this program that refuse unknown keys."""
    for module in pkgutil.walk_packages(image_builder.__path__, "image_builder."):
        if not re.search(r"\.(suite|plugins|__main__)\b", module.name):  # those are others' modules
            importlib.import_module(module.name)
    found, queue = set[type[BaseModel]](), [BaseModel]
    while queue:
        for model in queue.pop().__subclasses__():
            queue.append(model)
            if model.__module__.startswith("image_builder") and model.model_config.get("extra") == "forbid":
                found.add(model)
    return sorted(found, key=lambda model: (model.__module__, model.__qualname__))


def beyond(schema: Any) -> Iterator[Any]:
    """Yield what is just outside of the limits that a schema has anywhere."""
    if isinstance(schema, dict):
        yield from (schema[key] - 1 for key in ("minimum",) if key in schema)
        yield from (schema[key] + 1 for key in ("maximum",) if key in schema)
        yield from (schema[key] for key in ("exclusiveMinimum", "exclusiveMaximum") if key in schema)
        yield from ([] for key in ("minItems",) if key in schema)
        yield from ("" for key in ("minLength", "pattern") if key in schema)
        for part in schema.values():
            yield from beyond(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from beyond(part)


def places(model: type[BaseModel], document: Any) -> set[str]:
    with pytest.raises(ValidationError) as refused:
        model.model_validate_json(json.dumps(document))
    return {str(error["loc"][0]) for error in refused.value.errors() if error["loc"]}


@pytest.mark.parametrize("model", strict_models(), ids=lambda m: f"{m.__module__}.{m.__qualname__}")
def test_a_model_refuses_what_its_schema_excludes(model: type[BaseModel]) -> None:
    assert model.model_config.get("strict"), "no text becomes a number"
    schema = model.model_json_schema()
    assert {"no_such", *schema.get("required", ())} <= places(model, {"no_such": 1})
    for name, part in schema.get("properties", {}).items():
        validator = jsonschema.Draft202012Validator({**part, "$defs": schema.get("$defs", {})})
        for value in (*VALUES, *beyond(part)):
            is_one = value is True and 1 in (part.get("const"), *part.get("enum", ()))  # as Python has it
            if not is_one and not validator.is_valid(value):
                assert name in places(model, {name: value}), (name, value)
