"""The plan of the preload store: what all engines have pulled, packed."""

from __future__ import annotations

from collections.abc import Iterator

from image_builder.bake.plan.draft import FIXED_EPOCH, Draft
from image_builder.bake.plan.model import StagePlan
from image_builder.bake.stages.kind import Need, Sizes, StageKind
from image_builder.bake.stages.preload.plan import engines, images, name_of
from image_builder.bake.stages.tools.plan import TOOLS
from image_builder.canonical import JSON

PRELOAD_STORE = "preload_store"
# Bytes of the store (lz4) per byte of the images' files.
PACKED = 0.6


def stored_images(draft: Draft) -> list[dict[str, JSON]]:
    """Return the images to preload, each with its mode and whether it is required."""
    modes = {i.ref: i.mode or draft.definition.preload_mode for i in draft.definition.preload}
    required = {i.ref: i.required for i in draft.definition.preload}
    return [{**i, "mode": modes[str(i["ref"])], "required": required[str(i["ref"])]} for i in images(draft)]


def _plan(draft: Draft) -> Iterator[StagePlan]:
    pulls = {engine: draft.id(name_of(draft, engine)) for engine in engines(draft.definition)}
    yield StagePlan(
        PRELOAD_STORE,
        KIND.name,
        {
            "images": stored_images(draft),
            "verity": draft.definition.preload_verity,
            "source_date_epoch": FIXED_EPOCH,
        },
        draft.code(KIND),
        inputs={TOOLS: draft.id(TOOLS), **pulls},
        ground=draft.tree_ids,
    )


def _space(_stage: StagePlan, sizes: Sizes) -> Need:
    return Need(PACKED * sizes.images)


KIND = StageKind(
    PRELOAD_STORE, "image_builder.bake.stages.preload_store.run", _plan, space=_space, beside=True
)
