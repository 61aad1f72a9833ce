"""Odd images as a container sees them: seeded and promoted, compared with a plain pull by the same engine."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from image_builder.bake.lock.model import LockedImage
from image_builder.bake.pull.puller import Request
from image_builder.bake.stages.rehearsal import run as rehearsal
from image_builder.node import layout
from image_builder.system import namespace
from tests.support.registries import odd_images
from tests.support.registries.pulls import Lab
from tests.support.stores.seeds import AGENT, Baked, bake, differences, docker, exact, node, stage

Result = dict[str, Any]
View = Mapping[str, Any]


def scenario(lab: Lab, *names: str) -> Result:
    """Return, for each image, how it differs from a plain pull when seeded and when promoted; empty if it doesn't."""
    refs = odd_images.push(lab, names)
    images = {name: lab.locate(ref) for name, ref in refs.items()}
    pulled, refused = plain_pull(lab, images)
    images = {name: image for name, image in images.items() if name in pulled}
    baked = bake(lab, list(images.values()), pins=list(refs.values()), archive=False)
    found: Result = {
        "refused": refused,
        "seconds_comparing": rehearse(lab, baked),
        "version": baked.manifest()["engines"][lab.engine],
    }
    with node(lab, baked.opt) as here:
        limits = {"enabled": True, "settle_seconds": 0, "wait_seconds": 0, "reserve_percent": 1}
        here.settings(promote={**limits, "bytes_per_second": 0})
        here.told_of_disk()
        found["seed"] = here.seed()["state"]
        with here.engine() as running:
            found["seeded"] = compare(lab, running, images, pulled, here.data, here.store)
            here.root.run([AGENT, "preload"], ok=(0, 1))
            found["preload"] = here.status()["preload"]
            if lab.engine == "docker":
                found["volumes"] = docker(here, "volume", "ls", "--quiet").split()
        here.root.run([AGENT, "promote"])
        found["left"] = here.status()["promotion"]["layers_left"]
        with here.engine() as running:
            found["promoted"] = compare(lab, running, images, pulled, here.data, here.store)
    return found


def plain_pull(lab: Lab, images: Mapping[str, LockedImage]) -> tuple[dict[str, View], dict[str, str]]:
    """Pull into an empty data root; return what a container sees of each image, and why others can't be pulled."""
    state = lab.folder("plain")
    lab.endpoints = dict(lab.behind)
    with lab.running(state) as engine:
        done = lab.pull(engine, [Request(image, required=False) for image in images.values()], attempts=1)
        assert not done["error"] and not done["bug"], done
        refused = {name: done["failed"][i.ref] for name, i in images.items() if i.ref in done["failed"]}
        folders = {name: engine.layer_folders(i) for name, i in images.items() if name not in refused}
    return {name: view(lab, [state / f for f in of_image]) for name, of_image in folders.items()}, refused


def rehearse(lab: Lab, baked: Baked) -> float:
    """Run the bake's rehearsal; return the seconds that its comparison takes."""
    inputs = {"preload_store": baked.opt.parent.parent, lab.engine: baked.state.parent}
    ctx = stage(
        lab, lab.folder("rehearsal"), "rehearsal", {"images": baked.options, "engines": [lab.engine]}, inputs
    )
    compare, seconds = rehearsal._require_equal, 0.0

    def timed(*words: Any) -> None:
        nonlocal seconds
        started = time.monotonic()
        compare(*words)
        seconds = time.monotonic() - started

    rehearsal._require_equal = timed  # type: ignore[assignment]
    rehearsal.run(ctx)
    return round(seconds, 2)


def compare(
    lab: Lab,
    running: Any,
    images: Mapping[str, LockedImage],
    pulled: Mapping[str, View],
    data: Path,
    store: Path,
) -> dict[str, str]:
    """Return how each image differs from a plain pull: in its names, its start or its files."""
    found = {}
    for name, image in images.items():
        if not running.has(image):
            found[name] = "is not there"
        elif not running.try_out(image):
            found[name] = "does not start"
        else:
            folders = [data / folder for folder in running.layer_folders(image)]
            wrong = differences(view(lab, [_real(folder, store) for folder in folders]), pulled[name])
            found[name] = wrong[0] if wrong else ""
    return found


def _real(folder: Path, store: Path) -> Path:
    """Return where a layer's files are: a link of the seed leads there on a node."""
    return store / layout.LAYERS / os.readlink(folder).rpartition("/")[2] if folder.is_symlink() else folder


def view(lab: Lab, folders: Sequence[Path]) -> View:
    """Mount layers, the lowest first, as an engine does; return what is in the mount."""
    where = lab.folder("view")
    if len(folders) == 1:
        return _seen(folders[0])
    # A mount's options must fit a page: links with short names stand for the layers.
    for number, folder in enumerate(reversed(folders)):
        (where / str(number)).symlink_to(folder)
    (where / "merged").mkdir()
    os.chdir(where)
    namespace.mount("overlay", "overlay", "merged", "lowerdir=" + ":".join(map(str, range(len(folders)))))
    os.chdir("/")
    try:
        return _seen(where / "merged")
    finally:
        namespace.unmount(os.fspath(where / "merged"))


def _seen(tree: Path) -> View:
    """Return a tree's entries without the times of directories, and by text that JSON can hold."""
    return {
        repr(name): [value for n, value in enumerate(entry) if n != 5 or entry[0] != stat.S_IFDIR]
        for name, entry in exact(tree).items()
    }
