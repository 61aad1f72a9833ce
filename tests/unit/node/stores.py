"""A preload store as a directory, and its manifest: what the agent reads, made by hand."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from image_builder.node.seed import records
from image_builder.node.store import Image, chain


def digest(text: str) -> str:
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def stored(name: str, *layers: str, mode: str = "reference") -> Image:
    """Return an image with layers of these names."""
    return Image(
        ref=f"lab/{name}:1",
        digest=digest(f"{name} digest"),
        manifest=digest(f"{name} manifest"),
        id=digest(name),
        pin=False,
        required=True,
        mode=mode,
        diff_ids=tuple(digest(layer) for layer in layers),
    )


def docker_store(folder: Path, images: Sequence[Image]) -> Path:
    """Make the Docker part of a store; each layer has one file, ``name``. Return the store's mount point."""
    image_root = folder / "docker/image/overlay2"
    (image_root / "imagedb/content/sha256").mkdir(parents=True)
    names: dict[str, dict[str, str]] = {}
    for image in images:
        # Its digest is the image's id.
        name = image.ref.removeprefix("lab/").partition(":")[0]
        (image_root / "imagedb/content/sha256" / image.id[7:]).write_text(name)
        last = image_root / "imagedb/metadata/sha256" / image.id[7:]
        last.mkdir(parents=True)
        (last / "lastUpdated").write_text("2026-01-01T00:00:00Z")
        repository = image.ref.partition(":")[0]
        names.setdefault(repository, {})
        names[repository] |= {image.ref: image.id, f"{repository}@{image.digest}": image.id}
        seen: list[str] = []
        for layer in chain(image.diff_ids):
            again = seen.count(layer.diff_id)
            directory = f"{layer.diff_id[7:]}.{again}" if again else layer.diff_id[7:]
            _docker_layer(folder, image_root, layer.chain, layer.diff_id, layer.parent, directory)
            seen.append(layer.diff_id)
    (image_root / "repositories.json").write_text(json.dumps({"Repositories": names}))
    by_digest = image_root / "distribution/diffid-by-digest/sha256"
    by_digest.mkdir(parents=True)
    (by_digest / "abc").write_text("sha256:def")
    records.pack(folder / "docker")
    return folder


def edit_records(source: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a store's records."""
    path = source / records.NAME
    found = json.loads(path.read_bytes())
    change(found)
    path.write_text(json.dumps(found))


def _docker_layer(
    store: Path, image_root: Path, chain_id: str, diff_id: str, parent: str, directory: str
) -> None:
    record = image_root / "layerdb/sha256" / chain_id[7:]
    if record.exists():
        return
    cache = hashlib.sha256(f"cache {chain_id}".encode()).hexdigest()
    record.mkdir(parents=True)
    texts = {"diff": diff_id, "size": "4", "cache-id": cache, "tar-split.json.gz": "split"}
    for name, text in (texts | ({"parent": parent} if parent else {})).items():
        (record / name).write_text(text)
    place = store / "docker/overlay2" / cache
    place.mkdir(parents=True)
    (place / "link").write_text(cache[:26].upper())
    (place / "diff").symlink_to(f"../../../layers/{directory}")
    files = store / "layers" / directory
    files.mkdir(parents=True, exist_ok=True)
    (files / "name").write_text(diff_id)


def manifest(**changes: Any) -> dict[str, Any]:
    """Return a ``store.json`` of two images with a common layer."""
    images = [stored("one", "base", "a"), stored("two", "base", "b")]
    document = {
        "format": 1,
        "id": "0" * 64,
        "file": "/opt/preload/store.erofs",
        "bytes": 8192,
        "verity": {"root_hash": "1" * 64, "salt": "2" * 64, "hash_offset": 4096},
        "engines": {"docker": {"version": "26.1.5+dfsg1", "binary": "/usr/sbin/dockerd", "bytes": 10}},
        "images": [
            {**image.__dict__, "platform": "linux/amd64", "bytes": 8, "diff_ids": list(image.diff_ids)}
            for image in images
        ],
        "layers": [{"diff_id": digest(name), "bytes": 4096} for name in ("base", "a", "b")],
    }
    return {**document, **changes}
