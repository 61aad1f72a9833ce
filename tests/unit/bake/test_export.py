"""What an export contains of a build, and which index counts as an export."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from image_builder.bake.export import INDEX, export, read_index, required, take_over
from image_builder.bake.store import Store
from image_builder.canonical import digest
from image_builder.errors import StoreError, UsageError
from image_builder.events import Monitor
from image_builder.settings import Settings

EMPTY: dict[str, Any] = {"format": 1, "objects": [], "downloads": [], "images": {}}


def _stage(name: str, kind: str, lowers: str = "", **inputs: str) -> dict[str, Any]:
    """Return a store's record of a stage, whose id is its name."""
    return {"name": name, "id": name, "kind": kind, "lowers": lowers.split(), "inputs": inputs}


def _worker() -> dict[str, dict[str, Any]]:
    trees = "node container_runtime base"
    stages = [
        _stage("tools", "tools"),
        _stage("build_root", "tools"),
        _stage("kubelet_build", "go", root="build_root"),
        _stage("base", "base", tools="tools"),
        _stage("container_runtime", "layer", "base"),
        _stage("preload", "preload"),
        _stage("preload_store", "preload_store", preload="preload", tools="tools"),
        _stage("node", "layer", "container_runtime base", build="kubelet_build"),
        _stage("kubernetes", "layer", trees),
        _stage("seal", "seal", f"kubernetes preload_store {trees}"),
        _stage("verify", "verify", f"seal kubernetes preload_store {trees}"),
        _stage("disk", "disk", f"seal kubernetes preload_store {trees}", tools="tools"),
        _stage("convert", "convert", f"seal kubernetes preload_store {trees}", disk="disk", tools="tools"),
    ]
    return {stage["name"]: stage for stage in stages}


def test_compilers_and_what_they_made_for_lower_layers_are_left_out() -> None:
    worker = _worker()
    names = [stage["name"] for stage in required(worker)]
    assert names == [name for name in worker if name not in ("build_root", "kubelet_build")]
    assert [stage["name"] for stage in required(worker, everything=True)] == list(worker)


def test_what_the_last_layer_takes_is_there_when_it_runs_again() -> None:
    worker = _worker()
    worker["kubernetes"]["inputs"] = {"build": "kubelet_build"}
    assert "kubelet_build" in [stage["name"] for stage in required(worker)]


def test_an_image_without_layers_is_taken_whole() -> None:
    stages = {name: stage for name, stage in _worker().items() if stage["kind"] != "layer"}
    assert required(stages) == list(stages.values())


def _write(directory: Path, document: dict[str, Any], *, signed: bool = True) -> None:
    if signed:
        document = {**document, "sha256": digest(document)}
    (directory / INDEX).write_text(json.dumps(document))


def test_an_index_without_anything_is_one(tmp_path: Path) -> None:
    _write(tmp_path, EMPTY)
    assert read_index(tmp_path).objects == []


_ARCHIVE = {
    "id": "0" * 64,
    "file": f"objects/{'0' * 64}.tar.zst",
    "sha256": "1" * 64,
    "bytes": 1,
    "unpacked": 1,
}


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (lambda _: None, "is no export of a store"),
        (lambda path: (path / INDEX).write_text("{"), "is damaged"),
        (lambda path: (path / INDEX).write_bytes(b"\xff\xfe"), "is damaged"),
        (lambda path: (path / INDEX).write_text("[]"), "is not an export of format 1"),
        (lambda path: _write(path, {**EMPTY, "format": 2}), "is not an export of format 1"),
        (lambda path: _write(path, {**EMPTY, "sha256": "0" * 64}, signed=False), "is damaged"),
        (lambda path: _write(path, EMPTY, signed=False), "is damaged"),
        (
            lambda path: _write(path, {**EMPTY, "objects": [{**_ARCHIVE, "file": "/etc/passwd"}]}),
            r"objects\.0\.file",
        ),
        (
            lambda path: _write(path, {**EMPTY, "images": {"../x": {"stages": [], "lock": None}}}),
            r"images\.\.\./x",
        ),
        (
            lambda path: _write(path, {**EMPTY, "images": {"x": {"stages": [], "lock": {"format": 9}}}}),
            r"images\.x\.lock",
        ),
    ],
)
def test_what_is_no_index_is_refused_before_there_is_a_store(
    tmp_path: Path, write: Callable[[Path], None], reason: str
) -> None:
    write(tmp_path)
    with pytest.raises(StoreError, match=reason) as raised:
        take_over(tmp_path, Store(tmp_path / "store"), Monitor())
    assert raised.value.hint
    assert not (tmp_path / "store").exists()


def test_an_image_that_was_not_built_is_named(tmp_path: Path) -> None:
    Store(tmp_path / "store").prepare()
    with pytest.raises(StoreError, match=r"has no build of worker@lab-1"):
        export(["worker@lab-1"], tmp_path / "out", Settings(store=tmp_path / "store"), {}, Monitor())
    assert not (tmp_path / "out").exists()


def test_a_directory_of_something_else_is_not_written_to(tmp_path: Path) -> None:
    settings = Settings(store=tmp_path / "store")
    Store(settings.store).prepare()
    (tmp_path / "home").mkdir()
    (tmp_path / "home/letter").touch()
    with pytest.raises(UsageError, match="is no export, it has letter"):
        export([], tmp_path / "home", settings, {}, Monitor())
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["letter"]
