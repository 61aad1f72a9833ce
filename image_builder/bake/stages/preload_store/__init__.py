"""The plan of the preload store, which packs what all engines have pulled."""

from __future__ import annotations

from collections.abc import Iterator

from image_builder.bake.plan.model import StagePlan
from image_builder.bake.stages.kind import FIXED_EPOCH, Draft, Need, Sizes, StageKind
from image_builder.bake.stages.preload import engines, images, name_of
from image_builder.bake.stages.root import TOOLS

PRELOAD_STORE = "preload_store"


def _plan(draft: Draft) -> Iterator[StagePlan]:
    pulls = {engine: draft.id(name_of(draft, engine)) for engine in engines(draft.definition)}
    yield StagePlan(
        PRELOAD_STORE,
        KIND.name,
        {
            "images": [image.for_store() for image in images(draft)],
            "verity": draft.definition.preload_verity,
            "source_date_epoch": FIXED_EPOCH,
        },
        draft.code(KIND),
        inputs={TOOLS: draft.id(TOOLS), **pulls},
        ground=draft.tree_ids,
    )


def _space(_stage: StagePlan, sizes: Sizes) -> Need:
    return Need(sizes.store)


KIND = StageKind(
    PRELOAD_STORE, "image_builder.bake.stages.preload_store.run", _plan, space=_space, beside=True
)
