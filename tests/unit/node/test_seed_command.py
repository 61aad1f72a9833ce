"""Which engine is trusted with a seed, and what is said of one (a seed itself: tests/integration)."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from image_builder.node.errors import NodeError
from image_builder.node.layout import MOUNT_POINT, Preload, preload_settings
from image_builder.node.seed.command import (
    _damaged,
    _give_up,
    _marker,
    check_version,
    describe,
    leave,
)
from image_builder.node.store import parse_manifest
from tests.unit.node.stores import manifest


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


def _settings(tmp_path: Path) -> Preload:
    document = {"engine": "docker", "data_root": str(tmp_path / "docker"), "mount_point": str(tmp_path)}
    (tmp_path / "preload.json").write_text(json.dumps(document))
    return preload_settings(tmp_path)


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


def test_damage_counts_for_the_store_that_it_was_found_in(tmp_path: Path) -> None:
    settings, store = _settings(tmp_path), parse_manifest(manifest())
    assert _damaged(settings, store) == ""
    settings.state.mkdir()
    path = settings.state / "store-damaged.json"
    path.write_text(json.dumps({"store": store.id, "layer": "x", "reason": "Input/output error"}))
    assert _damaged(settings, store) == "Input/output error"
    path.write_text(json.dumps({"store": "another", "layer": "x", "reason": "Input/output error"}))
    assert _damaged(settings, store) == ""


def test_links_of_an_image_with_a_store_are_taken_away_by_one_without(tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    for path in (settings.marker, settings.state / "promote.json"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    layer = settings.data_root / "overlay2/one/diff"
    layer.mkdir(parents=True)
    assert leave(settings)["action"] == "none", "all was promoted: it is whole"
    assert layer.is_dir() and not settings.marker.exists()
    layer.rmdir()
    layer.symlink_to(MOUNT_POINT / "layers/abc")
    found = leave(settings)
    assert (found["state"], found["action"]) == ("ok", "set aside")
    assert not settings.data_root.exists()
    assert (settings.state / "trash/docker.0/overlay2/one/diff").is_symlink()
    assert [path.name for path in (settings.state / "seed").iterdir()] == []
    assert leave(settings)["action"] == "none"


@pytest.mark.parametrize("marked", [True, False], ids=["marked", "cut short before its marker"])
def test_no_link_is_left_where_the_seed_gives_up(marked: bool, tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    settings.marker.parent.mkdir(parents=True)
    if marked:
        settings.marker.write_text('{"format": 1, "store": "x", "engine": "docker"}')
    layer = settings.data_root / "overlay2/one/diff"
    layer.parent.mkdir(parents=True)
    layer.symlink_to(MOUNT_POINT / "layers/abc")
    found = _give_up(settings, OSError(errno.ENOSPC, "No space left on device"))
    assert (found["state"], found["code"], found["action"]) == ("degraded", "seed.disk", "set aside")
    assert not settings.data_root.exists() and not settings.marker.exists()
    assert (settings.state / "trash/docker.0/overlay2/one/diff").is_symlink()


def test_outcomes_are_lines_for_people() -> None:
    done = {"state": "ok", "engine": "docker", "action": "seeded", "layers": 5, "seconds": 0.124}
    assert describe(done) == "seed: docker: seeded, 5 layers in 0.12 s"
    bad = {"state": "degraded", "engine": "docker", "code": "seed.version", "reason": "it is newer"}
    assert describe(bad) == "seed: seed.version: it is newer; images come from the archive"
