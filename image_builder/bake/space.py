"""Estimate the space a build takes before it starts, and refuse when it isn't there."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from image_builder.bake.lock.model import Lock
from image_builder.bake.plan.model import StagePlan
from image_builder.bake.store import Store
from image_builder.definition import ImageDefinition
from image_builder.errors import SpaceError
from image_builder.settings import Settings

_MIB = 1 << 20
# Installed bytes per byte of package, measured over the lab's images (kernel modules and docs compress well).
_UNPACKED = 4.0
# What a layer writes beside its packages: the initramfs, dpkg's database, copied-up files, built programs.
_PER_LAYER = 60 * _MIB
# What a build from source needs while it runs, and what is kept of it: Go's caches and its programs; a driver's
# source, unpacked twice, with its objects, and the modules.
_GO_BUILD, _GO_PROGRAMS = 2500 * _MIB, 150 * _MIB
_MODULE_BUILD, _MODULES = 700 * _MIB, 50 * _MIB
# Bytes of an artefact per byte of tree; the store's raw is the disk stage's file.
_FORMATS = {"raw": 1.05, "vhd": 1.05, "qcow2": 0.5, "tar": 1.05}
_BOOT_FILES = 150 * _MIB
# Files per byte of a compressed layer; the archive is as large again, the store (lz4) half of it.
_IMAGE_UNPACKED = 3.2
_STORE_PACKED = 0.6
# The lab's images are kept as compressed layers of their packages.
_REGISTRY = 1.6
_SLACK = 200 * _MIB
# Less than this is full: the next file of a package doesn't fit.
_FULL = 16 * _MIB


@dataclass(frozen=True)
class _Need:
    """Bytes that a stage adds to the store, and those that it needs beside them while it runs."""

    kept: float = 0.0
    passing: float = 0.0


@dataclass(frozen=True)
class _Sizes:
    """Bytes: of each group's packages, unpacked; of the preloaded images' files; of the image's tree."""

    unpacked: Mapping[str, float]
    images: float
    tree: float


def estimate(
    lock: Lock, todo: Sequence[StagePlan], definition: ImageDefinition, store: Store
) -> tuple[int, int]:
    """Return the bytes that running ``todo`` takes at most, of (the store's filesystem, the output's).

    What the store has already is not counted, neither packages nor stages.
    """
    downloads = sum(
        package.size
        for name in {stage.name for stage in todo} & lock.groups.keys()
        for package in lock.groups[name].packages
        if not (store.path / "debs" / package.sha256).exists()
    )
    sizes = _sizes(lock, definition)
    kept = peak = float(downloads)
    for stage in todo:
        need = _need(stage, sizes, definition)
        kept += need.kept
        peak = max(peak, kept + need.passing)
    published = any(stage.kind == "convert" for stage in todo)
    output = sizes.tree * sum(_FORMATS[f] for f in definition.formats) if published else 0.0
    return int(peak), int(output)


def _sizes(lock: Lock, definition: ImageDefinition) -> _Sizes:
    unpacked = {name: sum(p.size for p in group.packages) * _UNPACKED for name, group in lock.groups.items()}
    images = sum(image.size for image in lock.images) * _IMAGE_UNPACKED
    tree = sum(unpacked.get(name, 0.0) + _PER_LAYER for name in ("base", *definition.layers))
    return _Sizes(unpacked, images, tree + images * (1 + _STORE_PACKED))  # the archive and the store


def _need(stage: StagePlan, sizes: _Sizes, definition: ImageDefinition) -> _Need:
    packages = sizes.unpacked.get(stage.name, 0.0)
    match stage.kind:
        case "layer":
            return _Need(packages + _PER_LAYER)
        case "lab_images":
            return _Need(packages / _UNPACKED * _REGISTRY, packages)
        case "preload":
            return _Need(2 * sizes.images)
        case "preload_store":
            return _Need(_STORE_PACKED * sizes.images)
        case "kubelet_build" | "control_plane_build":
            return _Need(_GO_PROGRAMS, _GO_BUILD)
        case "module_build":
            return _Need(_MODULES, _MODULE_BUILD)
        case "disk":
            return _Need(sizes.tree * _FORMATS["raw"] + _BOOT_FILES)
        case "convert":
            return _Need(sum(sizes.tree * _FORMATS[f] for f in definition.formats if f != "raw"))
        case _:
            return _Need(packages)


def check(
    lock: Lock,
    todo: Sequence[StagePlan],
    store: Store,
    settings: Settings,
    definition: ImageDefinition,
) -> None:
    """Raise SpaceError, naming the shortfall, when the estimate doesn't fit the filesystems it goes to."""
    if not todo:
        return
    in_store, in_output = estimate(lock, todo, definition, store)
    wanted: dict[int, tuple[Path, int]] = {}
    for path, size in ((store.path, in_store), (_existing(settings.output), in_output)):
        device = os.stat(path).st_dev
        known = wanted.get(device, (path, 0))
        wanted[device] = (known[0], known[1] + size)
    for path, size in wanted.values():
        stats = os.statvfs(path)
        free = stats.f_bavail * stats.f_frsize
        if free < size + _SLACK:
            raise SpaceError(
                f"{path} has {free // _MIB} MiB free, this build needs about {(size + _SLACK) // _MIB} MiB: "
                f"{(size + _SLACK - free) // _MIB} MiB are missing",
                hint="free some: image-builder store gc --keep 1; or another disk: --store DIR",
            )


def shortage(path: Path) -> str | None:
    """Tell, in words, when the filesystem of ``path`` is full; None when it isn't.

    Programs say it in many ways, or not at all, so a stage that failed looks for itself.
    """
    stats = os.statvfs(path)
    free = stats.f_bavail * stats.f_frsize
    return f"No space left on the filesystem of {path} ({free // 1024} KiB free)" if free < _FULL else None


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path
