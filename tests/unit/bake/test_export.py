"""The contents of a build's export, and the indexes that count as an export."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from image_builder.bake import export as exporting
from image_builder.bake import space
from image_builder.bake.export import INDEX, export, read_index, required, take_over
from image_builder.bake.store import Store
from image_builder.canonical import digest
from image_builder.errors import CommandError, SpaceError, StoreError, UsageError
from image_builder.events import Monitor
from image_builder.settings import Settings
from image_builder.system import process

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
        export({"worker@lab-1": ()}, tmp_path / "out", Settings(store=tmp_path / "store"), {}, Monitor())
    assert not (tmp_path / "out").exists()


def test_a_directory_of_something_else_is_not_written_to(tmp_path: Path) -> None:
    settings = Settings(store=tmp_path / "store")
    Store(settings.store).prepare()
    (tmp_path / "home").mkdir()
    (tmp_path / "home/letter").touch()
    with pytest.raises(UsageError, match="is no export, it has letter"):
        export({}, tmp_path / "home", settings, {}, Monitor())
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["letter"]


def test_a_full_disk_ends_an_export_with_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(argv: Sequence[str | Path], **_: object) -> None:
        Path(argv[argv.index("--file") + 1]).write_text("half of it")
        raise CommandError("tar failed", tail="tar: write error")

    store = Store(tmp_path / "store")
    store.prepare()
    monkeypatch.setattr(store, "check", lambda _: None)
    monkeypatch.setattr(process, "run", run)
    (tmp_path / "objects").mkdir()
    with pytest.raises(CommandError, match="tar failed"):
        exporting._pack(store, "0" * 64, 1, tmp_path)
    monkeypatch.setattr(space, "shortage", lambda path: f"No space left on the filesystem of {path}")
    with pytest.raises(SpaceError, match=f"filesystem of {tmp_path}:") as raised:
        exporting._pack(store, "0" * 64, 1, tmp_path)
    assert raised.value.hint
    assert not any((tmp_path / "objects").iterdir()), "the half archive takes no space"


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_file_is_no_place_for_an_export(tmp_path: Path, place: str) -> None:
    settings = Settings(store=tmp_path / "store")
    Store(settings.store).prepare()
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=f"{place} is no directory") as raised:
        export({}, tmp_path / place, settings, {}, Monitor())
    assert raised.value.hint


@pytest.mark.parametrize("exported", ["", "sound"], ids=["new", "sound there"])
@pytest.mark.parametrize("sound", [True, False])
def test_damaged_downloads_are_not_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exported: str, sound: bool
) -> None:
    store = Store(tmp_path / "store")
    store.prepare()
    contents = {"sound": b"package", "damaged": b"PACKAGE"}
    name = hashlib.sha256(contents["sound"]).hexdigest()
    (store.path / "debs" / name).write_bytes(contents["sound" if sound else "damaged"])
    (tmp_path / "downloads").mkdir()
    target = tmp_path / "downloads" / name
    if exported:
        target.write_bytes(contents[exported])
    notes: list[str] = []
    monitor = Monitor()
    monkeypatch.setattr(monitor, "note", notes.append)
    listed, copied = exporting._copy_downloads([name], store, tmp_path, monitor)
    kept = sound or exported == "sound"
    assert [download.sha256 for download in listed] == [name] * kept
    assert copied == ([] if exported == "sound" else listed)
    assert [path for path in (tmp_path / "downloads").iterdir() if path != target] == []
    assert not kept or target.read_bytes() == contents["sound"]
    assert [name in note and "store verify" in note for note in notes] == [True] * (not kept)


@pytest.mark.parametrize("exported", [b"package", b"packag"], ids=["sound", "damaged"])
def test_a_download_cut_short_does_not_replace_a_sound_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exported: bytes
) -> None:
    store = Store(tmp_path / "store")
    store.prepare()
    name = hashlib.sha256(b"package").hexdigest()
    (store.path / "debs" / name).write_bytes(b"pack")
    target = tmp_path / "downloads" / name
    target.parent.mkdir()
    target.write_bytes(exported)
    notes: list[str] = []
    monitor = Monitor()
    monkeypatch.setattr(monitor, "note", notes.append)
    listed, copied = exporting._copy_downloads([name], store, tmp_path, monitor)
    sound = exported == b"package"
    assert [(download.sha256, download.bytes) for download in listed] == [(name, 7)] * sound
    assert copied == [] and list(target.parent.iterdir()) == [target]
    assert target.read_bytes() == exported
    assert len(notes) == 1 and "store verify" in notes[0]
