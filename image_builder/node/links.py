"""The names in a data root that lead into the store: the seed makes them, the promotion replaces them by copies."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from image_builder.node.layout import LAYERS, MOUNT_POINT

_SNAPSHOTS = Path("io.containerd.snapshotter.v1.overlayfs/snapshots")
_BLOBS = Path("io.containerd.content.v1.content/blobs/sha256")


@dataclass(frozen=True)
class Link:
    """A name in the data root that leads into the store.

    ``diff_id`` is empty where the name does not tell its layer. ``bytes`` is the size of a file, and of a directory
    whose layer is in no manifest; else 0.
    """

    path: Path
    target: Path
    diff_id: str
    directory: bool
    bytes: int = 0


def find(engine: str, data_root: Path, store: Path = MOUNT_POINT) -> list[Link]:
    """Return the links of a data root into the store that is mounted at ``store``, in no order.

    Only names where the seed makes links are looked at: a container's own files may hold any link. Raises OSError.
    """
    places = _docker(data_root) if engine == "docker" else _containerd(data_root)
    return [link for path, directory in places if (link := _link(path, directory, store))]


def _docker(root: Path) -> Iterator[tuple[Path, bool]]:
    for layer in _names(root / "overlay2"):
        yield layer / "diff", True
    for record in _names(root / "image/overlay2/layerdb/sha256"):
        yield record / "tar-split.json.gz", False


def _containerd(root: Path) -> Iterator[tuple[Path, bool]]:
    for snapshot in _names(root / _SNAPSHOTS):
        yield snapshot / "fs", True
    for blob in _names(root / _BLOBS):
        yield blob, False


def _names(folder: Path) -> list[Path]:
    try:
        return [folder / name for name in os.listdir(folder)]
    except FileNotFoundError:
        return []


def _link(path: Path, directory: bool, store: Path) -> Link | None:
    try:
        target = Path(os.readlink(path))
    except OSError:  # no link, nothing there, or gone meanwhile
        return None
    if store not in target.parents:
        return None
    diff_id = _diff_id(path, target, store)
    size = 0 if directory else _size(target)
    return Link(path, target, diff_id, directory, size)


def _diff_id(path: Path, target: Path, store: Path) -> str:
    if target.parent == store / LAYERS:
        return f"sha256:{target.name}"
    try:  # beside Docker's tar-split.json.gz lies a file with the diff id
        return (path.parent / "diff").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def _size(target: Path) -> int:
    """Return a file's bytes; 0 where the store can't be read, which the copy then finds out and tells."""
    try:
        info = target.stat()
    except OSError:
        return 0
    return info.st_size if stat.S_ISREG(info.st_mode) else 0
