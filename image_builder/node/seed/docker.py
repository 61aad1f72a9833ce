"""Docker's data root with the graph driver overlay2, from the store (moby: layer/, image/, daemon/graphdriver).

    image/overlay2/imagedb/{content,metadata}/sha256/<image id>
    image/overlay2/layerdb/sha256/<chain id>/{diff,size,cache-id,parent,tar-split.json.gz}
    image/overlay2/distribution/...            digests by diff id, so that a push or pull knows the layers
    image/overlay2/repositories.json           names and digests of images
    overlay2/<cache id>/{diff,link,lower,committed,work}, overlay2/l/<link> -> ../<cache id>/diff

``fill`` merges: a blank directory gets everything, a data root in use gets what it has lost. Each layer's files come
before what names them, and the names of images last.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from image_builder.node import durable, trees
from image_builder.node.layout import MOUNT_POINT, layer_path
from image_builder.node.seed import files as files_of
from image_builder.node.seed.files import reading
from image_builder.node.store import StoredImage

SOURCE = "docker"
_IMAGE = Path("image/overlay2")
_TAR_SPLIT = "tar-split.json.gz"


@dataclass(frozen=True)
class Layer:
    """A layer in a chain. Both ids begin with ``sha256:``; ``parent`` is empty for the lowest."""

    chain: str
    diff_id: str
    parent: str


@dataclass(frozen=True)
class Filled:
    """What was added, by number; ``images`` are references."""

    images: tuple[str, ...]
    layers: int
    files: int


def chain(diff_ids: Iterable[str]) -> Iterator[Layer]:
    """Yield an image's layers, the lowest first (OCI image specification, "Layer ChainID")."""
    parent = ""
    for diff_id in diff_ids:
        digest = hashlib.sha256(f"{parent} {diff_id}".encode()).hexdigest()
        this = f"sha256:{digest}" if parent else diff_id
        yield Layer(this, diff_id, parent)
        parent = this


def fill(
    images: Iterable[StoredImage],
    root: Path,
    *,
    store: Path = MOUNT_POINT,
    copy: Callable[[Path, Path], None] | None = None,
) -> Filled:
    """Give a data root whose engine is stopped the images that it lacks; what it has is left alone.

    An image with the mode ``copy`` gets its layers by ``copy(source, target)``. ``store`` is where the store is
    mounted. Raises OSError, and NodeError (``store.damaged``).
    """
    source = store / SOURCE
    _directories(root)
    names = _names(root)
    with reading(source):
        baked = json.loads((source / _IMAGE / "repositories.json").read_bytes())
    added, layers, files = [], 0, 0
    for image in images:
        before, changed = layers, False
        for layer in chain(image.diff_ids):
            if not _has_layer(root, layer):
                files += _add_layer(source, root, layer, store, copy if image.mode == "copy" else None)
                layers += 1
        config = _IMAGE / "imagedb/content/sha256" / image.id.removeprefix("sha256:")
        if not (root / config).exists():
            files += files_of.copy(source / config, root / config)
            changed = True
        files += _copy_missing(source, root, _IMAGE / "imagedb/metadata/sha256" / config.name)
        named = _names_of(baked, image.id)
        if changed or layers > before or not _has(names, named):
            _merge(names, named)
            added.append(image.ref)
    files += _copy_missing(source, root, _IMAGE / "distribution")
    if added:
        durable.write(root / _IMAGE / "repositories.json", json.dumps(names).encode(), 0o600)
    return Filled(tuple(added), layers, files)


def lacking(images: Iterable[StoredImage], root: Path) -> list[str]:
    """Return the references of the images that a data root has lost, without looking into the store."""
    there = {ref: found for mine in _names(root)["Repositories"].values() for ref, found in mine.items()}
    return [
        image.ref
        for image in images
        if there.get(image.ref) != image.id
        or not all(_has_layer(root, layer) for layer in chain(image.diff_ids))
    ]


def _directories(root: Path) -> None:
    for name, mode in (
        ("image", 0o700),
        (_IMAGE, 0o700),
        (_IMAGE / "imagedb", 0o700),
        (_IMAGE / "imagedb/content", 0o700),
        (_IMAGE / "imagedb/content/sha256", 0o700),
        (_IMAGE / "imagedb/metadata", 0o700),
        (_IMAGE / "imagedb/metadata/sha256", 0o700),
        (_IMAGE / "layerdb", 0o700),
        (_IMAGE / "layerdb/sha256", 0o755),
        ("overlay2", 0o710),
        ("overlay2/l", 0o700),
    ):
        files_of.directory(root / name, mode)


def _has_layer(root: Path, layer: Layer) -> bool:
    """Tell whether a layer is recorded and its files are where the record says, also through a link.

    Raises NodeError (``store.damaged``).
    """
    try:
        cache = (_record(root, layer.chain) / "cache-id").read_text()
    except OSError:
        return False
    files = root / "overlay2" / cache / "diff"
    if not files.is_symlink():
        return files.is_dir()
    with reading(files):
        return files.is_dir()


