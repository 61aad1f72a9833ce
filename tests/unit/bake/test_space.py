"""A build's space is estimated from what it still has to do; the build is refused where less is free."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from image_builder.bake import space
from image_builder.bake.executor import Build
from image_builder.bake.lock.model import Lock, LockedGroup, LockedImage, LockedLayer, LockedPackage
from image_builder.bake.plan.model import StagePlan
from image_builder.bake.plan.resolve import kinds
from image_builder.bake.store import Store
from image_builder.canonical import JSON
from image_builder.definition import ImageDefinition
from image_builder.errors import SpaceError
from image_builder.events import Monitor
from image_builder.settings import Settings
from tests.support.shipped import shipped

REPO = Path(__file__).resolve().parents[3]
MB = 1_000_000
GROUPS = {"build_root": 130, "base": 50, "system": 70, "kubernetes": 10}
STAGES = {
    "build_root": "base",
    "kubelet_build": "go",
    "base": "base",
    "system": "layer",
    "kubernetes": "layer",
    "disk": "disk",
    "convert": "convert",
}


@cache
def definition() -> ImageDefinition:
    return shipped("lab").define("worker")


def lock() -> Lock:
    """Return a lock with one package per group, of as many megabytes as GROUPS says."""
    return Lock(
        image="worker",
        source_date_epoch=1,
        repositories={"debian": None},
        groups={
            name: LockedGroup(
                suite="trixie",
                components=["main"],
                requested=[name],
                packages=[
                    LockedPackage(
                        name=name,
                        sha256=hashlib.sha256(name.encode()).hexdigest(),
                        size=size * MB,
                        path=f"{name}.deb",
                        repository="debian",
                        version="1",
                        architecture="amd64",
                    )
                ],
            )
            for name, size in GROUPS.items()
        },
    )


def todo(*names: str) -> list[StagePlan]:
    options: dict[str, JSON] = {"formats": definition().formats}
    compiling = StagePlan("kubelet_build", "go", options)
    needed = {"kubernetes": {compiling.name: compiling.id}}
    return [StagePlan(name, STAGES[name], options, inputs=needed.get(name, {})) for name in names or STAGES]


def work(store: Store) -> Build:
    folder = store.path.parent
    settings = Settings(store=store.path, output=folder / "output")
    return Build(definition(), lock(), settings, store, Monitor(), folder, kinds())


def estimate(store: Store, *names: str) -> tuple[int, int]:
    return space.estimate(work(store), todo(*names))


def test_a_build_that_stops_before_the_disk_needs_no_room_for_it(store: Store) -> None:
    whole, published = estimate(store)
    layers, nothing = estimate(store, "base", "system", "kubernetes")
    assert layers < 0.5 * whole
    assert (published > 0, nothing) == (True, 0)


def test_what_is_fetched_is_not_counted_again(store: Store) -> None:
    before, _ = estimate(store, "base", "system")
    for name in ("base", "system"):
        (store.path / "debs" / hashlib.sha256(name.encode()).hexdigest()).touch()
    after, _ = estimate(store, "base", "system")
    assert before - after == (50 + 70) * MB


def test_what_compiling_takes_is_free_again_when_more_is_needed(store: Store) -> None:
    alone, _ = estimate(store, "kubelet_build")
    before, _ = estimate(store, "base", "system", "kubernetes", "disk", "convert")
    both, _ = estimate(store, "kubelet_build", "base", "system", "kubernetes", "disk", "convert")
    assert alone > 2 * 1024 * MB
    assert max(alone, before) < both < alone + before


def test_layers_are_made_while_a_program_compiles(store: Store) -> None:
    compiling, _ = estimate(store, "kubelet_build")
    system, _ = estimate(store, "system")
    both, _ = estimate(store, "kubelet_build", "system")
    assert both == compiling + system


def test_the_shortfall_is_named(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = sum(estimate(store))
    free = SimpleNamespace(free=needed)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: free)
    with pytest.raises(SpaceError, match=r"200 MiB are missing|201 MiB are missing"):
        space.check(work(store), todo())
    free.free += 201 << 20
    space.check(work(store), todo())


@pytest.mark.parametrize(
    ("engine", "archive", "bytes_"),
    [
        pytest.param("docker", True, 3.2 + 1.92, id="docker"),
        pytest.param("docker", False, 1.92, id="docker, the store only"),
        pytest.param("containerd", True, 1 + 1.92 + 1, id="containerd"),
        pytest.param("containerd", False, 1.92 + 1, id="containerd, the store only"),
    ],
)
def test_preloaded_images_take_so_much_of_the_disk(
    monkeypatch: pytest.MonkeyPatch, engine: str, archive: bool, bytes_: float
) -> None:
    """Per byte of the layers as they are pulled; a layer that two images share counts once."""
    layer = LockedLayer(digest=f"sha256:{'1' * 64}", size=1000 * MB, diff_id=f"sha256:{'2' * 64}")
    digest = layer.digest
    shared = [
        LockedImage(
            ref=ref, platform="linux/amd64", digest=digest, manifest=digest, config=digest, layers=[layer]
        )
        for ref in ("a.test/a:1", "a.test/b:1")
    ]
    monkeypatch.setattr(space, "engines", lambda _definition: [engine])
    declared = replace(definition(), preload_archive=archive)
    bare = space._sizes(lock(), declared).tree
    sizes = space._sizes(lock().model_copy(update={"images": shared}), declared)
    assert sizes.tree - bare == pytest.approx(bytes_ * 1000 * MB)
