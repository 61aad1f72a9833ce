"""The engine that is trusted with a seed, and the report about a seed (an actual one: tests/disk)."""

from __future__ import annotations

import errno
import fcntl
import functools
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from image_builder.node import data_root, mounts, preload_settings, status
from image_builder.node.data_root import _LOCKED, scan, user
from image_builder.node.errors import NodeError
from image_builder.node.layout import MOUNT_POINT
from image_builder.node.preload_settings import Preload
from image_builder.node.promote import copy
from image_builder.node.seed import command, containerd, docker, lost, records
from image_builder.node.seed.command import Places, _marker, check_version, describe, leave, run
from image_builder.node.store import Store, chain, open_store, parse_manifest
from tests.unit.node.stores import docker_store, manifest, stored


@pytest.fixture
def binary(tmp_path: Path) -> Path:
    path = tmp_path / "dockerd"
    path.write_bytes(bytes(10))
    return path


def _document(binary: Path, version: str = "26.1.5+dfsg1", size: int = 10) -> dict[str, object]:
    return manifest(engines={"docker": {"version": version, "binary": str(binary), "bytes": size}})


def test_the_program_that_was_baked_is_not_asked(binary: Path) -> None:
    def ask(_binary: str) -> str:
        raise AssertionError("nobody need ask")

    check_version(parse_manifest(_document(binary)), "docker", ask)


@pytest.mark.parametrize("found", ["26.1.5+dfsg1", "26.1.99", "26.1.0~rc1"])
def test_the_same_minor_version_is_trusted(found: str, binary: Path) -> None:
    check_version(parse_manifest(_document(binary, size=11)), "docker", lambda _binary: found)


@pytest.mark.parametrize("found", ["27.0.1", "26.2.0", "2.61.5", "20.10.24", ""])
def test_another_is_not(found: str, binary: Path) -> None:
    with pytest.raises(NodeError) as caught:
        check_version(parse_manifest(_document(binary, size=11)), "docker", lambda _binary: found)
    assert caught.value.code == "seed.version"
    assert found in caught.value.message and "26.1.5+dfsg1" in caught.value.message


def test_an_engine_that_was_not_baked_is_told(binary: Path) -> None:
    with pytest.raises(NodeError) as caught:
        check_version(parse_manifest(_document(binary)), "containerd")
    assert caught.value.code == "seed.engine" and "docker" in caught.value.message


def test_a_program_that_is_gone_is_told(tmp_path: Path) -> None:
    with pytest.raises(NodeError) as caught:
        check_version(parse_manifest(_document(tmp_path / "none")), "docker")
    assert caught.value.code == "seed.engine" and "No such file" in caught.value.message


def _settings(tmp_path: Path, engine: str = "docker") -> Preload:
    document = {"engine": engine, "data_root": str(tmp_path / engine), "mount_point": str(tmp_path)}
    (tmp_path / "preload.json").write_text(json.dumps(document))
    return preload_settings.load(tmp_path)


