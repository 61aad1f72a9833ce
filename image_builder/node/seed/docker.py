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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from image_builder.node import durable
from image_builder.node.layout import MOUNT_POINT, layer_path
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
    mounted. Raises OSError.
    """
    source = store / SOURCE
    _directories(root)
    names = _read(root / _IMAGE / "repositories.json")
    baked = _read(source / _IMAGE / "repositories.json")
    added, layers, files = [], 0, 0
    for image in images:
        before, changed = layers, False
        for layer in chain(image.diff_ids):
            if not _has_layer(root, layer):
                files += _add_layer(source, root, layer, store, copy if image.mode == "copy" else None)
                layers += 1
        config = _IMAGE / "imagedb/content/sha256" / image.id.removeprefix("sha256:")
        if not (root / config).exists():
            files += _copy_file(source / config, root / config)
            changed = True
        named = _names_of(baked, image.id)
        if changed or layers > before or not _has(names, named):
            _merge(names, named)
            added.append(image.ref)
    files += _copy_missing(source / _IMAGE / "distribution", root / _IMAGE / "distribution")
    if added:
        durable.write(root / _IMAGE / "repositories.json", json.dumps(names).encode(), 0o600)
    return Filled(tuple(added), layers, files)


def lacking(images: Iterable[StoredImage], root: Path) -> list[str]:
    """Return the references of the images that a data root has lost, without looking into the store."""
    try:
        there = {
            ref: found
            for mine in _read(root / _IMAGE / "repositories.json")["Repositories"].values()
            for ref, found in mine.items()
        }
    except (KeyError, ValueError):
        there = {}
    return [
        image.ref
        for image in images
        if there.get(image.ref) != image.id
        or not all(_has_layer(root, layer) for layer in chain(image.diff_ids))
    ]


def _directories(root: Path) -> None:
    for name, mode in (
        (".", 0o710),
        ("image", 0o700),
        (_IMAGE, 0o700),
        (_IMAGE / "imagedb", 0o700),
        (_IMAGE / "imagedb/content", 0o700),
        (_IMAGE / "imagedb/content/sha256", 0o700),
        (_IMAGE / "imagedb/metadata", 0o700),
        (_IMAGE / "imagedb/metadata/sha256", 0o700),
        (_IMAGE / "layerdb", 0o700),
        (_IMAGE / "layerdb/sha256", 0o700),
        ("overlay2", 0o710),
        ("overlay2/l", 0o700),
    ):
        path = root / name
        if not path.is_dir():
            path.mkdir(parents=True)
            path.chmod(mode)


def _has_layer(root: Path, layer: Layer) -> bool:
    """Tell whether a layer is recorded and its files are where the record says, also through a link."""
    try:
        cache = (_record(root, layer.chain) / "cache-id").read_text()
    except OSError:
        return False
    return (root / "overlay2" / cache / "diff").is_dir()


def _record(root: Path, chain_id: str) -> Path:
    return root / _IMAGE / "layerdb/sha256" / chain_id.removeprefix("sha256:")


def _add_layer(
    source: Path, root: Path, layer: Layer, store: Path, copy: Callable[[Path, Path], None] | None
) -> int:
    """Add one layer above its parent, files first; return the number of files made."""
    record, target = _record(source, layer.chain), _record(root, layer.chain)
    cache = (record / "cache-id").read_text()
    files = _add_files(source, root, layer, cache, store, copy)
    draft = target.with_name(f"{target.name}.tmp")
    draft.mkdir(mode=0o700, exist_ok=True)
    for name in os.listdir(record):
        if name == _TAR_SPLIT and copy is None:
            # It has a line for each file of the layer: read when an image is saved or pushed, and linked as well.
            _link(record / name, draft / name)
        else:
            _copy_file(record / name, draft / name)
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
    link = (baked / "link").read_text()
    _write(place / "link", link)
    if layer.parent:
        # Not as baked: the parent may have been pulled again meanwhile, under another id.
        parent = root / "overlay2" / (_record(root, layer.parent) / "cache-id").read_text()
        lower = f"l/{(parent / 'link').read_text()}"
        if (parent / "lower").exists():
            lower += f":{(parent / 'lower').read_text()}"
        _write(place / "lower", lower)
        (place / "work").mkdir(mode=0o700, exist_ok=True)
        (parent / "committed").touch(0o600)
    if (baked / "committed").exists():
        (place / "committed").touch(0o600)
    if copy:
        if (place / "diff").is_symlink():
            (place / "diff").unlink()
        copy(layer_path(layer.diff_id, store), place / "diff")
    else:
        _link(layer_path(layer.diff_id, store), place / "diff")
    _link(Path("..") / cache / "diff", root / "overlay2/l" / link)
    return 6


def _link(target: Path, path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    path.symlink_to(target)


def _write(path: Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _copy_file(source: Path, target: Path) -> int:
    """Copy a small file whole or, to its reader, not at all."""
    draft = target.with_name(f".{target.name}.new")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(source.read_bytes())
        os.fchmod(fd, source.stat().st_mode & 0o7777)
    draft.replace(target)
    return 1


def _copy_missing(source: Path, target: Path) -> int:
    """Copy the small files of a tree that ``target`` lacks; return their number."""
    files = 0
    for folder, _, names in os.walk(source):
        there = target / Path(folder).relative_to(source)
        there.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in names:
            if not (there / name).exists():
                files += _copy_file(Path(folder, name), there / name)
    return files


# -- names -----------------------------------------------------------------------------------------------------

Names = dict[str, dict[str, str]]


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        found = {"Repositories": {}}
    return found


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
