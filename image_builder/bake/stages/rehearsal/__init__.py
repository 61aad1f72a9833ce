"""The plan of the rehearsal, which runs the very node agent that is shipped."""

from __future__ import annotations

from collections.abc import Iterator

from image_builder.bake.plan.model import StagePlan
from image_builder.bake.stages.kind import Draft, StageKind
from image_builder.bake.stages.preload import engines, images, name_of
from image_builder.bake.stages.preload_store import PRELOAD_STORE


def _plan(draft: Draft) -> Iterator[StagePlan]:
    pulls = {engine: draft.id(name_of(draft, engine)) for engine in engines(draft.definition)}
    yield StagePlan(
        KIND.name,
        KIND.name,
        {"images": [image.for_store() for image in images(draft)], "engines": engines(draft.definition)},
        draft.code(KIND),
        inputs={PRELOAD_STORE: draft.id(PRELOAD_STORE), **pulls},
        ground=draft.tree_ids,
    )


# The whole agent is packed as it is here.
KIND = StageKind(
    "rehearsal", "image_builder.bake.stages.rehearsal.run", _plan, ("image_builder/node",), beside=True
)
