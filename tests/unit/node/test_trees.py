"""Deleting and setting aside."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from image_builder.node import mounts, trees
from image_builder.node.errors import NodeError


def _mounted(target: str) -> mounts.Mount:
    return mounts.Mount("0:30", "/", target, "tmpfs", "tmpfs")


def test_no_link_is_followed_when_a_tree_is_deleted(tmp_path: Path) -> None:
    kept, gone = tmp_path / "kept", tmp_path / "gone"
    (kept / "sub").mkdir(parents=True)
    (kept / "file").touch()
    gone.mkdir()
    (gone / "link").symlink_to(kept)
    (gone / "file").hardlink_to(kept / "file")
    trees.remove(gone)
    assert not gone.exists()
    assert sorted(path.name for path in kept.iterdir()) == ["file", "sub"]
    trees.remove(gone)


@pytest.mark.parametrize("below", ["", "/a/b"])
def test_a_tree_with_a_mount_is_not_touched(
    below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tree/a/b").mkdir(parents=True)
    (tmp_path / "tree/file").touch()
    monkeypatch.setattr(mounts, "listed", lambda: [_mounted(f"{tmp_path}/tree{below}")])
    with pytest.raises(NodeError) as caught:
        trees.remove(tmp_path / "tree")
    assert caught.value.code == "disk.busy"
    assert (tmp_path / "tree/file").exists()


def test_a_neighbour_whose_name_begins_alike_is_no_mount_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tree").mkdir()
    monkeypatch.setattr(mounts, "listed", lambda: [_mounted(f"{tmp_path}/tree2")])
    trees.remove(tmp_path / "tree")
    assert not (tmp_path / "tree").exists()


def test_each_tree_is_set_aside_under_a_name_of_its_own(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / "data").mkdir()
        (tmp_path / "data/number").write_text(str(number))
        trees.set_aside(tmp_path / "data", tmp_path / "state/trash", "boot")
    aside = tmp_path / "state/trash"
    assert {path.name: (path / "number").read_text() for path in aside.iterdir()} == {
        "data.0.boot": "0",
        "data.1.boot": "1",
        "data.2.boot": "2",
    }


def test_a_tree_with_a_mount_is_not_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data/merged").mkdir(parents=True)
    monkeypatch.setattr(mounts, "listed", lambda: [_mounted(f"{tmp_path}/data/merged")])
    with pytest.raises(NodeError) as caught:
        trees.set_aside(tmp_path / "data", tmp_path / "trash", "boot")
    assert caught.value.code == "disk.busy" and (tmp_path / "data/merged").is_dir()


@pytest.mark.parametrize("name", ["d", "d" * 200], ids=["more levels than Python recurses", "long paths"])
def test_a_tree_of_any_depth_is_deleted(name: str, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    folder = os.open(tmp_path / "tree", os.O_RDONLY)
    for _ in range(1500):
        os.mkdir(name, dir_fd=folder)
        below = os.open(name, os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = below
    os.close(folder)
    trees.remove(tmp_path / "tree")
    assert not (tmp_path / "tree").exists()
