"""containerd's root for the overlayfs snapshotter, from the store (containerd: core/metadata, plugins/snapshots).

    io.containerd.metadata.v1.bolt/meta.db                       images, leases, references between objects
    io.containerd.snapshotter.v1.overlayfs/metadata.db           snapshots by name, parent and number
    io.containerd.snapshotter.v1.overlayfs/snapshots/<N>/fs      a layer's files
    io.containerd.content.v1.content/blobs/sha256/<hex>          indexes, manifests, configurations and layers

The two databases belong together: a name in one refers to a number in the other. They are copied as a pair into a
blank root, and never merged.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from image_builder.node.data_root import BLOBS, SNAPSHOTS
from image_builder.node.files import create, make_directory
from image_builder.node.layout import LAYERS, MOUNT_POINT, diff_id_of
from image_builder.node.seed import records
from image_builder.node.seed.records import Records
from image_builder.node.store import copy as copy_file

SOURCE = "containerd"
DATABASES = (
    Path("io.containerd.metadata.v1.bolt/meta.db"),
    Path("io.containerd.snapshotter.v1.overlayfs/metadata.db"),
)


@dataclass(frozen=True)
class Filled:
    """How many snapshots and files were created."""

    snapshots: int
    files: int


def fill(
    root: Path,
    *,
    store: Path = MOUNT_POINT,
    copied: frozenset[str] = frozenset(),
    copy: Callable[[Path, Path], None] | None = None,
) -> Filled:
    """Fill a blank root. Layers whose diff ids are in ``copied`` are copied by ``copy(source, target)``.

    Raises OSError, and NodeError (``store.damaged``, ``store.io``).
    """
    source = store / SOURCE
    baked = records.read(source)
    for database in DATABASES:
        make_directory((root / database).parent, 0o700 if "snapshotter" in database.parts[0] else 0o711)
        copy_file(source / database, root / database)
    snapshots, files = 0, len(DATABASES)
    make_directory(root / SNAPSHOTS, 0o700)
    for number, layer in _snapshots(baked):
        place = root / SNAPSHOTS / number
        place.mkdir(mode=0o700)
        (place / "work").mkdir(mode=0o711)
        target = store / LAYERS / layer
        if copy and diff_id_of(layer) in copied:
            copy(target, place / "fs")
        else:
            (place / "fs").symlink_to(target)
        snapshots += 1
    make_directory(root / BLOBS.parent.parent, 0o755)
    make_directory(root / BLOBS.parent, 0o755)
    make_directory(root / BLOBS, 0o755)
    make_directory(root / BLOBS.parent.parent / "ingest", 0o755)
    for name in baked.names(os.fspath(BLOBS)):
        path = f"{BLOBS}/{name}"
        if path in baked.files:
            mode, text = baked.files[path]
            create(root / path, text.encode(), mode)
        else:
            (root / path).symlink_to(source / path)
        files += 1
    return Filled(snapshots, files)


def _snapshots(baked: Records) -> Iterator[tuple[str, str]]:
    """Yield each snapshot's number and its directory in ``layers``: in the store, ``fs`` is a link to it.

    A snapshot without such a link didn't belong to an image: containerd deletes whatever its database doesn't know.
    Raises NodeError (``store.damaged``).
    """
    for number in baked.names(os.fspath(SNAPSHOTS)):
        target = baked.links.get(f"{SNAPSHOTS}/{number}/fs")
        if target:
            yield number, os.path.basename(target)
