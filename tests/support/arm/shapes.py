"""Checks of JSON against the models of Azure's SDK, which are generated from azure-rest-api-specs.

A key that the models don't have doesn't exist in the service.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any


def model(name: str) -> Any:
    """Return a model of azure-mgmt-compute."""
    from azure.mgmt.compute import models

    return getattr(models, name)


def unknown_keys(model: Any, content: Mapping[str, Any], where: str = "") -> list[str]:
    """Return the keys of some JSON that a model of the SDK doesn't have."""
    fields = {f._rest_name: f._type for f in type(model({}))._attr_to_rest_field.values()}
    unknown = []
    for key, value in content.items():
        if key not in fields:
            unknown.append(f"{where}{key}")
        elif inner := _inner(fields[key]):
            values = value.values() if _is_map(fields[key]) else value if isinstance(value, list) else [value]
            for item in values:
                if isinstance(item, Mapping):
                    unknown += unknown_keys(inner, item, f"{where}{key}.")
    return unknown


def _is_map(kind: Any) -> bool:
    """Return whether a field's deserializer makes a map, which has arbitrary keys."""
    if not isinstance(kind, functools.partial):
        return False
    return kind.func.__name__ == "_deserialize_dict" or any(_is_map(argument) for argument in kind.args)


def _inner(kind: Any) -> Any:
    """Return the model that a field's deserializer makes, or None if it makes something else."""
    if isinstance(kind, functools.partial):
        for argument in kind.args:
            if isinstance(argument, type) and hasattr(argument, "__mro__") and _is_model(argument):
                return argument
            if inner := _inner(argument):
                return inner
    return None


def _is_model(kind: type) -> bool:
    return any(base.__name__ == "Model" for base in kind.__mro__)
