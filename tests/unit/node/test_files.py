"""All-or-nothing writes, the exchange of two names, deleting and setting aside."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from image_builder.node import files, mounts
from image_builder.node.errors import NodeError


def test_a_file_is_replaced_whole_with_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    before = os.umask(0o077)
    try:
        files.write(path, b"after", 0o644)
    finally:
        os.umask(before)
    assert path.read_text() == "after" and path.stat().st_mode & 0o777 == 0o644
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_that_somebody_else_syncs_is_as_whole_to_a_reader(tmp_path: Path) -> None:
    files.write_json(tmp_path / "file", {"a": 1}, 0o600, durable=False)
    assert json.loads((tmp_path / "file").read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["file"] and (tmp_path / "file").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "\xff"])
def test_what_is_no_object_is_read_as_an_empty_one(text: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(text, encoding="latin-1")
    assert files.read_json(tmp_path / "file") == files.read_json(tmp_path / "none") == {}
    (tmp_path / "file").write_text('{"a": 1}')
    assert files.read_json(tmp_path / "file") == {"a": 1}


def test_a_draft_of_a_dead_agent_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / ".file.new").write_text("a much longer draft than what is written")
    files.write_json(tmp_path / "file", {"a": 1}, 0o600)
    assert json.loads((tmp_path / "file").read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["file"] and (tmp_path / "file").stat().st_mode & 0o777 == 0o600


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("before")
    (tmp_path / ".file.new").mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        files.write(tmp_path / "file", b"after")
    assert (tmp_path / "file").read_text() == "before"


def test_a_write_that_fails_leaves_no_draft(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        files.write(tmp_path / "file", b"after")
    assert os.listdir(tmp_path) == ["file"]


def test_a_directory_and_a_link_change_places(tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy/file").touch()
    (tmp_path / "link").symlink_to("/nowhere")
    files.exchange(tmp_path / "copy", tmp_path / "link")
    assert (tmp_path / "link/file").exists() and os.readlink(tmp_path / "copy") == "/nowhere"
    with pytest.raises(FileNotFoundError):
        files.exchange(tmp_path / "copy", tmp_path / "none")


def test_a_rename_takes_no_name_away(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("1")
    (tmp_path / "two").write_text("2")
    with pytest.raises(FileExistsError):
        files.rename_new(tmp_path / "one", tmp_path / "two")
    assert (tmp_path / "two").read_text() == "2"
    files.rename_new(tmp_path / "one", tmp_path / "three")
    assert (tmp_path / "three").read_text() == "1"


def test_a_filesystem_is_synced_by_any_of_its_directories(tmp_path: Path) -> None:
    files.syncfs(tmp_path)
    with pytest.raises(FileNotFoundError):
        files.syncfs(tmp_path / "none")


def _mounted(target: str) -> mounts.Mount:
    return mounts.Mount("0:30", "/", target, "tmpfs", "tmpfs")


def test_no_link_is_followed_when_a_tree_is_deleted(tmp_path: Path) -> None:
    kept, gone = tmp_path / "kept", tmp_path / "gone"
    (kept / "sub").mkdir(parents=True)
    (kept / "file").touch()
    gone.mkdir()
    (gone / "link").symlink_to(kept)
    (gone / "file").hardlink_to(kept / "file")
    files.remove_tree(gone)
    assert not gone.exists()
    assert sorted(path.name for path in kept.iterdir()) == ["file", "sub"]
    files.remove_tree(gone)


@pytest.mark.parametrize("below", ["", "/a/b"])
def test_a_tree_with_a_mount_is_not_touched(
    below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tree/a/b").mkdir(parents=True)
    (tmp_path / "tree/file").touch()
    monkeypatch.setattr(mounts, "listed", lambda: [_mounted(f"{tmp_path}/tree{below}")])
    with pytest.raises(NodeError) as caught:
        files.remove_tree(tmp_path / "tree")
    assert caught.value.code == "disk.busy"
    assert (tmp_path / "tree/file").exists()


def test_a_neighbour_whose_name_begins_alike_is_no_mount_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tree").mkdir()
    monkeypatch.setattr(mounts, "listed", lambda: [_mounted(f"{tmp_path}/tree2")])
    files.remove_tree(tmp_path / "tree")
    assert not (tmp_path / "tree").exists()


def test_each_tree_is_set_aside_under_a_name_of_its_own(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / "data").mkdir()
        (tmp_path / "data/number").write_text(str(number))
        files.set_aside(tmp_path / "data", tmp_path / "state/trash", "boot")
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
        files.set_aside(tmp_path / "data", tmp_path / "trash", "boot")
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
    files.remove_tree(tmp_path / "tree")
    assert not (tmp_path / "tree").exists()


def test_a_file_is_written_only_where_it_differs(tmp_path: Path) -> None:
    path = tmp_path / "new/file"
    assert files.write_changed(path, b"one", 0o600)
    before = path.stat().st_ino
    assert not files.write_changed(path, b"one", 0o600) and path.stat().st_ino == before
    assert files.write_changed(path, b"one", 0o644) and path.stat().st_mode & 0o777 == 0o644
    assert files.write_changed(path, b"two", 0o644) and path.read_bytes() == b"two"
