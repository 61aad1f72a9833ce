"""The context of a stage that runs. Each folder here is a kind of stage: what is planned and, in ``run.py``, hashed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from image_builder.bake.plan.model import StagePlan
from image_builder.bake.pull.network import Endpoints, Network
from image_builder.canonical import JSON
from image_builder.events import Monitor
from image_builder.settings import Settings
from image_builder.system.sandbox import Root

if TYPE_CHECKING:
    from image_builder.definition import ImageDefinition


@dataclass(frozen=True)
class StageContext:
    """A stage's whole world while it runs.

    ``work`` is scratch on the store's filesystem and is deleted afterwards; ``product`` is the directory to
    fill, committed by rename. ``lowers`` are the trees of the stages below, topmost first, ``ground`` those of the
    trees that it only works in (see ``StagePlan``). ``inputs`` maps
    an input's name to the product directory of that stage. ``repo`` is a flat local apt repository with the
    locked packages that this stage may install, ``files`` a directory of its other locked files: those of a source
    package by name, those with an address by SHA-256. ``shell``, when set, gives the terminal a shell in a root
    in which something failed. ``endpoints`` says where registries are reached that no DNS knows, ``network`` how all
    others are, ``previous`` is the product of the last finished stage of this kind that it may take over
    from, and ``stop`` is set when the build is to end.
    """

    plan: StagePlan
    definition: ImageDefinition
    work: Path
    product: Path
    lowers: tuple[Path, ...]
    ground: tuple[Path, ...]
    inputs: Mapping[str, Path]
    repo: Path | None
    files: Path | None
    monitor: Monitor
    log: Path
    settings: Settings
    shell: Callable[[Root], None] | None = None
    endpoints: Endpoints = field(default_factory=dict)
    network: Network = field(default_factory=Network)
    previous: Path | None = None
    stop: threading.Event = field(default_factory=threading.Event)

    def doing(self, action: str) -> None:
        """Tell in a few words what happens now."""
        self.monitor.stage_doing(self.plan.name, action)


Stage = Callable[[StageContext], Mapping[str, JSON]]
