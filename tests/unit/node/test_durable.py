"""Writes that are whole or not there, and the exchange of two names."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from image_builder.node import durable


def test_a_file_is_replaced_whole_with_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    before = os.umask(0o077)
    try:
        durable.write(path, b"after", 0o644)
    finally:
        os.umask(before)
    assert path.read_text() == "after" and path.stat().st_mode & 0o777 == 0o644
    assert os.listdir(tmp_path) == ["file"]


def test_a_draft_of_a_dead_agent_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / ".file.new").write_text("a much longer draft than what is written")
    durable.write_json(tmp_path / "file", {"a": 1}, 0o600)
    assert json.loads((tmp_path / "file").read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["file"] and (tmp_path / "file").stat().st_mode & 0o777 == 0o600


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("before")
    (tmp_path / ".file.new").mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        durable.write(tmp_path / "file", b"after")
    assert (tmp_path / "file").read_text() == "before"


def test_a_directory_and_a_link_change_places(tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy/file").touch()
    (tmp_path / "link").symlink_to("/nowhere")
    durable.exchange(tmp_path / "copy", tmp_path / "link")
    assert (tmp_path / "link/file").exists() and os.readlink(tmp_path / "copy") == "/nowhere"
    with pytest.raises(FileNotFoundError):
        durable.exchange(tmp_path / "copy", tmp_path / "none")


def test_a_rename_takes_no_name_away(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("1")
    (tmp_path / "two").write_text("2")
    with pytest.raises(FileExistsError):
        durable.rename_new(tmp_path / "one", tmp_path / "two")
    assert (tmp_path / "two").read_text() == "2"
    durable.rename_new(tmp_path / "one", tmp_path / "three")
    assert (tmp_path / "three").read_text() == "1"


def test_a_filesystem_is_synced_by_any_of_its_directories(tmp_path: Path) -> None:
    durable.syncfs(tmp_path)
    with pytest.raises(FileNotFoundError):
        durable.syncfs(tmp_path / "none")
