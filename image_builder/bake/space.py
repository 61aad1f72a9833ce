"""Estimate the disk space that a build takes before it starts, and refuse to start if there isn't enough."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from image_builder.bake.lock.model import Lock
from image_builder.bake.plan.model import StagePlan
from image_builder.bake.stages.disk import has_disk
from image_builder.bake.stages.disk.run import Content, minimal_root_mib
from image_builder.bake.stages.kind import MIB, Sizes
from image_builder.bake.stages.layer import WRITTEN
from image_builder.bake.stages.preload import engines
from image_builder.definition import ImageDefinition
from image_builder.errors import SpaceError
from image_builder.system.host import nearest_existing

if TYPE_CHECKING:
    from image_builder.bake.executor import Build

# Installed bytes per byte of package, measured over the lab's images (kernel modules and docs compress well).
_UNPACKED = 4.0
# Bytes of files per byte of a compressed layer, and bytes of the store (lz4) per byte of those files.
_IMAGE_UNPACKED = 3.2
_IMAGE_PACKED = 0.6
# The part of an estimate that is certain: for a worker with images it is a tenth too high, and was never a seventh.
_CERTAIN = 0.85
_SLACK = 200 * MIB
# With less than this, a filesystem counts as full: the next file of a package doesn't fit.
_FULL = 16 * MIB


def estimate(work: Build, todo: Sequence[StagePlan]) -> tuple[int, int]:
    """Return the most bytes that running ``todo`` takes, on (the store's filesystem, the output's).

    Packages and stages that the store already has aren't counted.
    """
    groups = work.lock.groups
    downloads = sum(
        package.size
        for name in {stage.name for stage in todo} & groups.keys()
        for package in groups[name].packages
        if not (work.store.path / "debs" / package.sha256).exists()
    )
    sizes = _sizes(work.lock, work.definition)
    in_store = peak = float(downloads)
    in_output = 0.0
    beside: dict[str, float] = {}  # scratch of stages that may still run: nothing has needed them so far
    for stage in todo:
        kind = work.kind(stage)
        if not kind.beside:
            for ended in beside.keys() & stage.requires:
                del beside[ended]
        need = kind.space(stage, sizes)
        in_store += need.product
        peak = max(peak, in_store + sum(beside.values()) + need.scratch)
        if kind.beside:
            beside[stage.id] = need.scratch
        in_output += need.output
    return int(peak), int(in_output)


def _sizes(lock: Lock, definition: ImageDefinition) -> Sizes:
    packed = {name: float(sum(p.size for p in group.packages)) for name, group in lock.groups.items()}
    unpacked = {name: size * _UNPACKED for name, size in packed.items()}
    # Images share layers, and every engine keeps each once.
    blobs = float(sum({layer.digest: layer.size for image in lock.images for layer in image.layers}.values()))
    images = blobs * _IMAGE_UNPACKED
    by_engine = engines(definition) if definition.preload else [""]
    archive = 0.0
    if definition.preload_archive:  # containerd's archive has the layers as they were pulled
        archive = blobs if by_engine[0] == "containerd" else images
    stored = images * _IMAGE_PACKED + (blobs if "containerd" in by_engine else 0.0)
    layers = sum(unpacked.get(name, 0.0) + WRITTEN for name in ("base", *definition.layers))
    return Sizes(packed, unpacked, blobs, images, archive, stored, layers + archive + stored)


def check_root(lock: Lock, definition: ImageDefinition) -> None:
    """Raise SpaceError if the tree can't fit in ``image_disk.root_size_mib``, before anything is fetched or pulled.

    A tree that barely passes may still be refused when the disk is made, since only then can it be measured.
    """
    declared = definition.disk.root_size_mib
    if declared == "auto" or not has_disk(definition):
        return
    sizes = _sizes(lock, definition)
    least = minimal_root_mib(Content(int(sizes.tree * _CERTAIN), 0))
    if declared < least:
        likely = minimal_root_mib(Content(int(sizes.tree), 0))
        preload = (sizes.archive + sizes.store) / MIB
        hint = f"set image_disk.root_size_mib to {likely} or more, or to auto"
        if sizes.archive:
            hint += f"; image_preload_archive: false saves about {int(sizes.archive) // MIB} MiB"
        raise SpaceError(
            f"{definition.name} needs a root partition of about {likely} MiB, {int(preload)} MiB of them for "
            f"preloaded images; image_disk.root_size_mib is {declared}",
            hint=hint,
        )


def check(work: Build, todo: Sequence[StagePlan]) -> None:
    """Raise SpaceError, naming the shortfall, if the estimate doesn't fit on the filesystems that it is for."""
    if not todo:
        return
    in_store, in_output = estimate(work, todo)
    needed: dict[int, tuple[Path, int]] = {}
    for path, size in ((work.store.path, in_store), (nearest_existing(work.settings.output), in_output)):
        device = os.stat(path).st_dev
        first, sum_before = needed.get(device, (path, 0))
        needed[device] = (first, sum_before + size)
    for path, size in needed.values():
        free = shutil.disk_usage(path).free
        if free < size + _SLACK:
            raise SpaceError(
                f"{path} has {free // MIB} MiB free, this build needs about {(size + _SLACK) // MIB} MiB: "
                f"{(size + _SLACK - free) // MIB} MiB are missing",
                hint="free some: image-builder store gc --keep 1; or another disk: --store DIR",
            )


def shortage(path: Path) -> str | None:
    """Return a message if the filesystem of ``path`` is full, None if it isn't.

    Programs report this in many ways, or not at all, so it is checked here after a stage has failed.
    """
    free = shutil.disk_usage(path).free
    return f"No space left on the filesystem of {path} ({free // 1024} KiB free)" if free < _FULL else None
