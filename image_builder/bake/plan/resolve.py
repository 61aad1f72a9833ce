"""The graph: an image's stages in their order, which is defined only here.

    tools ─┬─────────> base ─> (a stage for each entry of image_layers) ─> seal ─> verify ─> disk ─> convert
           ├─> build_root ─> kubelet_build ──────────^                      ^
           ├─> module_root ─> module_build ──────────^ (the layer gpu)      |
           └─> lab_images ··> preload ─> preload_store ─> rehearsal ┘
                              (in the tree of container_runtime)

A stage's own folder says what it is and needs, and which images have it. No network, clock or root privileges are
used: only the definition, the lock and the files of this program are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from image_builder.bake.lock.model import Lock
from image_builder.bake.lock.requirements import Requirements
from image_builder.bake.plan.model import Plan
from image_builder.bake.stages import (
    convert,
    disk,
    go,
    layer,
    module_build,
    preload,
    preload_store,
    rehearsal,
    root,
    seal,
)
from image_builder.bake.stages.kind import Draft, Extensions, StageKind
from image_builder.definition import ImageDefinition

# The built-in kinds.
KINDS = (
    root.TOOLS_KIND,
    go.KIND,
    module_build.KIND,
    root.BASE_KIND,
    layer.KIND,
    preload.KIND,
    preload_store.KIND,
    rehearsal.KIND,
    seal.KIND,
    disk.KIND,
    convert.KIND,
)


def kinds(extensions: Extensions | None = None) -> Mapping[str, StageKind]:
    """Return all kinds of stages by their names."""
    more = (extensions.supplier.kind, extensions.verification) if extensions else ()
    return {kind.name: kind for kind in (*KINDS, *more)}


def requirements(definition: ImageDefinition, extensions: Extensions) -> Requirements:
    """Return what has to be locked for an image's stages."""
    needs = Requirements()
    for kind in kinds(extensions).values():
        if kind is not extensions.supplier.kind or extensions.supplier.serves(definition):
            needs |= kind.needs(definition)
    return needs


def resolve(definition: ImageDefinition, lock: Lock, repo_root: Path, extensions: Extensions) -> Plan:
    """Return the plan of an image. Raises LockError when the lock lacks a stage of the definition."""
    draft = _draft(definition, lock, repo_root, extensions)
    draft.add(*go.KIND.plan(draft))
    draft.add(*module_build.KIND.plan(draft))
    _add_supplier(draft, extensions)
    for stage in root.BASE_KIND.plan(draft):
        draft.lay(stage)
    joined = []
    for stage in layer.KIND.plan(draft):
        draft.lay(stage)
        if stage.name == preload.ENGINE_LAYER and definition.preload and preload.images(draft):
            # They can begin here; what they make is below the seal, but below no layer.
            for kind in (preload.KIND, preload_store.KIND, rehearsal.KIND):
                branch = list(kind.plan(draft))
                draft.add(*branch)
                joined += [s for s in branch if kind is not preload.KIND or s.options["list"]]
    draft.trees += joined
    for stage in seal.KIND.plan(draft):
        draft.lay(stage)
    for kind in (extensions.verification, disk.KIND, convert.KIND):
        draft.add(*kind.plan(draft))
    return draft.plan()


def supplier_plan(definition: ImageDefinition, lock: Lock, repo_root: Path, extensions: Extensions) -> Plan:
    """Return the stages that the supplier's registry needs, before its images' tags are resolved."""
    draft = _draft(definition, lock, repo_root, extensions)
    _add_supplier(draft, extensions)
    return draft.plan()


def _draft(definition: ImageDefinition, lock: Lock, repo_root: Path, extensions: Extensions) -> Draft:
    draft = Draft(definition, lock, repo_root, kinds(extensions))
    draft.add(*root.TOOLS_KIND.plan(draft))
    return draft


def _add_supplier(draft: Draft, extensions: Extensions) -> None:
    if extensions.supplier.serves(draft.definition):
        draft.suppliers += extensions.supplier.kind.plan(draft)
        draft.add(*draft.suppliers)
