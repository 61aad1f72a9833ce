"""Estimate the space a build takes before it starts, and refuse when it isn't there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from image_builder.definition import ImageDefinition
from image_builder.errors import SpaceError
from image_builder.lock import Lock
from image_builder.plan.model import StagePlan
from image_builder.settings import Settings
from image_builder.store import Store

_MIB = 1 << 20
# Installed bytes per byte of package, measured over the lab's images (kernel modules and docs compress well).
_UNPACKED = 4.0
# What a layer writes beside its packages: the initramfs, dpkg's database, copied-up files.
_PER_LAYER = 150 * _MIB
_GO_BUILD = 2500 * _MIB
# A driver's source, unpacked twice, and its objects.
_MODULE_BUILD = 700 * _MIB
# Bytes of an artefact per byte of tree.
_FORMATS = {"raw": 1.1, "vhd": 1.1, "qcow2": 0.6, "tar": 1.1}
# Files per byte of a compressed layer; the archive is as large again, the store (lz4) half of it.
_IMAGE_UNPACKED = 3.2
_STORE_PACKED = 0.6
_SLACK = 200 * _MIB
# Less than this is full: the next file of a package doesn't fit.
_FULL = 16 * _MIB


def estimate(lock: Lock, todo: Sequence[StagePlan], definition: ImageDefinition) -> tuple[int, int]:
    """Return the bytes that running ``todo`` adds to (the store, the output)."""
    packages = {name: sum(p.size for p in group.packages) for name, group in lock.groups.items()}
    image = ("base", *definition.layers)
    tree = sum(packages[name] for name in image if name in packages) * _UNPACKED + len(image) * _PER_LAYER
    images = sum(image.size for image in lock.images) * _IMAGE_UNPACKED
    tree += images * (1 + _STORE_PACKED)  # the archive and the store
    store = 0.0
    for stage in todo:
        store += packages.get(stage.name, 0) * (1 + _UNPACKED)  # the download, and unpacked
        if stage.kind == "layer":
            store += _PER_LAYER
        elif stage.kind == "preload":
            store += 2 * images
        elif stage.kind == "preload_store":
            store += _STORE_PACKED * images
        elif stage.kind in ("kubelet_build", "control_plane_build"):
            store += _GO_BUILD
        elif stage.kind == "module_build":
            store += _MODULE_BUILD
        elif stage.kind == "disk":
            store += tree * _FORMATS["raw"] + definition.disk.esp_size_mib * _MIB
        elif stage.kind == "convert":
            store += sum(tree * _FORMATS[f] for f in definition.formats if f != "raw")
    output = sum(tree * _FORMATS[f] for f in definition.formats) if todo else 0.0
    return int(store), int(output)


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
    in_store, in_output = estimate(lock, todo, definition)
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
