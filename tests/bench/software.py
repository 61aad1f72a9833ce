"""Images for measurements, made of the worker's own programs: many small files, or the same data in few large ones."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from image_builder.bake.lock.model import LockedImage
from image_builder.system import process
from tests.support.images.builds import Workplace
from tests.support.registries.pulls import MB, Lab
from tests.support.stores.seeds import runnable

PROFILES = ("small", "large")
_LAYERS = 6
_LARGE_FILE = 256 * MB


def worker(store: Path) -> Workplace:
    """Return the image `worker`, built up to its layer `node` if the store doesn't have that."""
    place = Workplace(store, Path(tempfile.gettempdir()), "worker")
    done = place.build("--stop-after", "node")
    assert done.status == 0, done.stderr
    return dataclasses.replace(place, made=tuple(stage["id"] for stage in done.result["stages"]))


def image(lab: Lab, name: str, megabytes: int, profile: str) -> LockedImage:
    """Push a runnable image of the given size. The profile determines its files."""
    files = _programs(lab)
    # A layer must not have a file twice: the second one would be a hard link, which takes no room.
    layers = max(_LAYERS, -(-megabytes * MB // sum(size for _, size in files)))
    each = megabytes * MB // layers
    trees = []
    for number in range(layers):
        tree = lab.folder("software")
        folder = tree / f"opt/layer{number}"
        if profile == "small":
            _link(_take(files, number, each), folder)
        else:
            _join(_take(files, number, each), folder)
        trees.append(tree)
    made = runnable(lab, name, *trees)
    for tree in trees:
        process.run(["rm", "-rf", tree])
    return made


def _programs(lab: Lab) -> list[tuple[Path, int]]:
    return [
        (path, path.stat().st_size)
        for tree in lab.trees
        for path in sorted((tree / "usr").rglob("*"))
        if path.is_file() and not path.is_symlink()
    ]


def _take(files: list[tuple[Path, int]], number: int, size: int) -> Iterator[tuple[int, Path]]:
    """Yield files with their numbers until they reach ``size`` bytes; each layer begins at another file."""
    start = number * 7919
    for index in range(start, start + len(files)):
        if size <= 0:
            return
        path, length = files[index % len(files)]
        yield index, path
        size -= length


def _link(files: Iterator[tuple[int, Path]], folder: Path) -> None:
    for index, path in files:
        target = folder / f"{index // 100}/{index}-{path.name}"
        target.parent.mkdir(parents=True, exist_ok=True)
        os.link(path, target)


def _join(files: Iterator[tuple[int, Path]], folder: Path) -> None:
    folder.mkdir(parents=True)
    target = folder / "0"
    for index, path in files:
        if target.exists() and target.stat().st_size >= _LARGE_FILE:
            target = folder / str(index)
        with path.open("rb") as source, target.open("ab") as sink:
            shutil.copyfileobj(source, sink)
