"""The list of images, the store's description and the archive, up to the point where an engine is asked."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from image_builder.node import child
from image_builder.node.errors import NodeError
from image_builder.node.preload import archive as archives
from image_builder.node.preload import command, images
from image_builder.node.preload.images import EngineState, Store
from image_builder.node.store import Image
from tests.unit.node.preload_answers import CONFIG, IMAGE, INDEX, LAYERS, MANIFEST, TWO, document
from tests.unit.node.stores import manifest

# A data root that isn't on the root filesystem.
OWN_DISK = Path("/proc/data")


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "images.tar"
    path.write_bytes(bytes(range(256)) * 4096)
    return path


@pytest.fixture
def image_list(archive: Path, tmp_path: Path) -> Path:
    path = tmp_path / "images.json"
    path.write_text(json.dumps(document(archive)))
    return path


def test_digest_form_keeps_the_registrys_port() -> None:
    image = Image("registry.test:5000/a/b:1", INDEX, MANIFEST, CONFIG, False, LAYERS)
    assert image.by_digest == f"registry.test:5000/a/b@{INDEX}"


def archive_of(image_list: Path) -> images.Archive:
    """Return the archive that a list names."""
    archive = images.read_list(image_list).archive
    assert archive
    return archive


def test_list_is_read(image_list: Path, archive: Path) -> None:
    preload = images.read_list(image_list)
    assert preload.images == (Image(TWO, INDEX, MANIFEST, CONFIG, False, LAYERS, 5_000_000),)
    assert preload.engine == "docker"
    assert preload.archive == archive_of(image_list) and (preload.archive.path, preload.archive.size) == (
        archive,
        1 << 20,
    )


@pytest.mark.parametrize(
    ("engine", "pinned"),
    [pytest.param("docker", False, id="docker"), pytest.param("containerd", True, id="containerd")],
)
def test_list_without_an_archive(image_list: Path, engine: str, pinned: bool) -> None:
    """containerd's seed can't restore what was deleted, so nothing preloaded may be deleted."""
    content = json.loads(image_list.read_text())
    image_list.write_text(json.dumps({**content, "engine": engine, "archive": None}))
    preload = images.read_list(image_list)
    assert (preload.archive, [image.pin for image in preload.images]) == (None, [pinned])
    image_list.write_text(json.dumps({**content, "engine": engine}))
    assert [image.pin for image in images.read_list(image_list).images] == [False]


def test_pause_image_is_pinned_in_any_case(image_list: Path) -> None:
    assert images.read_list(image_list, TWO).images[0].pin is True


@pytest.mark.parametrize(
    ("text", "words_of_it"),
    [
        pytest.param("{", "is not a list of preloaded images", id="no JSON"),
        pytest.param("[]", "TypeError", id="another type"),
        pytest.param('{"format": 1}', "KeyError", id="a key is missing"),
        pytest.param('{"format": 2}', "has format 2, this program reads 1", id="a newer format"),
    ],
)
def test_list_that_can_not_be_read(tmp_path: Path, text: str, words_of_it: str) -> None:
    path = tmp_path / "list.json"
    path.write_text(text)
    with pytest.raises(NodeError, match=words_of_it):
        images.read_list(path)


def test_archive_is_checked_and_progress_told(image_list: Path) -> None:
    told: list[str] = []
    archives.check(archive_of(image_list), told.append, 0)
    assert told == ["checking the archive: 100% of 0.00 GB"]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        pytest.param(lambda data: data[:-1], "is damaged: 1048575 bytes, not 1048576", id="cut"),
        pytest.param(lambda data: data[:-1] + b"x", "is damaged: its sha256 is", id="changed"),
    ],
)
def test_damaged_archive_is_refused_before_it_is_loaded(
    image_list: Path, archive: Path, damage: Any, said: str
) -> None:
    class Empty:
        """An engine without images, of which only ``look`` may be called."""

        def look(self, images: Sequence[Image]) -> EngineState:
            return EngineState({image.ref: "is missing" for image in images})

        def name(self, images: Sequence[Image], lacks: Mapping[str, str]) -> dict[str, str]:  # noqa: ARG002
            raise AssertionError

        def forget(self, images: Sequence[Image]) -> None:  # noqa: ARG002
            raise AssertionError

        def load(self, archive: Path) -> list[str]:  # noqa: ARG002
            raise AssertionError

    archive.write_bytes(damage(archive.read_bytes()))
    preload = images.read_list(image_list)
    with pytest.raises(NodeError, match=said):
        command.bring(preload, Store(), Empty(), OWN_DISK, lambda _text: None, 3)


def test_archive_that_is_gone(image_list: Path, archive: Path) -> None:
    recorded = archive_of(image_list)
    archive.unlink()
    with pytest.raises(NodeError, match=re.escape(f"{archive}: No such file or directory")):
        archives.check(recorded, lambda _text: None, 3)


def test_position_of_a_reader_is_found(archive: Path) -> None:
    with archive.open("rb", buffering=0) as stream:
        stream.read(4096)
        assert archives.read_position(os.getpid(), archive) == 4096
    assert archives.read_position(os.getpid(), archive) is None


@pytest.mark.parametrize(
    ("position", "begun", "told"),
    [
        pytest.param(None, False, "loading: 0% of 2.00 GB read", id="not opened yet"),
        pytest.param(500_000_000, True, "loading: 25% of 2.00 GB read", id="being read"),
        pytest.param(2_000_000_000, True, "unpacking the layers", id="read"),
        pytest.param(None, True, "unpacking the layers", id="closed"),
    ],
)
def test_stage_is_told(position: int | None, begun: bool, told: str) -> None:
    assert archives.stage(position, 2_000_000_000, begun) == told


def test_failure_shows_the_command_and_the_end_of_its_output() -> None:
    text = child.failed(["docker", "load"], 1, "\n".join(f"line {n}" for n in range(40))).message
    lines = text.splitlines()
    assert lines[0] == "`docker load` ended with 1"
    assert lines[1:] == [f"  line {n}" for n in range(20, 40)]
    assert "(no output)" in child.failed(["docker", "load"], 1, "").message


def test_store_tells_what_the_seed_gives(tmp_path: Path) -> None:
    path = tmp_path / "store.json"
    text = dict.fromkeys(("digest", "manifest", "id"), INDEX) | {
        "pin": False,
        "bytes": 7,
        "diff_ids": [LAYERS[0]],
    }
    described = [
        {**text, "ref": "a:1", "mode": "reference", "required": True},
        {**text, "ref": "b:1", "mode": "copy", "required": False},
        {**text, "ref": "c:1", "mode": "archive", "required": True},
    ]
    layers = [{"diff_id": LAYERS[0], "bytes": 7}]
    path.write_text(json.dumps(manifest(images=described, layers=layers)))
    store = images.read_store(path, [IMAGE])
    assert store == Store({"a:1": True, "b:1": False}, {LAYERS[0]: 7})


def test_node_without_a_store_expects_nothing_of_the_seed(tmp_path: Path) -> None:
    assert images.read_store(tmp_path / "none.json", [IMAGE]) == Store()


@pytest.mark.parametrize("text", ["{", "[]", '{"images": [{}]}', "\xff"])
def test_damaged_description_of_the_store_is_the_seeds_fault(tmp_path: Path, text: str) -> None:
    path = tmp_path / "store.json"
    path.write_text(text, encoding="latin-1")
    assert images.read_store(path, [IMAGE]) == Store({TWO: True})


GB = 10**9


@pytest.mark.parametrize(
    ("need", "available", "full"),
    [
        pytest.param(30 * GB, 50 * GB, None, id="80% full"),
        pytest.param(30 * GB + GB // 100, 50 * GB, 80, id="a little more"),
        pytest.param(60 * GB, 50 * GB, 110, id="more than there is"),
        pytest.param(0, 19 * GB, 81, id="full before"),
        pytest.param(0, 100 * GB, None, id="empty"),
    ],
)
def test_root_filesystem_is_filled_to_80_percent(need: int, available: int, full: int | None) -> None:
    fault = archives.room_fault(need, 100 * GB, available)
    assert fault == "" if full is None else fault.startswith(f"which would be {full}% full, more than 80%")


@pytest.mark.parametrize(
    ("engine", "archive_bytes", "layers", "need"),
    [
        pytest.param("docker", 10, 10, 20, id="Docker copies the archive first"),
        pytest.param("docker", 10, 4, 14, id="and keeps the layers that it lacks"),
        pytest.param("docker", 10, 90, 20, id="layers that images share are in the archive once"),
        pytest.param("containerd", 10, 10, 20, id="containerd keeps its content"),
        pytest.param("containerd", 10, 30, 40, id="and unpacks compressed layers"),
    ],
)
def test_what_an_engine_needs(engine: str, archive_bytes: int, layers: int, need: int) -> None:
    assert archives.needed(engine, archive_bytes, layers) == need


def test_shared_layers_are_counted_once_where_they_are_known() -> None:
    one = Image("a:1", INDEX, MANIFEST, CONFIG, False, LAYERS, 100)
    other = Image("b:1", INDEX, MANIFEST, CONFIG, False, (LAYERS[0],), 60)
    assert archives.unpacked([one, other], {LAYERS[0]: 60, LAYERS[1]: 40}) == 100
    assert archives.unpacked([one, other], {LAYERS[0]: 60}) == 160
    assert archives.unpacked([one, other], {}) == 160


def test_room_is_guarded_on_the_root_filesystem_alone(image_list: Path, tmp_path: Path) -> None:
    archive = archive_of(image_list)
    huge = [Image("a:1", INDEX, MANIFEST, CONFIG, False, LAYERS, 10**18)]
    archives.check_room(archive, "containerd", huge, {}, OWN_DISK, root=tmp_path)
    with pytest.raises(NodeError) as caught:
        archives.check_room(archive, "containerd", huge, {}, tmp_path / "not/made/yet", root=tmp_path)
    assert caught.value.code == "preload.space"
    assert "not/made/yet is on the root filesystem" in caught.value.message