def test_the_store_is_checked_and_the_marker_lies_on_the_disk(tmp_path: Path) -> None:
    found = _settings(tmp_path)
    assert found.verity
    assert found.marker == tmp_path / ".node/seed/docker.json"


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"format": 2, "store": "x"}', "{}"])
def test_a_marker_of_another_shape_is_none(text: str, tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    settings.marker.parent.mkdir(parents=True)
    settings.marker.write_text(text)
    assert _marker(settings) == {}


def test_a_marker_is_read(tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    settings.marker.parent.mkdir(parents=True)
    settings.marker.write_text('{"format": 1, "store": "x", "engine": "docker"}')
    assert _marker(settings)["store"] == "x"


def _layer(settings: Preload, name: str, parent: str = "", target: Path | None = None) -> Path:
    """Record a Docker layer: a link to ``target``, or a directory with a file. Return the path of its files."""
    record = settings.data_root / "image/overlay2/layerdb/sha256" / name
    record.mkdir(parents=True)
    (record / "cache-id").write_text(f"{name}-files")
    if parent:
        (record / "parent").write_text(f"sha256:{parent}")
    files = settings.data_root / f"overlay2/{name}-files/diff"
    files.parent.mkdir(parents=True)
    (files.parent / "link").write_text(name.upper())
    (settings.data_root / "overlay2/l").mkdir(exist_ok=True)
    (settings.data_root / "overlay2/l" / name.upper()).symlink_to(f"../{name}-files/diff")
    if target:
        files.symlink_to(target)
    else:
        files.mkdir()
        (files / "file").write_text(name)
    return files


def _used(settings: Preload, store: Path = MOUNT_POINT) -> None:
    """Make a Docker data root in use: seeded layers, a pulled one, one pulled on top of a seeded one, a volume."""
    _layer(settings, "seeded", target=store / "layers/abc")
    _layer(settings, "second", "seeded", target=store / "layers/def")
    _layer(settings, "pulled")
    _layer(settings, "above", "second")
    volume = settings.data_root / "volumes/mine/_data"
    volume.mkdir(parents=True)
    (volume / "precious").write_text("precious")
    settings.marker.parent.mkdir(parents=True)
    settings.marker.write_text(json.dumps({"format": 1, "store": "x", "engine": "docker"}))


def _tree(top: Path) -> list[str]:
    return sorted(str(path.relative_to(top)) for path in top.rglob("*"))


def _run(settings: Preload, manifest: Path) -> tuple[int, dict[str, Any]]:
    here = settings.mount_point
    code = run(Places(here / "run", here, manifest=manifest), pause=0)
    section: dict[str, Any] = status.read(here / "run")["seed"]
    return code, section


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_an_error_of_the_disk_takes_nothing_out_of_a_data_root_in_use(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = _settings(tmp_path)
    _used(settings)
    (tmp_path / "store.json").write_text(json.dumps(manifest()))
    before, attempts = _tree(settings.data_root), []

    def fail(_settings: Preload, _store: Store) -> dict[str, Any]:
        attempts.append(number)
        raise OSError(number, os.strerror(number), "here")

    monkeypatch.setattr(command, "seed", fail)
    code, section = _run(settings, tmp_path / "store.json")
    assert code == 1, "the unit fails, and is started again"
    assert len(attempts) == 3
    assert (section["state"], section["code"], section["action"]) == ("degraded", "seed.disk", "none")
    assert section["reason"] == f"here: {os.strerror(number)}"
    assert _tree(settings.data_root) == before and settings.marker.exists()
    assert not (settings.state / "trash").exists()


def _stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a store with Docker's records where the seed looks for it; return its manifest's path."""
    store, binary, path = tmp_path / "store", tmp_path / "dockerd", tmp_path / "store.json"
    docker_store(store, [stored("one", "base", "a"), stored("two", "base", "b")])
    binary.write_bytes(bytes(10))
    path.write_text(json.dumps(_document(binary)))
    monkeypatch.setattr(command, "open_store", lambda *_, **__: None)
    monkeypatch.setattr(command, "close_store", lambda: None)
    monkeypatch.setattr(docker, "fill", functools.partial(docker.fill, store=store))
    return path


def _reads(monkeypatch: pytest.MonkeyPatch, name: str, *failures: int) -> None:
    """Make the first reads of files with this name fail with these errnos."""
    read, left = Path.read_bytes, list(failures)

    def read_bytes(path: Path) -> bytes:
        if path.name == name and left:
            number = left.pop(0)
            raise OSError(number, os.strerror(number), str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)


def test_a_store_that_can_not_be_read_once_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, path = _settings(tmp_path), _stored(tmp_path, monkeypatch)
    _reads(monkeypatch, records.NAME, errno.EIO)
    code, section = _run(settings, path)
    assert (code, section["state"], section["action"], section["layers"]) == (0, "ok", "seeded", 3)
    assert settings.marker.exists()


@pytest.mark.parametrize(
    ("disk", "is_seeded"),
    [
        (None, False),
        ({"state": "failed", "code": "disk.failed", "reason": "EIO"}, False),
        ({"state": "failed", "code": "disk.none", "reason": "none", "action": "none"}, True),
        ({"state": "degraded", "code": "disk.none", "reason": "none", "action": "none"}, True),
        ({"state": "ok", "action": "format"}, True),
    ],
)
def test_nothing_is_seeded_before_there_is_a_decision_on_the_disk(
    disk: dict[str, Any] | None, is_seeded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, path = _settings(tmp_path), _stored(tmp_path, monkeypatch)
    (tmp_path / "disk.json").write_text("{}")
    if disk:
        status.update("disk", disk, Places(tmp_path / "run", tmp_path))
    code, section = _run(settings, path)
    assert (code, settings.data_root.exists(), settings.marker.exists()) == (
        not is_seeded,
        is_seeded,
        is_seeded,
    )
    assert section.get("code", "") == ("" if is_seeded else "seed.disk")


def test_a_root_of_this_store_is_left_to_the_engine_that_runs_on_it_and_repaired_once_it_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, path = _settings(tmp_path), _stored(tmp_path, monkeypatch)
    _run(settings, path)
    monkeypatch.setattr(command, "_has_links", lambda _: True)  # this store isn't where an image's is
    (settings.data_root / "volumes").mkdir()
    with (settings.data_root / "volumes/metadata.db").open("w") as database:
        fcntl.flock(database, fcntl.LOCK_EX)
        assert _run(settings, path)[1]["action"] == "current"
    repositories = settings.data_root / "image/overlay2/repositories.json"
    before = repositories.read_text()
    repositories.write_text('{"Repositories": {}}')
    section = _run(settings, path)[1]
    assert (section["action"], section["restored"]) == ("repaired", ["lab/one:1", "lab/two:1"])
    assert repositories.read_text() == before


def test_a_blank_containerd_gets_the_stores_snapshots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, filled = _settings(tmp_path, "containerd"), list[frozenset[str]]()
    _stored(tmp_path, monkeypatch)
    images = (
        stored("one", "base", mode="copy"),
        stored("two", "other"),
        stored("three", "x", mode="archive"),
    )
    store = replace(parse_manifest(manifest()), images=images)

    def fill(staging: Path, *, copied: frozenset[str], **_: object) -> containerd.Filled:
        filled.append(copied)
        (staging / "made").touch()
        return containerd.Filled(3, 4)

    monkeypatch.setattr(containerd, "fill", fill)
    settings.marker.parent.mkdir(parents=True)
    section = command._fresh(settings, store, used=False)
    assert (section["images"], section["layers"], section["files"]) == (2, 3, 4)
    assert filled == [frozenset(images[0].diff_ids)] and os.listdir(settings.data_root) == ["made"]
    assert settings.marker.exists()


def test_a_file_of_a_record_is_kept_in_it_up_to_a_size(tmp_path: Path) -> None:
    for name, size in (("a", records._LARGEST), ("b", records._LARGEST + 1), ("c.gz", 1)):
        (tmp_path / name).write_bytes(b"x" * size)
    records.pack(tmp_path)
    found = json.loads((tmp_path / records.NAME).read_text())
    assert (sorted(found["files"]), sorted(found["others"])) == (["a"], ["b", "c.gz"])
    assert sorted(os.listdir(tmp_path)) == sorted(["b", "c.gz", records.NAME])


@pytest.mark.parametrize(
    ("number", "expected", "exit_status"),
    [
        *((number, "store.io", 1) for number in (errno.EIO, errno.ENOMEM, errno.ETIMEDOUT, errno.ENODATA)),
        (errno.EUCLEAN, "store.damaged", 0),
        (errno.EBADMSG, "store.damaged", 0),
    ],
)
def test_of_a_store_that_stays_unreadable_nothing_is_made(
    number: int, expected: str, exit_status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, path = _settings(tmp_path), _stored(tmp_path, monkeypatch)
    _reads(monkeypatch, records.NAME, number, number, number)
    code, section = _run(settings, path)
    assert (code, section["code"]) == (exit_status, expected), "1: the unit starts again"
    assert os.strerror(number) in section["reason"]
    assert not settings.data_root.exists() and not settings.marker.exists()


@pytest.mark.parametrize(("number", "code"), [(errno.EIO, "store.io"), (errno.EUCLEAN, "store.damaged")])
def test_a_layer_that_can_not_be_copied_now_is_no_damage(
    number: int, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: Path, _target: Path) -> None:
        raise copy.SourceError(number, f"{source}/usr/file")

    monkeypatch.setattr(copy, "copy_tree", fail)
    with pytest.raises(NodeError) as caught:
        command._copy(Path("/store/layers/abc"), tmp_path / "copy")
    assert caught.value.code == code and "/store/layers/abc/usr/file" in caught.value.message


def test_what_kept_the_seed_from_working_is_told_until_the_next_boot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, path = _settings(tmp_path), _stored(tmp_path, monkeypatch)
    _reads(monkeypatch, records.NAME, *[errno.EIO] * 3)
    code, section = _run(settings, path)
    assert (code, section["retried"]) == (1, True)
    (settings.data_root / "volumes").mkdir(parents=True)
    with (settings.data_root / "volumes/metadata.db").open("w") as database:
        fcntl.flock(database, fcntl.LOCK_EX)
        code, section = _run(settings, path)
    assert (code, section["code"]) == (0, "store.io"), "the engine runs by now, on a root of its own"
    assert section["retried"] is False
    assert "docker runs on it" in section["busy"]


def test_of_a_store_that_is_lost_the_seeded_layers_alone_are_taken_out(tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    _used(settings)
    (tmp_path / "store.json").write_text("{")
    code, section = _run(settings, tmp_path / "store.json")
    assert code == 0 and section["code"] == "store.manifest"
    assert section["action"] == "lost layers taken out"
    records = settings.data_root / "image/overlay2/layerdb/sha256"
    assert os.listdir(records) == ["pulled"]
    assert sorted(os.listdir(settings.data_root / "overlay2")) == ["l", "pulled-files"]
    assert (settings.data_root / "overlay2/pulled-files/diff/file").read_text() == "pulled"
    assert (settings.data_root / "volumes/mine/_data/precious").read_text() == "precious"
    # A pulled layer on top of a seeded one is kept too, though nothing can use it.
    boot = status.boot_id()
    assert sorted(os.listdir(settings.state / "trash")) == [f"above-files.0.{boot}", f"above.0.{boot}"]
    assert (settings.state / f"trash/above-files.0.{boot}/diff/file").read_text() == "above"
    again = _run(settings, tmp_path / "store.json")[1]
    assert again["action"] == "none"


def _mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a store that is a directory while mounted; an earlier boot couldn't read one of its layers."""
    store = tmp_path / "store"
    for name in ("abc", "def"):
        (store / "layers" / name).mkdir(parents=True)
        (store / "layers" / name / "file").write_text(name)
    for function in (data_root.find_links, lost.caches, lost.take_out):
        monkeypatch.setattr(function, "__defaults__", (store,))
    monkeypatch.setattr(command, "open_store", lambda *_, **__: None)
    monkeypatch.setattr(command, "close_store", lambda: store.rename(tmp_path / "closed"))
    (tmp_path / "store.json").write_text(json.dumps(manifest(id="x")))
    mark = {"store": "x", "layer": "sha256:abc", "path": f"{store}/layers/abc", "reason": "a bad block"}
    (tmp_path / ".node").mkdir(exist_ok=True)
    (tmp_path / ".node/store-damaged.json").write_text(json.dumps(mark))
    return store


def test_a_store_that_is_damaged_for_good_is_closed_and_its_layers_are_taken_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, store = _settings(tmp_path), _mounted(tmp_path, monkeypatch)
    _used(settings, store)
    (store / "layers/abc/file").unlink()
    (store / "layers/abc").rmdir()
    with (settings.data_root / "volumes/metadata.db").open("w") as database:
        fcntl.flock(database, fcntl.LOCK_EX)
        section = _run(settings, tmp_path / "store.json")[1]
        assert (section["code"], section["action"]) == ("store.damaged", "none"), "the engine runs"
        assert store.exists()
    code, section = _run(settings, tmp_path / "store.json")
    assert (code, section["code"], section["action"]) == (0, "store.damaged", "lost layers taken out")
    assert section["reason"] == "a bad block; read again: No such file or directory"
    assert not store.exists()
    assert os.listdir(settings.data_root / "image/overlay2/layerdb/sha256") == ["pulled"]
    assert (settings.data_root / "volumes/mine/_data/precious").read_text() == "precious"


@pytest.mark.parametrize(
    ("number", "exit_status", "code"),
    [(errno.EIO, 0, "store.damaged"), (errno.EBADMSG, 0, "store.damaged"), (errno.ENOMEM, 1, "store.io")],
)
def test_only_a_block_that_is_wrong_twice_is_lost(
    number: int, exit_status: int, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> None:
        raise OSError(number, os.strerror(number), str(path))

    settings, store = _settings(tmp_path), _mounted(tmp_path, monkeypatch)
    _used(settings, store)
    monkeypatch.setattr(command, "read_through", fail)
    found, section = _run(settings, tmp_path / "store.json")
    assert (found, section["code"]) == (exit_status, code)
    assert section["action"] == ("lost layers taken out" if code == "store.damaged" else "none")


@pytest.mark.parametrize("number", [errno.ENODEV, errno.EOPNOTSUPP, errno.ETIMEDOUT])
def test_what_this_boot_cant_mount_is_not_lost(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mount(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    settings = _settings(tmp_path)
    _used(settings)
    file = tmp_path / "store.erofs"
    file.write_bytes(bytes(8192))
    (tmp_path / "store.json").write_text(json.dumps(manifest(file=os.fspath(file), bytes=8192, verity=None)))
    monkeypatch.setattr(mounts, "mount", mount)
    unchecked = functools.partial(open_store, verity=False, at=tmp_path / "at")
    monkeypatch.setattr(command, "open_store", lambda store, **_: unchecked(store))
    before = _tree(settings.data_root)
    code, section = _run(settings, tmp_path / "store.json")
    assert (code, section["code"], section["action"]) == (1, "store.io", "none")
    assert _tree(settings.data_root) == before


def test_containerds_links_into_a_damaged_store_lead_nowhere_when_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, store = _settings(tmp_path, "containerd"), _mounted(tmp_path, monkeypatch)
    snapshots = settings.data_root / "io.containerd.snapshotter.v1.overlayfs/snapshots"
    for number, layer in enumerate(("abc", "def")):
        (snapshots / str(number)).mkdir(parents=True)
        (snapshots / str(number) / "fs").symlink_to(store / "layers" / layer)
    (store / "layers/abc/file").unlink()
    (store / "layers/abc").rmdir()
    code, section = _run(settings, tmp_path / "store.json")
    assert (code, section["code"], section["engine"]) == (0, "store.damaged", "containerd")
    assert scan(settings.data_root, "containerd").broken == {"abc", "def"}, "so preload has them loaded"


def test_a_store_that_reads_well_again_is_used_and_no_longer_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, store = _settings(tmp_path, "containerd"), _mounted(tmp_path, monkeypatch)
    snapshot = settings.data_root / "io.containerd.snapshotter.v1.overlayfs/snapshots/1"
    snapshot.mkdir(parents=True)
    (snapshot / "fs").symlink_to(store / "layers/abc")
    code, section = _run(settings, tmp_path / "store.json")
    assert (code, section["state"], section["action"]) == (0, "ok", "current")
    assert not (settings.state / "store-damaged.json").exists()
    assert (snapshot / "fs/file").read_text() == "abc"


def test_images_of_lost_layers_are_taken_off_dockers_record(tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    diff_ids = [f"sha256:{letter * 64}" for letter in "abc"]
    names = [layer.chain[7:] for layer in chain(diff_ids)]
    _layer(settings, names[0], target=MOUNT_POINT / "layers/a")
    _layer(settings, names[1], names[0], target=MOUNT_POINT / "layers/b")
    _layer(settings, names[2], names[1])
    _layer(settings, "d" * 64)
    content = settings.data_root / "image/overlay2/imagedb/content/sha256"
    content.mkdir(parents=True)
    images = {"seeded": diff_ids[:2], "above": diff_ids, "pulled": ["sha256:" + "d" * 64], "empty": None}
    for name, layers in images.items():
        (content / name).write_text(json.dumps({"rootfs": {"diff_ids": layers}}))
        (settings.data_root / f"image/overlay2/imagedb/metadata/sha256/{name}").mkdir(parents=True)
    lost.take_out(settings.data_root, settings.state / "trash", "boot")
    assert sorted(os.listdir(content)) == ["empty", "pulled"]
    assert sorted(os.listdir(content.parents[1] / "metadata/sha256")) == ["empty", "pulled"]
    assert "above.0.boot" in os.listdir(settings.state / "trash")
    assert "seeded.0.boot" not in os.listdir(settings.state / "trash")


def test_an_image_of_layers_that_were_half_taken_out_is_a_seeded_one(tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    diff_id = f"sha256:{'a' * 64}"
    _layer(settings, "a" * 64, target=MOUNT_POINT / "layers/a")
    records = settings.data_root / "image/overlay2/layerdb/sha256"
    (records / ("a" * 64)).rename(records / f"{'a' * 64}.lost")
    content = settings.data_root / "image/overlay2/imagedb/content/sha256"
    content.mkdir(parents=True)
    (content / "seeded").write_text(json.dumps({"rootfs": {"diff_ids": [diff_id]}}))
    lost.take_out(settings.data_root, settings.state / "trash", "boot")
    assert os.listdir(content) == os.listdir(records) == []
    assert not (settings.state / "trash").exists() or os.listdir(settings.state / "trash") == []


def test_a_layer_that_was_half_taken_out_is_taken_out(tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    _used(settings)
    records = settings.data_root / "image/overlay2/layerdb/sha256"
    (records / "second").rename(records / "second.lost")
    lost.take_out(settings.data_root, settings.state / "trash", "boot")
    assert os.listdir(records) == ["pulled"], "what stood on it is known by its parent's name"
    assert lost.caches(settings.data_root) == set()


@pytest.mark.parametrize("data", [b"\xff\xfe", b"\0" * 8, b"..", b".", b"../../volumes", b""])
@pytest.mark.parametrize("name", ["cache-id", "parent"])
def test_a_damaged_record_takes_nothing_else_along(name: str, data: bytes, tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    _used(settings)
    content = settings.data_root / "image/overlay2/imagedb/content/sha256/odd"
    content.parent.mkdir(parents=True)
    content.write_text('{"rootfs": {"diff_ids": 3}}')
    records = settings.data_root / "image/overlay2/layerdb/sha256"
    (records / "pulled" / name).write_bytes(data)
    lost.take_out(settings.data_root, settings.state / "trash", "boot")
    assert os.listdir(records) == ["pulled"] and content.exists()
    assert (settings.data_root / "overlay2/pulled-files/diff/file").exists()
    assert (settings.data_root / "volumes/mine/_data/precious").exists()
    assert scan(settings.data_root, "docker").broken == frozenset()


def test_a_layer_that_is_there_is_not_lost(tmp_path: Path) -> None:
    settings, store = _settings(tmp_path), tmp_path / "store"
    (store / "layers/abc").mkdir(parents=True)
    _layer(settings, "seeded", target=store / "layers/abc")
    _layer(settings, "gone", target=store / "layers/def")
    _layer(settings, "foreign", target=tmp_path / "nowhere")
    assert lost.caches(settings.data_root, store) == {"gone-files"}


@pytest.mark.parametrize("engine", ["docker", "containerd"])
def test_an_engine_that_runs_holds_its_database(engine: str, tmp_path: Path) -> None:
    path = tmp_path / _LOCKED[engine][0]
    assert user(engine, tmp_path) == ""
    path.parent.mkdir(parents=True)
    with path.open("w") as database:
        assert user(engine, tmp_path) == ""
        fcntl.flock(database, fcntl.LOCK_EX)
        assert user(engine, tmp_path) == f"{engine} runs on it"
    assert user(engine, tmp_path) == ""


def test_what_is_mounted_below_a_data_root_uses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    table = [f"{tmp_path}/data", f"{tmp_path}/data/overlay2/x/merged"]
    monkeypatch.setattr(mounts, "listed", lambda: [mounts.Mount("0:1", "/", t, "o", "o") for t in table])
    assert user("docker", tmp_path / "data") == f"{table[1]} is mounted below it"
    table.pop()
    assert user("docker", tmp_path / "data") == "", "a data root may be a mount itself"


def test_nothing_is_taken_out_beneath_a_docker_that_runs(tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    _used(settings)
    (tmp_path / "store.json").write_text("{")
    with (settings.data_root / "volumes/metadata.db").open("w") as database:
        fcntl.flock(database, fcntl.LOCK_EX)
        before = _tree(settings.data_root)
        code, section = _run(settings, tmp_path / "store.json")
        assert "docker runs on it" in section["reason"] and section["action"] == "none"
        (tmp_path / "store.json").unlink()
        code, section = _run(settings, tmp_path / "store.json")
    assert (code, section["code"]) == (0, "seed.busy") and settings.marker.exists()
    assert _tree(settings.data_root) == before


def test_lost_layers_are_taken_out_where_the_image_has_no_store(tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    _used(settings)
    found = leave(settings)
    assert (found["state"], found["action"]) == ("ok", "lost layers taken out")
    assert os.listdir(settings.data_root / "image/overlay2/layerdb/sha256") == ["pulled"]
    assert (settings.data_root / "volumes/mine/_data/precious").exists()
    assert not settings.marker.exists()
    assert leave(settings)["action"] == "none"


def test_containerds_root_of_an_image_with_a_store_is_set_aside_by_one_without(tmp_path: Path) -> None:
    settings = _settings(tmp_path, "containerd")
    snapshots = "io.containerd.snapshotter.v1.overlayfs/snapshots/1"
    (settings.data_root / snapshots).mkdir(parents=True)
    assert leave(settings)["action"] == "none", "all was promoted: it is whole"
    (settings.data_root / snapshots / "fs").symlink_to(MOUNT_POINT / "layers/abc")
    assert leave(settings)["action"] == "set aside"
    assert not settings.data_root.exists()
    assert (settings.state / f"trash/containerd.0.{status.boot_id()}" / snapshots / "fs").is_symlink()


def test_outcomes_are_lines_for_people() -> None:
    done = {"state": "ok", "engine": "docker", "action": "seeded", "layers": 5, "seconds": 0.124}
    assert describe(done) == "seed: docker: seeded, 5 layers in 0.12 s"
    bad = {"state": "degraded", "engine": "docker", "code": "seed.version", "reason": "it is newer"}
    assert (
        describe(bad)
        == "seed: seed.version: it is newer; missing images come from the archive, if there is one"
    )
