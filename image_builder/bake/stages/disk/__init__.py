"""The plan of the disk."""

from __future__ import annotations

from collections.abc import Iterator

from image_builder.bake.plan.model import StagePlan
from image_builder.bake.stages.kind import MIB, Draft, Need, Sizes, StageKind
from image_builder.bake.stages.root import TOOLS
from image_builder.bake.stages.seal import SEAL
from image_builder.canonical import JSON
from image_builder.definition import ImageDefinition, resolved_variables

DISK = "disk"
# Bytes of a disk per byte of tree.
PER_TREE = 1.05
_BOOT_FILES = 150 * MIB


def has_disk(definition: ImageDefinition) -> bool:
    """Return whether an image has a disk: an image that can't boot, and is published only as a tar, has none."""
    bootable = resolved_variables(definition).get("system_bootable", True)
    return bootable is not False or set(definition.formats) != {"tar"}


def _plan(draft: Draft) -> Iterator[StagePlan]:
    if not has_disk(draft.definition):
        return
    options: dict[str, JSON] = {
        "disk": draft.definition.disk.model_dump(mode="json"),
        "kernel_args": draft.definition.kernel_args,
        "secure_boot": draft.definition.secure_boot,
        "build_id": draft.id(SEAL),
        "source_date_epoch": draft.lock.source_date_epoch,
    }
    inputs = {TOOLS: draft.id(TOOLS)}
    yield StagePlan(DISK, KIND.name, options, draft.code(KIND), draft.tree_ids, inputs)


def _space(_stage: StagePlan, sizes: Sizes) -> Need:
    return Need(sizes.tree * PER_TREE + _BOOT_FILES)


KIND = StageKind(
    DISK,
    "image_builder.bake.stages.disk.run",
    _plan,
    ("image_builder/bake/firmware_authorities.pem",),
    space=_space,
)
