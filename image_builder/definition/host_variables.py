"""One host's variables in an inventory: where each was set, and the builder's own ones, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from image_builder.canonical import JSON
from image_builder.definition import engine
from image_builder.definition.model import (
    BUILDER_NAMES,
    BuilderVariables,
    ImageBase,
    ImageDisk,
    ImagePull,
    PreloadedImage,
    parse_builder_variables,
)
from image_builder.definition.values import VAULT_HINT, Place, is_vaulted, join_path, stand_in, strings
from image_builder.errors import Problem, VaultError
from image_builder.text import did_you_mean


@dataclass(frozen=True)
class HostVariables:
    """One host's variables: plain, with Ansible's tags, and where each was set."""

    plain: Mapping[str, JSON]
    tagged: Mapping[str, Any]
    places: Mapping[str, Place]

    def where(self, path: Sequence[str | int]) -> str:
        """Return ``file:line`` of the item at ``path``, or of its nearest parent whose place is known."""
        name = str(path[0])
        inner = engine.place_in(self.tagged[name], path[1:]) if name in self.tagged else None
        place = inner or self.places.get(name)
        return str(place) if place else ""

    def place_of(self, text: str) -> str:
        """Return ``file:line`` of the value that is exactly ``text``, or an empty string if there is none."""
        values: list[Any] = list(self.tagged.values())
        while values:
            value = values.pop()
            if isinstance(value, Mapping):
                values += value.values()
            elif isinstance(value, list):
                values += value
            elif isinstance(value, str) and value == text:
                return str(engine.place_of(value) or "")
        return ""


def read_host_variables(source: engine.Source, name: str) -> HostVariables:
    """Return a host's variables. Raises VaultError if a value can't be decrypted."""
    tagged, places = source.host_variables(name)
    failures = [
        f"{place or places[key]}  {key}: {reason}"
        for key, value in tagged.items()
        for place, reason in engine.undecryptable(value, source)
    ]
    if failures:
        raise VaultError("\n".join(sorted(failures)), hint=VAULT_HINT)
    plain: dict[str, JSON] = {}
    for key, value in tagged.items():
        plain[key] = engine.plain(value)
        if vaulted_file := source.vaulted.digests.get(places[key].path):
            plain[key] = stand_in(vaulted_file, plain[key], tagged.keys())
    plain["inventory_hostname"] = name
    plain["group_names"] = source.group_names(name)
    return HostVariables(MappingProxyType(plain), tagged, places)


def builder_variables(
    name: str,
    variables: HostVariables,
    host: Place,
    magic: Mapping[str, JSON],
    hostvars: Callable[[], Mapping[str, JSON]],
) -> tuple[BuilderVariables | None, list[Problem]]:
    """Template and check an image's ``image_*`` variables.

    ``magic`` are the variables that Ansible sets itself; ``hostvars`` returns those of every host, for values that
    mention it.
    """
    known = {**variables.plain, **magic}
    if any("hostvars" in text for value in variables.plain.values() for text in strings(value)):
        known["hostvars"] = hostvars()
    evaluator = engine.Evaluator(known)
    values: dict[str, JSON] = {}
    problems: list[Problem] = []
    for key in sorted(BUILDER_NAMES & variables.plain.keys()):
        try:
            value = evaluator.evaluate(variables.plain[key])
        except engine.EvaluationError as error:
            problems.append(Problem(variables.where([key]), key, str(error)))
            continue
        if is_vaulted(value):
            problems.append(
                Problem(variables.where([key]), key, "a builder variable can't hold a vaulted value")
            )
            continue
        values[key] = value
    parsed = parse_builder_variables(values)
    if isinstance(parsed, BuilderVariables):
        return (None if problems else parsed), problems
    refused = {p.path for p in problems}
    for fault in parsed:
        path = join_path(fault.path)
        if path in refused:
            continue
        reason = fault.reason
        if fault.reason == "is missing" and len(fault.path) == 1:
            problems.append(Problem(str(host), path, f"image `{name}` doesn't have it"))
            continue
        if fault.reason == "unknown key":
            reason += _key_suggestion(fault.path)
        problems.append(Problem(variables.where(fault.path), path, reason))
    return None, problems


def _key_suggestion(path: Sequence[str | int]) -> str:
    models = {
        "image_base": ImageBase.model_fields,
        "image_disk": ImageDisk.model_fields,
        "image_preload": PreloadedImage.model_fields,
        "image_pull": ImagePull.model_fields,
    }
    fields = models.get(str(path[0]), {})
    return did_you_mean(str(path[-1]), fields)