def _record(root: Path, chain_id: str) -> Path:
    return root / _IMAGE / "layerdb/sha256" / chain_id.removeprefix("sha256:")


def _add_layer(
    source: Path, root: Path, layer: Layer, store: Path, copy: Callable[[Path, Path], None] | None
) -> int:
    """Add one layer above its parent, files first; return the number of files made."""
    record, target = _record(source, layer.chain), _record(root, layer.chain)
    with reading(record):
        cache, names = (record / "cache-id").read_text(), os.listdir(record)
    files = _add_files(source, root, layer, cache, store, copy)
    draft = target.with_name(f"{target.name}.tmp")
    draft.mkdir(mode=0o700, exist_ok=True)
    for name in names:
        if name == _TAR_SPLIT and copy is None:
            # It has a line for each file of the layer: read when an image is saved or pushed, and linked as well.
            files_of.link(record / name, draft / name)
        else:
            files_of.copy(record / name, draft / name)
        files += 1
    if target.is_dir():  # recorded, but its files were gone
        for name in os.listdir(draft):
            (draft / name).replace(target / name)
        draft.rmdir()
    else:
        draft.rename(target)
    return files


def _add_files(
    source: Path,
    root: Path,
    layer: Layer,
    cache: str,
    store: Path,
    copy: Callable[[Path, Path], None] | None,
) -> int:
    baked, place = source / "overlay2" / cache, root / "overlay2" / cache
    place.mkdir(mode=0o710, exist_ok=True)
    with reading(baked):
        link = (baked / "link").read_text()
    files_of.write(place / "link", link.encode())
    if layer.parent:
        # Not as baked: the parent may have been pulled again meanwhile, under another id.
        parent = root / "overlay2" / (_record(root, layer.parent) / "cache-id").read_text()
        lower = f"l/{(parent / 'link').read_text()}"
        if (parent / "lower").exists():
            lower += f":{(parent / 'lower').read_text()}"
        files_of.write(place / "lower", lower.encode())
        (place / "work").mkdir(mode=0o700, exist_ok=True)
        (parent / "committed").touch(0o600)
    # Docker says so of a layer when another one, or a container, is put above it. Of one that lacks it, it takes the
    # files for the writable part of a mount when it saves the image, which the store can't be.
    (place / "committed").touch(0o600)
    if copy:
        _copy_layer(layer_path(layer.diff_id, store), place / "diff", copy)
    else:
        # Files of which nothing records that they are whole: an earlier repair was cut short.
        if (place / "diff").is_dir() and not (place / "diff").is_symlink():
            trees.remove(place / "diff")
        files_of.link(layer_path(layer.diff_id, store), place / "diff")
    files_of.link(Path("..") / cache / "diff", root / "overlay2/l" / link)
    return 6


def _copy_layer(source: Path, target: Path, copy: Callable[[Path, Path], None]) -> None:
    """Copy a layer beside its place, then put it there: a name is never that of half a layer."""
    draft = target.with_name(f".{target.name}.new")
    trees.remove(draft)
    copy(source, draft)
    if target.is_symlink():
        target.unlink()
    else:
        trees.remove(target)
    draft.rename(target)


def _copy_missing(source: Path, root: Path, name: Path) -> int:
    """Copy the small files of the directory ``name`` that ``root`` lacks; return their number."""
    files = 0
    for folder, _, names in os.walk(source / name, onerror=_damaged):
        there = root / Path(folder).relative_to(source)
        files_of.directory(there, stat.S_IMODE(os.stat(folder).st_mode))
        for found in names:
            if not (there / found).exists():
                files += files_of.copy(Path(folder, found), there / found)
    return files


def _damaged(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        with reading(Path(error.filename)):
            raise error


# -- names -----------------------------------------------------------------------------------------------------

Names = dict[str, dict[str, str]]


def _names(root: Path) -> dict[str, Any]:
    """Return the names in a data root; none where a power cut left no whole file, on which Docker would not start."""
    try:
        found = json.loads((root / _IMAGE / "repositories.json").read_bytes())
    except (FileNotFoundError, ValueError):
        found = {}
    whole = isinstance(found, dict) and isinstance(found.get("Repositories"), dict)
    return found if whole else {"Repositories": {}}


def _names_of(baked: dict[str, Any], image_id: str) -> Names:
    """Return what the bake calls an image: by repository, references by tag and by digest."""
    return {
        repository: mine
        for repository, all_ in baked["Repositories"].items()
        if (mine := {reference: found for reference, found in all_.items() if found == image_id})
    }


def _has(names: dict[str, Any], named: Names) -> bool:
    there = names["Repositories"]
    return all(
        there.get(repository, {}).get(ref) == found
        for repository, mine in named.items()
        for ref, found in mine.items()
    )


def _merge(names: dict[str, Any], named: Names) -> None:
    for repository, mine in named.items():
        names["Repositories"].setdefault(repository, {}).update(mine)
