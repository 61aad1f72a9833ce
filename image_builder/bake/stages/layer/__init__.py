"""The plans of an image's layers: one playbook each, on top of those below."""

from __future__ import annotations

import importlib.metadata
import secrets
from collections.abc import Iterator, Sequence

from image_builder.bake.lock.model import Lock, LockedArchive
from image_builder.bake.lock.requirements import Group, Requirements
from image_builder.bake.plan.model import StagePlan, value_digests
from image_builder.bake.stages.kind import MIB, Draft, Need, Sizes, StageKind
from image_builder.bake.stages.root import BASE
from image_builder.canonical import JSON
from image_builder.definition import ImageDefinition, PlaybookReading, Repository, layer_needs, layer_reading
from image_builder.system.trees import named_digests

# Files that a play reads by path, not by import.
PLAY_DATA = ("image_builder/bake/plugins/connection/sandbox.py",)
# The packages that decide bytes when Ansible evaluates and templates: Ansible itself, its libraries, those of filters.
EVALUATORS = ("ansible-core", "jinja2", "pyyaml", "libpass", "netaddr", "jmespath")
# Space for what a layer writes besides its packages: initramfs, dpkg's database, copied-up files, built programs.
WRITTEN = 60 * MIB


def play_options(draft: Draft, stage: str, reading: PlaybookReading) -> dict[str, JSON]:
    """Return the options that say what a play reads. What only the play can know counts as new every time."""
    options: dict[str, JSON] = {
        "variables": value_digests(reading.variables),
        "values": value_digests(reading.values),
        "ansible": {name: importlib.metadata.version(name) for name in EVALUATORS},
    }
    if reading.unknown:
        options["unknown"] = reading.unknown
        options["run"] = secrets.token_hex(16)
        draft.warnings += [f"stage {stage} runs in every build: {reason}" for reason in reading.unknown]
    return options


def repositories(definition: ImageDefinition, layers: Sequence[str] | None = None) -> tuple[Repository, ...]:
    """Return the third-party repositories that the image has with these layers, by default with all of them."""
    by_name: dict[str, Repository] = {}
    for layer in definition.layers if layers is None else layers:
        by_name.update({r.name: r for r in layer_needs(definition, layer).repositories})
    return tuple(by_name.values())


def archive_digests(definition: ImageDefinition, layer: str) -> list[str]:
    """Return the SHA-256 of each file that a layer's roles fetch by address, sorted."""
    return sorted(a.sha256 for a in layer_needs(definition, layer).archives)


def _needs(definition: ImageDefinition) -> Requirements:
    groups: dict[str, Group] = {}
    archives: dict[str, tuple[LockedArchive, ...]] = {}
    below = BASE
    for number, layer in enumerate(definition.layers, 1):
        needs = layer_needs(definition, layer)
        groups[layer] = Group(
            definition.base.suite,
            tuple(sorted(set(needs.packages))),
            tuple(definition.base.components),
            below,
            repositories(definition, definition.layers[:number]),
        )
        archives[layer] = tuple(LockedArchive(url=a.url, sha256=a.sha256) for a in needs.archives)
        below = layer
    return Requirements(groups, archives=archives)


def _plan(draft: Draft) -> Iterator[StagePlan]:
    """Yield the layers, lowest first; each is based on the trees that the draft has by then."""
    for layer in draft.definition.layers:
        reading = layer_reading(draft.definition, layer)
        yield StagePlan(
            layer,
            KIND.name,
            {
                "playbook": f"playbooks/layers/{layer}.yml",
                "packages": draft.lock.group(layer).digest,
                "archives": archive_digests(draft.definition, layer),
                "source_date_epoch": draft.lock.source_date_epoch,
                **play_options(draft, layer, reading),
            },
            {**draft.code(KIND), **named_digests(reading.files)},
            draft.tree_ids,
            {stage.name: stage.id for stage in draft.stages if draft.kinds[stage.kind].layer == layer},
            places=reading.files,
        )


def _reading(definition: ImageDefinition, stage: StagePlan) -> PlaybookReading:
    return layer_reading(definition, stage.name)


def _space(stage: StagePlan, sizes: Sizes) -> Need:
    return Need(sizes.unpacked.get(stage.name, 0.0) + WRITTEN)


def _files(stage: StagePlan, lock: Lock) -> Sequence[LockedArchive]:
    digests = stage.options.get("archives", ())
    return [archive for archive in lock.archives if archive.sha256 in digests]


KIND = StageKind(
    "layer",
    "image_builder.bake.stages.layer.run",
    _plan,
    PLAY_DATA,
    needs=_needs,
    space=_space,
    files=_files,
    enterable=True,
    reading=_reading,
)
