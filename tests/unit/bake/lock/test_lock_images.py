"""Notes made while images are locked: mirrors whose logins Docker doesn't use, and pauses that registries request."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from image_builder.bake.lock import resolve
from image_builder.bake.lock.model import Image, Lock, LockedLayer
from image_builder.bake.pull.credentials import VARIABLE
from image_builder.bake.pull.network import Mirror, Network
from image_builder.errors import PullError
from image_builder.events import Monitor
from tests.unit.bake.pull.test_pull_docker import image

REF = "docker.io/library/app:1"


class Notes(Monitor):
    """A monitor that keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


class Definition:
    """A definition with one image to preload."""

    preload = (Image(**dict(image(REF)), pin=False),)


OTHER, APART = "docker.io/library/app:stable", "docker.io/library/tool:1"


@pytest.mark.parametrize(
    ("engine", "refs", "pinned", "named"),
    [
        ("docker", [REF, OTHER], [REF, OTHER], [REF, OTHER]),
        ("docker", [REF, OTHER], [REF], [REF]),
        ("docker", [REF, OTHER], [], []),
        ("docker", [REF, APART], [REF, APART], []),
        ("containerd", [REF, OTHER], [REF, OTHER], []),
    ],
)
def test_pinned_names_that_docker_cant_protect_are_named(
    monkeypatch: pytest.MonkeyPatch, engine: str, refs: list[str], pinned: list[str], named: list[str]
) -> None:
    def locked(ref: str) -> Any:
        digit = "b" if ref == APART else "a"
        return image(ref).model_copy(update={"config": f"sha256:{digit * 64}"})

    class Several:
        preload = tuple(Image(**dict(locked(ref)), pin=ref in pinned) for ref in refs)

    monkeypatch.setattr(resolve, "locate", lambda ref, *_, **__: locked(ref))
    monkeypatch.setattr(resolve, "node_network", lambda _: Network({}))
    monkeypatch.setattr(resolve, "resolved_variables", lambda _: {"container_runtime_engine": engine})
    monitor = Notes()
    lock = Lock(image="worker", source_date_epoch=1, repositories={}, groups={})
    resolve.lock_images(Several(), lock, {}, monitor)  # type: ignore[arg-type]
    notes = [note.partition(" from the kubelet's")[0] for note in monitor.notes]
    assert notes == ([f"warning: Docker can't protect {', '.join(named)}"] if named else [])


@pytest.mark.parametrize(("engine", "count"), [("docker", 1), ("containerd", 0)])
def test_notes(monkeypatch: pytest.MonkeyPatch, engine: str, count: int) -> None:
    def locate(*_: object, on_wait: Any, **__: object) -> object:
        on_wait(30.0)
        return image(REF)

    mirrors = {"docker.io": [Mirror("https://one.example/hub"), Mirror("https://two.example")]}
    monkeypatch.setattr(resolve, "locate", locate)
    monkeypatch.setattr(resolve, "node_network", lambda _: Network(mirrors))
    monkeypatch.setattr(resolve, "resolved_variables", lambda _: {"container_runtime_engine": engine})
    monkeypatch.setenv(VARIABLE, json.dumps({"one.example": {"username": "robot", "password": "canary"}}))
    monkeypatch.setenv("DOCKER_CONFIG", "/nowhere")
    monitor, definition = Notes(), Definition()
    lock = Lock(image="worker", source_date_epoch=1, repositories={}, groups={})
    locked = resolve.lock_images(definition, lock, {}, monitor)  # type: ignore[arg-type]
    assert [i.ref for i in locked.images] == [REF]
    *warnings, wait = monitor.notes
    assert wait == f"{REF}: waiting for 30 s, as its registry asks"
    assert len(warnings) == count
    assert all("Docker doesn't log in to mirrors: " in w and "https://one.example/hub" in w for w in warnings)


@pytest.mark.parametrize("installed", [["docker", "containerd"], []])
@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize(("engine", "most"), [("docker", 125), ("containerd", 500)])
def test_more_layers_than_an_engine_takes(
    monkeypatch: pytest.MonkeyPatch, engine: str, most: int, required: bool, installed: list[str]
) -> None:
    layer = LockedLayer(digest=f"sha256:{1:064}", size=1, diff_id=f"sha256:{1:064}")
    deep = image(REF).model_copy(update={"layers": [layer] * most})
    variables = {"container_runtime_engine": engine, "container_runtime_install": installed}
    monkeypatch.setattr(resolve, "locate", lambda *_, **__: deep)
    monkeypatch.setattr(resolve, "node_network", lambda _: Network({}))
    monkeypatch.setattr(resolve, "resolved_variables", lambda _: variables)
    definition = SimpleNamespace(
        preload=[SimpleNamespace(ref=REF, platform=deep.platform, required=required, pin=False)]
    )
    lock = Lock(image="worker", source_date_epoch=1, repositories={}, groups={})

    def locked() -> list[str]:
        made = resolve.lock_images(definition, lock, {}, Notes())  # type: ignore[arg-type]
        return [i.ref for i in made.images]

    fits = most <= 125 or not installed
    if fits:
        assert locked() == [REF]
        deep = deep.model_copy(update={"layers": [layer] * (most + 1)})
    if required:
        with pytest.raises(PullError, match=f"^{REF}: has {len(deep.layers)} layers, and "):
            locked()
    else:
        assert locked() == []
