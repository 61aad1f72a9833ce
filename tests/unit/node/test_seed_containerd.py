"""The contents that a blank containerd root gets from the store."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from image_builder.node.data_root import BLOBS, SNAPSHOTS
from image_builder.node.errors import NodeError
from image_builder.node.seed import records
from image_builder.node.seed.containerd import DATABASES, fill
from tests.unit.node.stores import edit_records


@pytest.fixture
def store(tmp_path: Path) -> Path:
    source = tmp_path / "store/containerd"
    for name in DATABASES:
        (source / name).parent.mkdir(parents=True)
        (source / name).touch(0o600)
    for number, layer in (("1", "aa"), ("7", "bb"), ("8", "aa.1")):
        (tmp_path / "store/layers" / layer).mkdir(parents=True)
        (source / SNAPSHOTS / number).mkdir(parents=True)
        (source / SNAPSHOTS / number / "fs").symlink_to(f"../../../../layers/{layer}")
    (source / SNAPSHOTS / "9/fs").mkdir(parents=True)
    (source / BLOBS).mkdir(parents=True)
    (source / BLOBS / "manifest").write_text("{}")
    (source / BLOBS / "layer").write_bytes(bytes(100_000))
    for name in DATABASES:
        (source / name).write_bytes(b"\xff" + os.fsencode(name))
    records.pack(source)
    return tmp_path / "store"


def test_a_blank_root_gets_both_databases_and_links(store: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    made = fill(root, store=store)
    assert (made.snapshots, made.files) == (3, 4)
    for name in DATABASES:
        assert (root / name).read_bytes() == b"\xff" + os.fsencode(name) and (
            root / name
        ).stat().st_mode & 0o777 == 0o600
    assert {n: os.readlink(root / SNAPSHOTS / n / "fs") for n in os.listdir(root / SNAPSHOTS)} == {
        "1": f"{store}/layers/aa",
        "7": f"{store}/layers/bb",
        "8": f"{store}/layers/aa.1",
    }
    for number in ("1", "7", "8"):
        assert (root / SNAPSHOTS / number / "work").stat().st_mode & 0o777 == 0o711
    assert (root / BLOBS / "manifest").read_text() == "{}" and not (root / BLOBS / "manifest").is_symlink()
    assert os.readlink(root / BLOBS / "layer") == f"{store}/containerd/{BLOBS}/layer"


def test_nobody_else_may_write_anywhere(store: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    fill(root, store=store)
    loose = [path for path in root.rglob("*") if not path.is_symlink() and path.stat().st_mode & 0o022]
    assert loose == []
    assert (root / BLOBS.parent.parent / "ingest").stat().st_mode & 0o777 == 0o755


def test_some_layers_are_copied(store: Path, tmp_path: Path) -> None:
    def copy(source: Path, target: Path) -> None:
        shutil.copytree(source, target)

    root = tmp_path / "root"
    fill(root, store=store, copied=frozenset(["sha256:aa"]), copy=copy)
    for number in ("1", "8"):  # two directories of one layer
        assert (root / SNAPSHOTS / number / "fs").is_dir()
        assert not (root / SNAPSHOTS / number / "fs").is_symlink()
    assert (root / SNAPSHOTS / "7/fs").is_symlink()


@pytest.mark.parametrize("name", [*DATABASES, Path(records.NAME)])
def test_what_the_store_lacks_is_its_damage(name: Path, store: Path, tmp_path: Path) -> None:
    (store / "containerd" / name).unlink()
    with pytest.raises(NodeError) as caught:
        fill(tmp_path / "root", store=store)
    assert caught.value.code == "store.damaged"


@pytest.mark.parametrize("name", [SNAPSHOTS, BLOBS])
def test_records_without_a_directory_are_damaged(name: Path, store: Path, tmp_path: Path) -> None:
    def lose(found: dict[str, Any]) -> None:
        for kind in found.values():
            for path in [p for p in kind if p.startswith(str(name))]:
                del kind[path]

    edit_records(store / "containerd", lose)
    with pytest.raises(NodeError) as caught:
        fill(tmp_path / "root", store=store)
    assert caught.value.code == "store.damaged"
