"""The node agent's settings, as the roles render them, read by the agent's own parsers before anything is baked."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from image_builder.canonical import JSON
from image_builder.definition import engine
from image_builder.definition.evaluate import EvaluatedRole, where_set
from image_builder.definition.host_variables import HostVariables
from image_builder.definition.roles import Role
from image_builder.definition.values import join_path, words
from image_builder.errors import Problem
from image_builder.node import check, settings

_PROBLEM = re.compile(r"([A-Za-z_][\w.\[\]-]*?):? (.*)", re.DOTALL)


def agent_problems(
    role: Role, evaluated: EvaluatedRole, variables: HostVariables, known: Collection[str]
) -> Iterator[Problem]:
    """Yield what the agent would refuse in the documents that a role writes for it.

    Each problem is that of the variable that the document's value is made from, except the variables that are ``known``
    to be wrong. A document that depends on a vaulted value, or on what only a play knows, isn't read.
    """
    for name, template in _documents(role, evaluated):
        names = words(template) & evaluated.raw.keys()
        if not names <= evaluated.values.keys():
            continue
        text = engine.Evaluator({each: evaluated.values[each] for each in names}).evaluate(template)
        for problem in check.problems(name, json.loads(str(text))):
            found = _PROBLEM.fullmatch(problem)
            path, reason = (found[1], found[2]) if found else ("", problem)
            variable, *inner = _origin(role, evaluated.raw, template, _parts(path))
            if variable not in known:
                where = variables.where([variable, *inner]) or where_set(
                    role, evaluated, variables, str(variable)
                )
                yield Problem(where, join_path([variable, *inner]), reason)


def _documents(role: Role, evaluated: EvaluatedRole) -> Iterator[tuple[str, str]]:
    """Yield the name and the template of each of the agent's documents that a role writes."""
    files = evaluated.values.get(f"__{role.prefix}_files")
    for file in files if isinstance(files, list) else ():
        if isinstance(file, Mapping) and str(file.get("dest", "")).startswith(f"{settings.DIRECTORY}/"):
            name = str(file["dest"]).rpartition("/")[2].removesuffix(".json")
            yield name, (role.path / "templates" / str(file["src"])).read_text(encoding="utf-8")


def _parts(path: str) -> list[str | int]:
    return [int(part) if part.isdigit() else part for part in re.findall(r"[^.\[\]]+", path)]


def _origin(role: Role, raw: Mapping[str, JSON], template: str, path: list[str | int]) -> list[str | int]:
    """Return the public variable that the value at a path of a document is made from, and the path in that.

    The path's own name is returned if there is none: its value is fixed.
    """
    value: Any = template
    rest = list(path)
    while isinstance(value, str):
        names = [name for name in re.findall(r"\w+", value) if name in raw]
        public = [name for name in dict.fromkeys(names) if name in role.options]
        if public:
            for name in public if rest and len(public) > 1 else ():
                if name.endswith(f"_{rest[0]}"):
                    return [name, *rest[1:]]
            return [public[0], *rest]
        if not names:
            break
        value = raw[names[0]]
        while isinstance(value, Mapping) and rest and rest[0] in value:
            value = value[rest.pop(0)]
    return path or [role.name]
