"""The archive: that it is the one that was baked, and that there is room for what is in it."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from image_builder.node.errors import NodeError
from image_builder.node.preload.images import Image, Preload

# The kubelet deletes images until so much of their filesystem is used (imageGCLowThresholdPercent's default).
FULL_PERCENT = 80
_CHUNK = 4 << 20


def check(preload: Preload, tell: Callable[[str], None], interval: float) -> None:
    """Read the archive once; raises NodeError (``preload.archive``) unless it is the one that was baked."""
    digest, done, told = hashlib.sha256(), 0, time.monotonic()
    path = preload.archive
    try:
        size = path.stat().st_size
        if size != preload.size:
            raise NodeError("preload.archive", f"{path} is damaged: {size} bytes, not {preload.size}")
        with path.open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
                done += len(chunk)
                if time.monotonic() - told >= interval:
                    told = time.monotonic()
                    tell(f"checking the archive: {portion(done, size)}")
    except OSError as error:
        raise NodeError("preload.archive", f"{path}: {error.strerror}") from error
    found, wanted = digest.hexdigest(), preload.sha256.removeprefix("sha256:")
    if found != wanted:
        raise NodeError("preload.archive", f"{path} is damaged: its sha256 is {found}, not {wanted}")


def portion(done: int, total: int) -> str:
    """Return how far something is, as text."""
    return f"{100 * done // max(total, 1)}% of {total / 1e9:.2f} GB"


# -- room ------------------------------------------------------------------------------------------------------


def check_room(
    preload: Preload,
    lacking: Iterable[Image],
    layers: Mapping[str, int],
    data_root: Path,
    root: Path = Path("/"),
) -> None:
    """Raise NodeError (``preload.space``) where loading would fill the root filesystem.

    A data root on a disk of its own is the engine's alone: there the engine itself says that it is full.
    """
    place = next(path for path in (data_root, *data_root.parents) if path.exists())
    if place.stat().st_dev != root.stat().st_dev:
        return
    room = os.statvfs(place)
    capacity, available = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    need = needed(preload.engine, preload.size, unpacked(lacking, layers))
    if fault := room_fault(need, capacity, available):
        message = f"{preload.archive} is not loaded: {data_root} is on the root filesystem, {fault}"
        raise NodeError("preload.space", message)


def needed(engine: str, archive: int, layers: int) -> int:
    """Return how many bytes an engine writes to load an archive that is on the disk already.

    Docker first copies the whole archive, then registers layers that it holds unpacked. containerd keeps its
    content, compressed or not, and unpacks layers beside it.
    """
    return archive + (min(archive, layers) if engine == "docker" else layers)


def unpacked(images: Iterable[Image], layers: Mapping[str, int]) -> int:
    """Return the bytes of the images' layers, each layer once as far as ``layers`` knows them."""
    known: set[str] = set()
    total = 0
    for image in images:
        if all(diff_id in layers for diff_id in image.diff_ids):
            known.update(image.diff_ids)
        else:
            total += image.size
    return total + sum(layers[diff_id] for diff_id in known)


def room_fault(need: int, capacity: int, available: int) -> str:
    """Return why so many bytes have no room, or nothing. A filesystem's fullness is counted as the kubelet does."""
    after = capacity - available + need
    if after * 100 <= capacity * FULL_PERCENT:
        return ""
    return (
        f"which would be {100 * after // max(capacity, 1)}% full, more than {FULL_PERCENT}%: "
        f"{need / 1e9:.2f} GB are needed, {available / 1e9:.2f} of {capacity / 1e9:.2f} GB are free"
    )
