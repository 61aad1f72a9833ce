"""The plan of the artifacts, in the formats that are published."""

from __future__ import annotations

from collections.abc import Iterator

from image_builder.bake.plan.model import StagePlan
from image_builder.bake.stages.disk import DISK, PER_TREE, has_disk
from image_builder.bake.stages.kind import Draft, Need, Sizes, StageKind
from image_builder.bake.stages.root import TOOLS
from image_builder.bake.stages.seal import SEAL
from image_builder.canonical import JSON

CONVERT = "convert"
# Bytes of an artifact per byte of tree; in the store, raw is the disk stage's file.
_FORMATS = {"raw": PER_TREE, "vhd": PER_TREE, "qcow2": 0.5, "tar": 1.05}


def _plan(draft: Draft) -> Iterator[StagePlan]:
    options: dict[str, JSON] = {
        "image": draft.definition.name,
        "formats": draft.definition.formats,
        "build_id": draft.id(SEAL),
        "source_date_epoch": draft.lock.source_date_epoch,
    }
    made_from = (DISK, TOOLS) if has_disk(draft.definition) else (TOOLS,)
    inputs = {name: draft.id(name) for name in made_from}
    yield StagePlan(CONVERT, KIND.name, options, draft.code(KIND), draft.tree_ids, inputs)


def _space(stage: StagePlan, sizes: Sizes) -> Need:
    per_tree = {name: sizes.tree * _FORMATS[name] for name in stage.options["formats"]}
    return Need(
        product=sum(size for name, size in per_tree.items() if name != "raw"), output=sum(per_tree.values())
    )


KIND = StageKind(CONVERT, "image_builder.bake.stages.convert.run", _plan, space=_space)
