"""The plan as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from image_builder.canonical import JSON, digest


def value_digests(values: Mapping[str, JSON]) -> dict[str, str]:
    """Return the SHA-256 of each variable's name and value: a plan is shown and recorded without the values."""
    return {name: digest([name, value]) for name, value in values.items()}


@dataclass(frozen=True)
class StagePlan:
    """One planned stage.

    ``name`` is unique in its plan and shown to people; ``kind`` is the name of its ``StageKind``.
    ``options`` are the values that the stage depends on, as its ``run`` takes them: JSON values, tuples for lists.
    ``code`` maps each file that its result depends on to that file's SHA-256, ``lowers`` are the ids of the trees it
    is mounted on (topmost first), ``inputs`` names the other stages whose products it reads.

    ``ground`` are trees (topmost first) that a stage works in, and ``needs`` are further stages that must be finished
    for it to run. They don't decide its result: whatever counts about them is in ``options``. The container engine
    that pulls the preloaded images runs in the image's own tree, for example, but only its packages count. Neither
    is part of the id, nor are ``places``: where the files in ``code`` are that aren't this program's code.
    """

    name: str
    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)
    code: Mapping[str, str] = field(default_factory=dict)
    lowers: tuple[str, ...] = ()
    inputs: Mapping[str, str] = field(default_factory=dict)
    ground: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    places: Mapping[str, Path] = field(default_factory=dict)

    @property
    def requires(self) -> frozenset[str]:
        """Return the ids of all stages that must be finished before this one runs."""
        return frozenset((*self.lowers, *self.inputs.values(), *self.ground, *self.needs))

    @property
    def parts(self) -> dict[str, JSON]:
        """Return the parts that make up the id, as one JSON object."""
        return {
            "kind": self.kind,
            "options": self.options,
            "code": self.code,
            "lowers": self.lowers,
            "inputs": self.inputs,
        }

    @cached_property
    def id(self) -> str:
        """Return the stage's id: 64 hex digits over all its parts."""
        return digest(self.parts)


@dataclass(frozen=True)
class Plan:
    """The stages of one image, each after everything it needs. ``warnings`` say which of them differ in every build."""

    image: str
    stages: tuple[StagePlan, ...]
    warnings: tuple[str, ...] = ()

    def stage(self, name: str) -> StagePlan:
        """Return the stage called ``name``; raises KeyError."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(name)

    @property
    def build_id(self) -> str:
        """Return the build's id: that of the sealed tree, which all artefacts are made from."""
        return self.stage("seal").id

    def as_json(self) -> dict[str, JSON]:
        """Return the plan for other tools."""
        return {
            "image": self.image,
            "build_id": self.build_id,
            "warnings": self.warnings,
            "stages": [{"name": s.name, "id": s.id, **s.parts} for s in self.stages],
        }
