"""The context of a running stage. Each folder here is a kind of stage: its plan and, in ``run.py``, its hashed code."""

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
    """Everything that a stage gets while it runs.

    ``work`` is scratch space on the store's filesystem and is deleted afterwards; ``product`` is the directory to fill,
    committed by rename. ``lowers`` are the trees of the stages below, topmost first, ``ground`` those that the stage
    only works in (see ``StagePlan``). ``inputs`` maps an input's name to the product directory of that stage. ``repo``
    is a flat local apt repository with the locked packages that this stage may install, ``files`` a directory with its
    other locked files: those of a source package by name, archives by SHA-256. ``shell``, if set, opens a shell on the
    terminal in a root in which something failed. ``endpoints`` says where registries that aren't in DNS are reached,
    ``network`` how all others are; ``previous`` is the product of an earlier stage of the same name to take over from,
    and ``stop`` is set when the build is to end.
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
        """Report, in a few words, what is happening now."""
        self.monitor.stage_doing(self.plan.name, action)


Stage = Callable[[StageContext], Mapping[str, JSON]]
