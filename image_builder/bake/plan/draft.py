"""A plan in the making: what the stages of an image are planned from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from image_builder.bake.lock.model import Lock
from image_builder.bake.plan.closure import Code
from image_builder.bake.plan.model import Plan, StagePlan
from image_builder.bake.stages.kind import StageKind
from image_builder.definition import ImageDefinition

# Trees that aren't part of an image get a fixed date, so that they are shared by images and locks.
FIXED_EPOCH = 1735689600  # 2025-01-01T00:00:00Z


class Draft:
    """An image, its lock, and the stages that it has so far; ``trees`` are those that make up its root, lowest first,
    ``suppliers`` those that make images to pull.

    ``kinds`` are all kinds of stages by name, ``warnings`` say which stages never are the same.
    """

    def __init__(
        self, definition: ImageDefinition, lock: Lock, repo_root: Path, kinds: Mapping[str, StageKind]
    ) -> None:
        self.definition = definition
        self.lock = lock
        self.repo_root = repo_root
        self.kinds = kinds
        self.stages: list[StagePlan] = []
        self.trees: list[StagePlan] = []
        self.suppliers: list[StagePlan] = []
        self.warnings: list[str] = []
        self._code = Code(repo_root)
        self._code_of: dict[str, dict[str, str]] = {}

    def add(self, *stages: StagePlan) -> None:
        """Take up stages that are no part of the root, or not yet."""
        self.stages += stages

    def lay(self, stage: StagePlan) -> None:
        """Take up a stage whose tree is the topmost one of the root from now on."""
        self.stages.append(stage)
        self.trees.append(stage)

    def id(self, name: str) -> str:
        """Return the id of an earlier stage; raises KeyError."""
        return {stage.name: stage.id for stage in self.stages}[name]

    @property
    def tree_ids(self) -> tuple[str, ...]:
        """Return the ids of the root's trees, topmost first: the order of overlay's lowerdir."""
        return tuple(reversed([tree.id for tree in self.trees]))

    def code(self, kind: StageKind) -> dict[str, str]:
        """Return the digests of the files that decide what stages of a kind make."""
        if kind.name not in self._code_of:
            self._code_of[kind.name] = self._code.of_stage(kind.module, kind.data)
        return self._code_of[kind.name]

    def plan(self) -> Plan:
        """Return the plan as it is now."""
        return Plan(self.definition.name, tuple(self.stages), tuple(self.warnings))
