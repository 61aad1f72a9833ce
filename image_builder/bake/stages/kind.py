"""A kind of stage as the rest of a bake knows it, apart from what the stage does; and the draft of a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from image_builder.bake.lock.requirements import Requirements
from image_builder.bake.plan.closure import Code
from image_builder.bake.plan.model import Plan, StagePlan

if TYPE_CHECKING:
    from image_builder.bake.lock.model import Lock, LockedArchive, LockedFile
    from image_builder.bake.pull.network import Endpoint
    from image_builder.definition import ImageDefinition, PlaybookReading

MIB = 1 << 20
# Trees that aren't part of an image get a fixed date, so that images and locks can share them.
FIXED_EPOCH = 1735689600  # 2025-01-01T00:00:00Z


@dataclass(frozen=True)
class Need:
    """The bytes that a stage takes: its product in the store, its scratch while it runs, and what is published."""

    product: float = 0.0
    scratch: float = 0.0
    output: float = 0.0


@dataclass(frozen=True)
class Sizes:
    """Sizes in bytes: of each group's packages, packed and unpacked; of the preloaded images' layers as a registry's
    ``blobs``, as files, in the archive and in the store; of the image's tree.
    """

    packed: Mapping[str, float]
    unpacked: Mapping[str, float]
    blobs: float
    images: float
    archive: float
    store: float
    tree: float


def _needs_nothing(_definition: ImageDefinition) -> Requirements:
    return Requirements()


def _unpacks(stage: StagePlan, sizes: Sizes) -> Need:
    return Need(sizes.unpacked.get(stage.name, 0.0))


def _no_files(_stage: StagePlan, _lock: Lock) -> Sequence[LockedFile | LockedArchive]:
    return ()


@dataclass(frozen=True)
class StageKind:
    """One kind of stage.

    ``module`` has its ``run``. That file is the code in the stages' ids, along with ``data`` (files and folders of this
    checkout that a run gets in other ways) and everything that these import. ``plan`` yields an image's stages of this
    kind; the caller adds each of them to the draft before it requests the next one.

    ``needs`` is what has to be locked, ``space`` what a stage takes, ``files`` which locked files are linked into
    its directory. ``shared`` counts what a stage can take over from an earlier one, given the options of both.

    A stage that runs ``beside`` the layers waits for the network or compiles, and requires none of the upper layers;
    one that ``pulls`` contacts registries. An ``enterable`` stage can be entered after it failed
    (``--shell-on-failure``). ``reports`` are the documents kept from a failed stage. ``layer`` names the layer that
    installs what the stage builds. ``reading`` returns what the play of a stage reads, if it runs one.
    """

    name: str
    module: str
    plan: Callable[[Draft], Iterable[StagePlan]]
    data: tuple[str, ...] = ()
    needs: Callable[[ImageDefinition], Requirements] = _needs_nothing
    space: Callable[[StagePlan, Sizes], Need] = _unpacks
    files: Callable[[StagePlan, Lock], Sequence[LockedFile | LockedArchive]] = _no_files
    shared: Callable[[Mapping[str, Any], Mapping[str, Any]], int] | None = None
    beside: bool = False
    pulls: bool = False
    enterable: bool = False
    reports: tuple[str, ...] = ()
    layer: str | None = None
    reading: Callable[[ImageDefinition, StagePlan], PlaybookReading] | None = None


class Draft:
    """An image, its lock, and its stages so far; ``trees`` are those that make up its root, lowest first, ``suppliers``
    those that make images to pull.

    ``kinds`` are all kinds of stages by name; ``warnings`` say which stages differ in every build.
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
        """Add stages that aren't part of the root, or not yet."""
        self.stages += stages

    def lay(self, stage: StagePlan) -> None:
        """Add a stage whose tree becomes the topmost one of the root."""
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
        """Return the digests of the files that determine what stages of a kind make."""
        if kind.name not in self._code_of:
            self._code_of[kind.name] = self._code.of_stage(kind.module, kind.data)
        return self._code_of[kind.name]

    def plan(self) -> Plan:
        """Return the plan as it is now."""
        return Plan(self.definition.name, tuple(self.stages), tuple(self.warnings))


@dataclass(frozen=True)
class Supplier:
    """A source of images that no public registry has: a stage that makes them, which needs only the tools tree, and
    a registry under the name ``host``.

    ``serve`` takes the tools tree, the stage's product and a working directory, and serves until its block ends.
    """

    kind: StageKind
    host: str
    serve: Callable[[Path, Path, Path], AbstractContextManager[Endpoint]]

    def has(self, ref: str) -> bool:
        """Return whether a reference names one of its images."""
        return ref.startswith(f"{self.host}/")

    def serves(self, definition: ImageDefinition) -> bool:
        """Return whether an image preloads any of its images."""
        return any(self.has(image.ref) for image in definition.preload)


@dataclass(frozen=True)
class Extensions:
    """What other packages contribute to a bake: the stage that verifies a sealed image, and a supplier of images."""

    verification: StageKind
    supplier: Supplier
