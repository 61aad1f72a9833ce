"""A kind of stage as the rest of a bake knows it: everything but what the stage does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from image_builder.bake.lock.requirements import Requirements

if TYPE_CHECKING:
    from image_builder.bake.lock.model import Lock, LockedArchive, LockedFile
    from image_builder.bake.plan.draft import Draft
    from image_builder.bake.plan.model import StagePlan
    from image_builder.bake.pull.network import Endpoint
    from image_builder.definition import ImageDefinition

MIB = 1 << 20


@dataclass(frozen=True)
class Need:
    """Bytes that a stage takes: of its product in the store, beside that while it runs, and of what is published."""

    product: float = 0.0
    scratch: float = 0.0
    output: float = 0.0


@dataclass(frozen=True)
class Sizes:
    """Bytes: of each group's packages, packed and unpacked; of the preloaded images' files; of the image's tree."""

    packed: Mapping[str, float]
    unpacked: Mapping[str, float]
    images: float
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

    ``module`` has its ``run``; that file is the code in the stages' ids, with ``data``, files and folders of this
    checkout that a run gets in other ways, and all that these import. ``plan`` yields the stages of this kind that an
    image has; the caller takes up each of them before it asks for the next one.

    ``needs`` is what has to be locked, ``space`` what a stage takes, ``files`` which locked files are linked into
    its directory. ``shared`` counts what a stage may take over from an earlier one, by the options of both.

    A stage that runs ``beside`` the layers waits for the network, and for nothing that a layer makes; one that
    ``pulls`` asks registries. One may enter an ``enterable`` one when it failed (``--shell-on-failure``).
    ``reports`` are documents that are kept of a failed one. ``layer`` names the layer that installs what it builds.
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


@dataclass(frozen=True)
class Supplier:
    """Images that no public registry has: a stage that makes them, which needs only the tools tree, and a
    registry under the name ``host``.

    ``serve`` takes the tools tree, the stage's product and a directory to work in, and serves while its block lasts.
    """

    kind: StageKind
    host: str
    serve: Callable[[Path, Path, Path], AbstractContextManager[Endpoint]]

    def has(self, ref: str) -> bool:
        """Tell whether a reference names one of its images."""
        return ref.startswith(f"{self.host}/")

    def serves(self, definition: ImageDefinition) -> bool:
        """Tell whether an image preloads something from here."""
        return any(self.has(image.ref) for image in definition.preload)


@dataclass(frozen=True)
class Extensions:
    """What other packages hand in to a bake: the stage that verifies a sealed image, and a supplier of images."""

    verification: StageKind
    supplier: Supplier
