"""Data with a strict schema, and operators' YAML settings files validated against one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from image_builder.errors import DefinitionError, Problem

Model = TypeVar("Model", bound=BaseModel)


class Strict(BaseModel):
    """Frozen data with strict types and no unknown keys. In JSON, its tuples are lists."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


def load(path: Path, model: type[Model], subject: str) -> Model:
    """Return the settings in a file; ``subject`` names them in problems that concern the whole file.

    An empty file means no settings. Raises DefinitionError with all problems.
    """
    try:
        # As JSON: YAML has no tuples, and a strict model accepts a list for a tuple only from JSON.
        return model.model_validate_json(json.dumps(_parse(path.read_text(encoding="utf-8")), default=str))
    except OSError as error:
        raise DefinitionError([Problem(str(path), subject, str(error.strerror))]) from error
    except ValidationError as error:
        faults = [(".".join(map(str, fault["loc"])) or subject, fault["msg"]) for fault in error.errors()]
        raise DefinitionError([Problem(str(path), *fault) for fault in faults]) from error
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        # Not UTF-8, not YAML, an invalid date, a date as a key, or an alias of its own parent.
        raise DefinitionError([Problem(str(path), subject, " ".join(str(error).split()))]) from error


def _parse(text: str) -> Any:
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return {}
        _refuse_doubles(node, set())
        content = loader.construct_document(node)
    finally:
        loader.dispose()
    return {} if content is None else content


def _refuse_doubles(node: yaml.Node, done: set[int]) -> None:
    """Raise YAMLError for a duplicate key: PyYAML silently keeps only the last one."""
    if isinstance(node, yaml.ScalarNode) or id(node) in done:
        return
    done.add(id(node))
    if isinstance(node, yaml.MappingNode):
        keys: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in keys:
                    raise yaml.MarkedYAMLError(
                        problem=f"duplicate key {key.value}", problem_mark=key.start_mark
                    )
                keys.add(key.value)
    for part in node.value:
        for each in part if isinstance(part, tuple) else (part,):
            _refuse_doubles(each, done)
