"""A YAML file of an operator's settings, held to a strict model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from image_builder.errors import DefinitionError, Problem

Model = TypeVar("Model", bound=BaseModel)


def load(path: Path, model: type[Model], what: str) -> Model:
    """Return the settings in a file; ``what`` they are is told where a problem is of the whole.

    An empty file has none. Raises DefinitionError with all problems.
    """
    try:
        found = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)  # noqa: S506 (a safe one)
        # As JSON: YAML has no tuples, and a strict model takes a list for one from JSON alone.
        return model.model_validate_json(json.dumps({} if found is None else found, default=str))
    except OSError as error:
        raise DefinitionError([Problem(str(path), what, str(error.strerror))]) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DefinitionError([Problem(str(path), what, " ".join(str(error).split()))]) from error
    except ValidationError as error:
        faults = [(".".join(map(str, fault["loc"])) or what, fault["msg"]) for fault in error.errors()]
        raise DefinitionError([Problem(str(path), *fault) for fault in faults]) from error


class _Loader(yaml.SafeLoader):
    """Takes no key twice: of two limits PyYAML would keep the last, and nobody would hear of the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{key.value} is there twice", key.start_mark
                    )
                seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)
