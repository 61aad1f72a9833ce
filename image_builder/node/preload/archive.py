"""The archive: its checksum, the space that its images need, and loading it."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from image_builder.node import child
from image_builder.node.errors import NodeError
from image_builder.node.preload.images import Archive
from image_builder.node.store import Image

# The kubelet deletes images until this much of their filesystem is used (imageGCLowThresholdPercent's default).
FULL_PERCENT = 80
_CHUNK = 4 << 20
# If nothing is read, or written to the engine's disk, for this long, loading won't end. An engine is silent while it
# unpacks.
STALLED_SECONDS = 600.0


def check(archive: Archive, tell: Callable[[str], None], interval: float) -> None:
    """Read the whole archive. Raises NodeError (``preload.archive``) unless it is the one that was baked."""
    digest, done, reported = hashlib.sha256(), 0, time.monotonic()
    path = archive.path
    try:
        size = path.stat().st_size
        if size != archive.size:
            raise NodeError("preload.archive", f"{path} is damaged: {size} bytes, not {archive.size}")
        with path.open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
                done += len(chunk)
                if time.monotonic() - reported >= interval:
                    reported = time.monotonic()
                    tell(f"checking the archive: {portion(done, size)}")
    except OSError as error:
        raise NodeError("preload.archive", f"{path}: {error.strerror}") from error
    checksum, expected = digest.hexdigest(), archive.sha256.removeprefix("sha256:")
    if checksum != expected:
        raise NodeError("preload.archive", f"{path} is damaged: its sha256 is {checksum}, not {expected}")


def portion(done: int, total: int) -> str:
    """Return progress as text."""
    return f"{100 * done // max(total, 1)}% of {total / 1e9:.2f} GB"


# -- space -----------------------------------------------------------------------------------------------------


def check_room(
    archive: Archive,
    engine: str,
    lacking: Iterable[Image],
    layers: Mapping[str, int],
    data_root: Path,
    root: Path = Path("/"),
) -> None:
    """Raise NodeError (``preload.space``) if loading would fill the root filesystem.

    A data root on a separate disk belongs to the engine, which itself reports when that disk is full.
    """
    place = next(path for path in (data_root, *data_root.parents) if path.exists())
    if place.stat().st_dev != root.stat().st_dev:
        return
    room = os.statvfs(place)
    capacity, available = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    need = needed(engine, archive.size, unpacked(lacking, layers))
    if fault := room_fault(need, capacity, available):
        message = f"{archive.path} is not loaded: {data_root} is on the root filesystem, {fault}"
        raise NodeError("preload.space", message)


def needed(engine: str, archive: int, layers: int) -> int:
    """Return how many bytes an engine writes to load an archive that is already on the disk.

    Docker first copies the whole archive, then registers its layers unpacked. containerd keeps the archive's content,
    compressed or not, and also the unpacked layers.
    """
    return archive + (min(archive, layers) if engine == "docker" else layers)


def unpacked(images: Iterable[Image], layers: Mapping[str, int]) -> int:
    """Return the total size of the images' layers in bytes, counting a layer that ``layers`` knows only once."""
    diff_ids: set[str] = set()
    total = 0
    for image in images:
        if all(diff_id in layers for diff_id in image.diff_ids):
            diff_ids.update(image.diff_ids)
        else:
            total += image.size
    return total + sum(layers[diff_id] for diff_id in diff_ids)


def room_fault(need: int, capacity: int, available: int) -> str:
    """Return why this many bytes don't fit, or an empty string. Count the filesystem's usage as the kubelet does."""
    after = capacity - available + need
    if after * 100 <= capacity * FULL_PERCENT:
        return ""
    return (
        f"which would be {100 * after // max(capacity, 1)}% full, more than {FULL_PERCENT}%: "
        f"{need / 1e9:.2f} GB are needed, {available / 1e9:.2f} of {capacity / 1e9:.2f} GB are free"
    )


# -- loading ---------------------------------------------------------------------------------------------------


def load(
    argv: Sequence[str],
    archive: Path,
    data_root: Path,
    tell: Callable[[str], None],
    interval: float,
    patience: float = STALLED_SECONDS,
) -> None:
    """Run a program that loads the archive into ``data_root``, and report its progress.

    Raises ProgramError, also (status 124) if there is no progress for ``patience`` seconds.
    """
    size, has_begun = archive.stat().st_size, False

    def progress(pid: int) -> tuple[object, str]:
        nonlocal has_begun
        position = read_position(pid, archive)
        has_begun = has_begun or position is not None
        return (position, _free(data_root)), stage(position, size, has_begun)

    child.watch(argv, progress, tell, interval, patience)


def _free(data_root: Path) -> int:
    """Return the free blocks of the filesystem that an engine writes to."""
    try:
        return os.statvfs(data_root).f_bfree
    except OSError:
        return 0


def stage(position: int | None, size: int, has_begun: bool) -> str:
    """Return a program's progress with the archive. Once it is read to the end, the engine unpacks it silently."""
    if has_begun and (position is None or position >= size):
        return "unpacking the layers"
    return f"loading: {portion(position or 0, size)} read"


def read_position(pid: int, path: Path) -> int | None:
    """Return a process's read position in an open file; None if it doesn't have the file open."""
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if os.path.realpath(link) == os.path.realpath(path):
                info = Path(f"/proc/{pid}/fdinfo/{link.name}").read_text(encoding="ascii")
                return int(info.splitlines()[0].removeprefix("pos:"))
    except (OSError, ValueError):
        pass  # the process ended, or closed the file, in the meantime
    return None
