"""Docker's data root for the graph driver overlay2, from the store (moby: layer/, image/, daemon/graphdriver).

    image/overlay2/imagedb/{content,metadata}/sha256/<image id>
    image/overlay2/layerdb/sha256/<chain id>/{diff,size,cache-id,parent,tar-split.json.gz}
    image/overlay2/distribution/...            digests by diff id, so that a push or pull recognizes the layers
    image/overlay2/repositories.json           names and digests of images
    overlay2/<cache id>/{diff,link,lower,committed,work}, overlay2/l/<link> -> ../<cache id>/diff

``fill`` merges: a blank directory gets everything, an existing data root gets what it has lost. Everything is on the
disk before a record gets its name, and image names come last: Docker trusts a record whose files are empty.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from image_builder.node import data_root, files
from image_builder.node.layout import LAYERS, MOUNT_POINT
from image_builder.node.seed import records as records_of
from image_builder.node.seed.records import Records
from image_builder.node.store import Image, Layer, chain, reading
from image_builder.node.store import copy as copy_file

SOURCE = "docker"
_IMAGE = Path("image/overlay2")


@dataclass(frozen=True)
class Filled:
    """What was added: numbers of layers and files; ``images`` are references."""

    images: tuple[str, ...]
    layers: int
    files: int


def fill(
    images: Iterable[Image],
    root: Path,
    *,
    store: Path = MOUNT_POINT,
    copy: Callable[[Path, Path], None] | None = None,
    aside: bool = False,
) -> Filled:
    """Add missing images to a data root whose engine is stopped; leave everything else alone.

    Layers of an image with the mode ``copy`` are copied by ``copy(source, target)``. ``store`` is where the store is
    mounted. ``aside``: the root is new and not yet in its final place, so there is nothing to check for, and writes
    need not be atomic. Raises OSError, and NodeError (``store.damaged``, ``store.io``).
    """
    baked = records_of.read(store / SOURCE)
    named = _baked_names(baked)
    _directories(root)
    names = _names(root)
    work = _Work(os.fspath(root), store, baked, aside)
    added = []
    for image in images:
        before = work.files
        for layer in chain(image.diff_ids):
            _place(work, layer, copy if image.mode == "copy" else None)
        for kind in ("content", "metadata"):
            _write_missing(work, f"{_IMAGE}/imagedb/{kind}/sha256/{image.id.removeprefix('sha256:')}")
        own_names = _names_of(named, image.id)
        if work.files > before or not _has(names, own_names):
            _merge(names, own_names)
            added.append(image.ref)
    _write_missing(work, f"{_IMAGE}/distribution")
    if work.drafts:
        files.syncfs(root)
        for draft, target in work.drafts:
            _rename(draft, target)
    if added:
        # For a root set up aside, the caller syncs everything at the end.
        data = json.dumps(names).encode()
        files.write(root / _IMAGE / "repositories.json", data, 0o600, durable=not aside)
    return Filled(tuple(added), work.layers, work.files)


def lacking(images: Iterable[Image], root: Path) -> list[str]:
    """Return the references of images that a data root lacks, without reading the store's records."""
    repositories = _names(root)["Repositories"].values()
    recorded = {ref: image_id for references in repositories for ref, image_id in references.items()}
    lowers: dict[str, str] = {}
    return [
        image.ref
        for image in images
        if recorded.get(image.ref) != image.id
        or not _has_configuration(root, image.id.removeprefix("sha256:"))
        or not all(_has_layer(root, layer, lowers) for layer in chain(image.diff_ids))
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
        files.make_directory(root / name, mode)


def _has_configuration(root: Path, digest: str) -> bool:
    """Return whether an image's configuration is there and whole: its name is its digest, which Docker checks, too."""
    try:
        content = Path(root, _IMAGE, "imagedb/content/sha256", digest).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return hashlib.sha256(content).hexdigest() == digest


def _has_text(path: str) -> bool:
    """Return whether a file has contents: a power cut can leave it empty, or full of zeros."""
    try:
        return bool(Path(path).read_bytes().strip(b"\0"))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _has_layer(root: str | Path, layer: Layer, lowers: dict[str, str], *, linked: bool = True) -> bool:
    """Return whether a layer is recorded completely and its files are where the record says, possibly through a link.

    Its ``lower`` must lead to the layers below it, which come first; ``lowers`` gets what a layer above must have.
    ``linked``: its link in ``overlay2/l`` is there as well. Raises NodeError (``store.damaged``, ``store.io``).
    """
    if layer.chain in lowers:
        return True
    record = f"{root}/{_record(layer.chain)}"
    if not (cache := data_root.cache_id(record)) or not files.read_text(f"{record}/size").isdigit():
        return False
    if [files.read_text(f"{record}/{name}") for name in ("diff", "parent")] != [layer.diff_id, layer.parent]:
        return False
    place, split = Path(root, "overlay2", cache), Path(record, "tar-split.json.gz")
    link, lower = files.read_text(place / "link"), files.read_text(place / "lower")
    if not link.isalnum() or lower != lowers.get(layer.parent, "") or not _has_split(split):
        return False
    if linked and not _is_linked(root, link, cache):
        return False
    diff = place / "diff"
    if diff.is_symlink():
        with reading(diff):
            is_there = diff.is_dir()
    else:
        is_there = diff.is_dir()
    if is_there:
        lowers[layer.chain] = _above(link, lower)
    return is_there


def _has_split(path: Path) -> bool:
    if not path.is_file() or path.is_symlink():
        return path.is_symlink()
    with path.open("rb") as file:
        return bool(file.read(64).strip(b"\0"))


def _is_linked(root: str | Path, link: str, cache: str) -> bool:
    try:
        return os.readlink(f"{root}/overlay2/l/{link}") == f"../{cache}/diff"
    except OSError:
        return False


def _record(chain_id: str) -> str:
    return f"{_IMAGE}/layerdb/sha256/{chain_id.removeprefix('sha256:')}"


@dataclass
class _Work:
    """A data root that is being filled. Paths are strings for speed: there may be hundreds of layers, and the engine
    waits.

    ``lowers`` maps chain ids to the ``lower`` of a layer directly above; ``written`` has the small files written, and
    ``drafts`` what gets its name once everything is on the disk.
    """

    root: str
    store: Path
    baked: Records
    aside: bool
    written: set[str] = field(default_factory=set)
    drafts: list[tuple[str, str]] = field(default_factory=list)
    lowers: dict[str, str] = field(default_factory=dict)
    layers: int = 0
    files: int = 0


def _place(work: _Work, layer: Layer, copy: Callable[[Path, Path], None] | None) -> None:
    """Add a layer if it is missing: its files first, then its record. Its parent must have been placed before."""
    if layer.chain in work.lowers:
        return
    record = _record(layer.chain)
    target = f"{work.root}/{record}"
    if not work.aside and _has_layer(work.root, layer, work.lowers, linked=False):
        # It may differ from the baked layer: it may have been pulled again since, under another cache id.
        cache = data_root.cache_id(target)
        place = Path(work.root, "overlay2", cache)
        if not (place / "committed").exists():
            files.create(place / "committed", b"", 0o600)
        if not _is_linked(work.root, link := files.read_text(place / "link"), cache):
            files.link(f"../{cache}/diff", f"{work.root}/overlay2/l/{link}")
            work.files += 1
        return
    _place_files(work, layer, work.baked.text(f"{record}/cache-id"), copy)
    draft, source = target if work.aside else f"{target}.tmp", f"{work.baked.source}/{record}"
    _make_directory(draft, 0o700)
    for name in work.baked.names(record):
        if (record_file := work.baked.files.get(f"{record}/{name}")) is not None:
            files.create(f"{draft}/{name}", record_file[1].encode(), record_file[0])
        elif copy is None:
            # It has a line for each file of the layer and is read only when an image is saved or pushed: link it, too.
            files.link(f"{source}/{name}", f"{draft}/{name}")
        else:
            copy_file(Path(source, name), Path(draft, name))
        work.files += 1
    if draft != target:
        work.drafts.append((draft, target))
    work.layers += 1


def _rename(draft: str, target: str) -> None:
    """Give a draft its name. A record that was damaged gets the draft's files one by one."""
    if not os.path.isdir(target):
        os.replace(draft, target)
        return
    for name in os.listdir(draft):
        os.replace(f"{draft}/{name}", f"{target}/{name}")
    os.rmdir(draft)


def _is_written(work: _Work, name: str) -> bool:
    """Return whether the data root has a small file: an image's configuration as baked, others may have changed."""
    path = f"{work.root}/{name}"
    if "/content/" in name:
        return os.path.isfile(path) and Path(path).read_bytes() == work.baked.text(name).encode()
    return _has_text(path)


def _make_directory(path: str, mode: int) -> None:
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        return
    if mode & 0o077:  # a umask may have cleared these bits
        os.chmod(path, mode)


def _place_files(work: _Work, layer: Layer, cache: str, copy: Callable[[Path, Path], None] | None) -> None:
    place = f"{work.root}/overlay2/{cache}"
    link = work.baked.text(f"overlay2/{cache}/link")
    lower = work.lowers[layer.parent] if layer.parent else ""
    _make_directory(place, 0o710)
    files.create(f"{place}/link", link.encode())
    if lower:
        files.create(f"{place}/lower", lower.encode())
        _make_directory(f"{place}/work", 0o700)
    # Docker marks a layer as committed when it puts another layer, or a container, above it. When saving an image, it
    # uses the files of an uncommitted layer as the writable part of a mount, which the store can't be.
    files.create(f"{place}/committed", b"", 0o600)
    directory = os.path.basename(work.baked.link(f"overlay2/{cache}/diff"))
    source, target = work.store / LAYERS / directory, f"{place}/diff"
    if copy:
        _copy_layer(work, source, Path(target), copy)
    else:
        # No record says that these files are complete: an earlier repair was interrupted.
        if not work.aside and os.path.isdir(target) and not os.path.islink(target):
            files.remove_tree(Path(target))
        files.link(source, target)
    files.link(f"../{cache}/diff", f"{work.root}/overlay2/l/{link}")
    work.lowers[layer.chain] = _above(link, lower)
    work.files += 6


def _above(link: str, lower: str) -> str:
    """Return the ``lower`` of a layer whose parent has this ``link`` and ``lower``."""
    return f"l/{link}:{lower}" if lower else f"l/{link}"


def _copy_layer(work: _Work, source: Path, target: Path, copy: Callable[[Path, Path], None]) -> None:
    """Copy a layer under a draft name: the final name never has half a layer."""
    draft = target.with_name(f".{target.name}.new")
    files.remove_tree(draft)
    copy(source, draft)
    if target.is_symlink():
        target.unlink()
    else:
        files.remove_tree(target)
    if work.aside:
        draft.rename(target)
    else:
        work.drafts.append((os.fspath(draft), os.fspath(target)))


def _write_missing(work: _Work, name: str) -> None:
    """Write those small files at or below ``name`` that the data root lacks, or has without their contents."""
    baked = work.baked
    if name in baked.files:
        path = f"{work.root}/{name}"
        if name not in work.written and (work.aside or not _is_written(work, name)):
            data, mode = baked.text(name).encode(), baked.files[name][0]
            if not work.aside:
                work.drafts.append((f"{path}.tmp", path))
            files.create(path if work.aside else f"{path}.tmp", data, mode)
            work.written.add(name)
            work.files += 1
    elif name in baked.directories:
        files.make_directory(Path(work.root, name), baked.directories[name])
        for entry in baked.names(name):
            _write_missing(work, f"{name}/{entry}")
    elif "/content/" in name:
        raise baked.lost(name)


# -- names -----------------------------------------------------------------------------------------------------

Names = dict[str, dict[str, str]]


def _baked_names(baked: Records) -> dict[str, Any]:
    """Return the image names from the bake. Raises NodeError (``store.damaged``)."""
    try:
        document = json.loads(baked.text(f"{_IMAGE}/repositories.json"))
        names: dict[str, Any] = document["Repositories"]
    except (ValueError, KeyError, TypeError) as error:
        raise baked.lost(f"readable names: {error!r}") from error
    return {"Repositories": names}


def _names(root: Path) -> dict[str, Any]:
    """Return the image names in a data root; none if a power cut left a damaged file, with which Docker won't start."""
    try:
        document = json.loads((root / _IMAGE / "repositories.json").read_bytes())
    except (FileNotFoundError, ValueError):
        document = {}
    names = document.get("Repositories") if isinstance(document, dict) else None
    whole = isinstance(names, dict) and all(isinstance(references, dict) for references in names.values())
    return document if whole else {"Repositories": {}}


def _names_of(baked: dict[str, Any], image_id: str) -> Names:
    """Return the bake's names for an image: for each repository, its references by tag and by digest."""
    return {
        repository: references
        for repository, all_ in baked["Repositories"].items()
        if (references := {reference: target for reference, target in all_.items() if target == image_id})
    }


def _has(names: dict[str, Any], named: Names) -> bool:
    repositories = names["Repositories"]
    return all(
        repositories.get(repository, {}).get(ref) == image_id
        for repository, references in named.items()
        for ref, image_id in references.items()
    )


def _merge(names: dict[str, Any], named: Names) -> None:
    for repository, references in named.items():
        names["Repositories"].setdefault(repository, {}).update(references)
