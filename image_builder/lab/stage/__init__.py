"""The lab as a supplier of images: the plan of the stage that builds them, and the registry that serves them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from image_builder.bake.lock.requirements import Group, Requirements
from image_builder.bake.plan.model import StagePlan
from image_builder.bake.stages.kind import Draft, Need, Sizes, StageKind, Supplier
from image_builder.bake.stages.root import TOOLS
from image_builder.canonical import JSON
from image_builder.definition import ImageDefinition
from image_builder.lab import pause, software

if TYPE_CHECKING:
    from image_builder.bake.pull.network import Endpoint

LAB_IMAGES = "lab_images"
# Bytes in the registry per byte of package: images are kept as compressed layers of their packages.
_COMPRESSED = 1.6


def _references(definition: ImageDefinition) -> tuple[str, ...]:
    """Return the package-based images built for a definition: `software`, and any others that it preloads."""
    preloaded = {image.ref for image in definition.preload}
    return tuple(ref for ref in software.IMAGES if ref == software.REFERENCE or ref in preloaded)


def _needs(definition: ImageDefinition) -> Requirements:
    names = {name for ref in _references(definition) for layer in software.IMAGES[ref] for name in layer}
    return Requirements({LAB_IMAGES: Group(software.SUITE, tuple(sorted(names)))})


def _plan(draft: Draft) -> Iterator[StagePlan]:
    options: dict[str, JSON] = {
        "packages": draft.lock.group(LAB_IMAGES).digest,
        "images": list(_references(draft.definition)),
    }
    yield StagePlan(LAB_IMAGES, KIND.name, options, draft.code(KIND), inputs={TOOLS: draft.id(TOOLS)})


def _space(stage: StagePlan, sizes: Sizes) -> Need:
    return Need(sizes.packed.get(stage.name, 0.0) * _COMPRESSED, sizes.unpacked.get(stage.name, 0.0))


@contextmanager
def _serve(tools: Path, product: Path, work: Path) -> Iterator[Endpoint]:
    from image_builder.bake.pull.network import Endpoint
    from image_builder.lab.registry import serve

    with serve(tools, product / "registry", work) as registry:
        yield Endpoint(pause.HOST, registry.address, registry.port, registry.ca)


KIND = StageKind(LAB_IMAGES, "image_builder.lab.stage.run", _plan, needs=_needs, space=_space)
SUPPLIER = Supplier(KIND, pause.HOST, _serve)
