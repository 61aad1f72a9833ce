"""The plan of the seal: its id is the build's."""

from __future__ import annotations

from collections.abc import Iterator

from image_builder.bake.plan.model import StagePlan
from image_builder.bake.stages.kind import Draft, StageKind
from image_builder.bake.stages.layer import PLAY_DATA, play_options
from image_builder.canonical import JSON
from image_builder.definition import ImageDefinition, PlaybookReading, seal_reading
from image_builder.system.trees import named_digests

SEAL = "seal"
_PLAYBOOK = "playbooks/seal.yml"


def _plan(draft: Draft) -> Iterator[StagePlan]:
    reading = seal_reading(draft.definition, _PLAYBOOK)
    options: dict[str, JSON] = {
        "playbook": _PLAYBOOK,
        "image": draft.definition.name,
        "distribution": draft.definition.base.distribution,
        "layers": draft.definition.layers,
        "source_date_epoch": draft.lock.source_date_epoch,
        **play_options(draft, SEAL, reading),
    }
    code = {**draft.code(KIND), **named_digests(reading.files)}
    yield StagePlan(SEAL, KIND.name, options, code, draft.tree_ids, places=reading.files)


def _reading(definition: ImageDefinition, _stage: StagePlan) -> PlaybookReading:
    return seal_reading(definition, _PLAYBOOK)


KIND = StageKind(
    SEAL, "image_builder.bake.stages.seal.run", _plan, PLAY_DATA, enterable=True, reading=_reading
)
