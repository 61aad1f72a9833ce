"""The modes of the files that the seed writes: the engine's, whatever umask it runs under."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from image_builder.node import files
from image_builder.node.seed.docker import fill
from image_builder.node.store import chain
from tests.unit.node.stores import docker_store, stored

ONE = stored("one", "base", "a")


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    docker_store(tmp_path / "store", [ONE])
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o664, 0o666, 0o400])
def test_a_file_has_its_mode(umask: int, mode: int, tmp_path: Path) -> None:
    files.create(tmp_path / "file", b"x", mode)
    assert _mode(tmp_path / "file") == mode


@pytest.mark.parametrize("mode", [0o700, 0o710, 0o755, 0o777])
def test_a_directory_has_its_mode(umask: int, mode: int, tmp_path: Path) -> None:
    files.make_directory(tmp_path / "made", mode)
    assert _mode(tmp_path / "made") == mode


def test_dockers_directories_have_its_modes(umask: int, tmp_path: Path) -> None:
    root = tmp_path / "root"
    files.make_directory(root, 0o710)
    fill([ONE], root, store=tmp_path / "store")
    images = ["imagedb", "imagedb/content", "imagedb/content/sha256", "imagedb/metadata", "layerdb"]
    closed = ["image", "image/overlay2", *(f"image/overlay2/{name}" for name in images), "overlay2/l"]
    assert {name: _mode(root / name) for name in closed} == dict.fromkeys(closed, 0o700)
    assert (_mode(root / "image/overlay2/layerdb/sha256"), _mode(root / "overlay2")) == (0o755, 0o710)
    cache = (
        root / "image/overlay2/layerdb/sha256" / next(chain(ONE.diff_ids)).chain[7:] / "cache-id"
    ).read_text()
    assert _mode(root / "overlay2" / cache) == 0o710
    assert _mode(root / "overlay2" / cache / "link") == 0o644
    assert _mode(root / "image/overlay2/repositories.json") == 0o600


def test_half_the_files_of_an_earlier_repair_are_replaced(tmp_path: Path) -> None:
    store, root = docker_store(tmp_path / "store", [ONE]), tmp_path / "root"
    fill([ONE], root, store=store)
    record = root / "image/overlay2/layerdb/sha256" / [*chain(ONE.diff_ids)][1].chain[7:]
    place = root / "overlay2" / (record / "cache-id").read_text() / "diff"
    for path in record.iterdir():
        path.unlink()
    record.rmdir()
    place.unlink()
    (place / "sub").mkdir(parents=True)
    (place / "sub/half").write_text("half")
    assert fill([ONE], root, store=store).images == (ONE.ref,)
    assert place.is_symlink() and place.is_dir()
