"""containerd's root with the overlayfs snapshotter, from the store (containerd: core/metadata, plugins/snapshots).

    io.containerd.metadata.v1.bolt/meta.db                       images, leases, what refers to what
    io.containerd.snapshotter.v1.overlayfs/metadata.db           snapshots by name, parent and number
    io.containerd.snapshotter.v1.overlayfs/snapshots/<N>/fs      a layer's files
    io.containerd.content.v1.content/blobs/sha256/<hex>          indexes, manifests, configurations and layers

The two databases belong together: a name in one leads to a number in the other. They are copied as a pair into a
blank root, and never merged.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from image_builder.node.layout import LAYERS, MOUNT_POINT

SOURCE = "containerd"
DATABASES = (
    Path("io.containerd.metadata.v1.bolt/meta.db"),
    Path("io.containerd.snapshotter.v1.overlayfs/metadata.db"),
)
SNAPSHOTS = Path("io.containerd.snapshotter.v1.overlayfs/snapshots")
BLOBS = Path("io.containerd.content.v1.content/blobs/sha256")
# What describes an image is small and is copied; what is larger is a layer.
_LARGEST_COPIED = 1 << 20


@dataclass(frozen=True)
class Filled:
    """What was made, by number."""

    snapshots: int
    files: int


def fill(
    root: Path,
    *,
    store: Path = MOUNT_POINT,
    copied: frozenset[str] = frozenset(),
    copy: Callable[[Path, Path], None] | None = None,
) -> Filled:
    """Fill a blank root. Layers whose diff ids are in ``copied`` come by ``copy(source, target)``. Raises OSError."""
    source = store / SOURCE
    _directory(root, 0o711)
    for database in DATABASES:
        _directory((root / database).parent, 0o700 if "snapshotter" in database.parts[0] else 0o711)
        _copy_file(source / database, root / database)
    snapshots, files = 0, len(DATABASES)
    _directory(root / SNAPSHOTS, 0o700)
    for number, layer in _snapshots(source):
        place = root / SNAPSHOTS / number
        place.mkdir(mode=0o700)
        (place / "work").mkdir(mode=0o711)
        target = store / LAYERS / layer
        if copy and f"sha256:{layer}" in copied:
            copy(target, place / "fs")
        else:
            (place / "fs").symlink_to(target)
        snapshots += 1
    _directory((root / BLOBS).parent, 0o755)
    _directory(root / BLOBS, 0o755)
    _directory(root / BLOBS.parent.parent / "ingest", 0o777)
    for entry in os.scandir(source / BLOBS):
        if entry.stat().st_size > _LARGEST_COPIED:
            (root / BLOBS / entry.name).symlink_to(entry.path)
        else:
            _copy_file(Path(entry.path), root / BLOBS / entry.name)
        files += 1
    return Filled(snapshots, files)


def _snapshots(source: Path) -> Iterator[tuple[str, str]]:
    """Yield (number, hex of the diff id): in the store ``fs`` is a link to the layer's files."""
    for name in os.listdir(source / SNAPSHOTS):
        yield name, os.path.basename(os.readlink(source / SNAPSHOTS / name / "fs"))


def _directory(path: Path, mode: int) -> None:
    if not path.is_dir():
        path.mkdir(parents=True)
        path.chmod(mode)


def _copy_file(source: Path, target: Path) -> None:
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(source.read_bytes())
        os.fchmod(fd, source.stat().st_mode & 0o7777)
