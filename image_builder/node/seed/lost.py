"""Docker's layers whose files were in a preload store that is gone: removed, so that they can be loaded again.

Docker trusts its records: it neither pulls nor loads a layer that it has a record of. Everything else in the data root
stays: volumes, containers, and every layer that isn't above a lost one.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from image_builder.node import files
from image_builder.node.data_root import RECORDS, cache_id, listed
from image_builder.node.layout import MOUNT_POINT
from image_builder.node.store import chain

_IMAGES = Path("image/overlay2/imagedb")
# Docker ignores names in its records directory that aren't digests.
_SUFFIX = ".lost"


def caches(root: Path, store: Path = MOUNT_POINT) -> set[str]:
    """Return the directories in ``overlay2`` whose files are a link to something missing from the store.

    Raises OSError if that can't be determined: a disk that fails now doesn't prove anything.
    """
    return {place.name for place in listed(root / "overlay2") if _is_lost(place / "diff", store)}


def take_out(root: Path, trash: Path, boot: str, store: Path = MOUNT_POINT) -> None:
    """Delete lost layers, their records first; set aside layers above them that have files of their own.

    The engine must be stopped. After a crash, a second call finishes the work. Raises OSError, NodeError.
    """
    gone = caches(root, store)
    records = {path.name: _read(path) for path in listed(root / RECORDS) if "." not in path.name}
    half = {path.name.removesuffix(_SUFFIX) for path in listed(root / RECORDS) if path.suffix == _SUFFIX}
    chains = half | {name for name, (cache, _) in records.items() if cache in gone}
    while above := {name for name, (_, parent) in records.items() if parent in chains} - chains:
        chains |= above
    for image, top in _images(root):
        if top & chains:
            _forget_image(root, image, trash if top & chains - _seeded(records, gone) - half else None, boot)
    for name in chains & set(records):
        record, (cache, _) = root / RECORDS / name, records[name]
        if cache in gone:
            os.rename(record, f"{record}{_SUFFIX}")
        else:
            files.set_aside(record, trash, boot)
            if cache and (root / "overlay2" / cache).is_dir():
                files.set_aside(root / "overlay2" / cache, trash, boot)
    for path in listed(root / RECORDS):
        if path.suffix == _SUFFIX:
            files.remove_tree(path)
    for cache in gone:
        _remove_files(root / "overlay2", cache)


def _seeded(records: Mapping[str, tuple[str, str]], gone: set[str]) -> set[str]:
    return {name for name, (cache, _) in records.items() if cache in gone}


def _images(root: Path) -> Iterator[tuple[str, set[str]]]:
    """Yield each recorded image and its layers' chain ids. Docker returns an error for an image without its layers."""
    for path in listed(root / _IMAGES / "content/sha256"):
        try:
            diff_ids = json.loads(path.read_bytes())["rootfs"]["diff_ids"]
            chains = {layer.chain.removeprefix("sha256:") for layer in chain(diff_ids or [])}
        except (ValueError, KeyError, TypeError):
            continue
        yield path.name, chains


def _forget_image(root: Path, image: str, trash: Path | None, boot: str) -> None:
    """Delete an image's record, or set it aside in ``trash`` if it isn't from a seed; its names then lead nowhere."""
    path = root / _IMAGES / "content/sha256" / image
    if trash:
        files.set_aside(path, trash, boot)
    else:
        path.unlink()
    files.remove_tree(root / _IMAGES / "metadata/sha256" / image)


def _remove_files(folder: Path, cache: str) -> None:
    if short := files.read_text(folder / cache / "link"):
        (folder / "l" / os.path.basename(short)).unlink(missing_ok=True)
    files.remove_tree(folder / cache)


def _is_lost(path: Path, store: Path) -> bool:
    try:
        if not stat.S_ISLNK(path.lstat().st_mode) or store not in Path(os.readlink(path)).parents:
            return False
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return path.is_symlink()
    return False


def _read(record: Path) -> tuple[str, str]:
    """Return a layer's directory in ``overlay2`` and its parent's chain id; empty if not recorded."""
    return cache_id(record), files.read_text(record / "parent").removeprefix("sha256:")
