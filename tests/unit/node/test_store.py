"""A store's manifest, its dm-verity table, and what is compared once it is mounted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from image_builder.node.errors import NodeError
from image_builder.node.store import Verity, _compare, parse_manifest, read_manifest
from tests.unit.node.stores import digest, manifest


def test_a_manifest_is_read(tmp_path: Path) -> None:
    path = tmp_path / "store.json"
    path.write_text(json.dumps(manifest()))
    store = read_manifest(path)
    assert store.file == Path("/opt/preload/store.erofs") and store.bytes == 8192
    assert store.verity == Verity("1" * 64, "2" * 64, 4096)
    assert store.engines["docker"].bytes == 10
    assert [image.ref for image in store.images] == ["lab/one:1", "lab/two:1"]
    assert store.images[0].diff_ids == (digest("base"), digest("a"))
    assert store.layers == {digest(name): 4096 for name in ("base", "a", "b")}


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"bytes": "many"},
        {"verity": "yes"},
        {"verity": {"root_hash": "1"}},
        {"engines": []},
        {"engines": {"docker": {"version": "1"}}},
        {"images": [{"ref": "x"}]},
        {"images": 3},
        {"layers": [{"bytes": 1}]},
        {"file": None},
    ],
)
def test_a_manifest_of_another_shape_is_told(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "store.json"
    path.write_text(json.dumps(manifest(**change)))
    with pytest.raises(NodeError) as caught:
        read_manifest(path)
    assert caught.value.code == "store.manifest" and str(path) in caught.value.message


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"{", b"\xff\xfe\x00", b"[" * 100])
def test_garbage_is_no_manifest(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "store.json"
    path.write_bytes(data)
    with pytest.raises(NodeError) as caught:
        read_manifest(path)
    assert caught.value.code == "store.manifest"


def test_the_table_is_the_device_mappers() -> None:
    table = Verity("aa", "bb", 3 * 4096).table("/dev/loop7")
    assert table == "0 24 verity 1 /dev/loop7 /dev/loop7 4096 4096 3 3 sha256 aa bb"


def _mounted(where: Path, layers: list[str], engines: list[str]) -> Path:
    for name in layers:
        (where / "layers" / digest(name)[7:]).mkdir(parents=True)
    for name in engines:
        (where / name).mkdir()
    return where


def test_a_store_has_exactly_what_its_manifest_lists(tmp_path: Path) -> None:
    _compare(parse_manifest(manifest()), _mounted(tmp_path, ["base", "a", "b"], ["docker"]))


def test_layers_of_an_image_for_the_archive_are_not_in_the_store(tmp_path: Path) -> None:
    document = manifest()
    document["images"][1]["mode"] = "archive"
    document["layers"].pop()
    _compare(parse_manifest(document), _mounted(tmp_path, ["base", "a"], ["docker"]))


@pytest.mark.parametrize(
    ("layers", "engines"),
    [
        (["base", "a"], ["docker"]),
        (["base", "a", "b", "c"], ["docker"]),
        (["base", "a", "b"], []),
        (["base", "a", "b"], ["docker", "containerd"]),
        (["base", "a", "b"], ["containerd"]),
    ],
)
def test_more_or_less_is_told(layers: list[str], engines: list[str], tmp_path: Path) -> None:
    with pytest.raises(NodeError) as caught:
        _compare(parse_manifest(manifest()), _mounted(tmp_path, layers, engines))
    assert caught.value.code == "store.disagrees"


def test_a_store_without_layers_is_damaged(tmp_path: Path) -> None:
    with pytest.raises(NodeError) as caught:
        _compare(parse_manifest(manifest()), tmp_path)
    assert caught.value.code == "store.damaged"
