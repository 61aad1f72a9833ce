"""The trash that the seed set aside: deleted completely, whatever containers had made of it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from image_builder.node import mounts
from image_builder.node.promote import trash

# A path of these names has more bytes than the kernel accepts.
_LEVELS, _NAME = 60, "d" * 200


@contextmanager
def _below(folder: int, name: str) -> Iterator[int]:
    os.mkdir(name, dir_fd=folder)
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder)
    try:
        yield fd
    finally:
        os.close(fd)


def _make(folder: int, levels: int) -> None:
    with _below(folder, _NAME) as here, _below(here, "beside"):
        os.symlink("/nowhere", "link", dir_fd=here)
        if levels:
            _make(here, levels - 1)


def test_a_tree_deeper_than_any_path_is_deleted(tmp_path: Path) -> None:
    aside = tmp_path / "trash" / "docker.0"
    aside.mkdir(parents=True)
    top = os.open(aside, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _make(top, _LEVELS)
    finally:
        os.close(top)
    assert trash.empty(aside.parent, 0, "now") == []
    assert list(aside.parent.iterdir()) == []


def test_what_links_lead_to_stays(tmp_path: Path) -> None:
    kept = tmp_path / "store" / "layer"
    kept.mkdir(parents=True)
    (kept / "file").touch()
    aside = tmp_path / "trash" / "docker.0"
    aside.mkdir(parents=True)
    (aside / "diff").symlink_to(kept)
    (aside.parent / "link").symlink_to(kept)
    assert trash.empty(aside.parent, 0, "now") == []
    assert list(aside.parent.iterdir()) == [] and (kept / "file").exists()


def test_what_was_set_aside_in_this_boot_is_kept(tmp_path: Path) -> None:
    for name in ("data.0.now", "data.0.before", "data.1"):
        (tmp_path / name / "containers").mkdir(parents=True)
    left = trash.empty(tmp_path, 0, "now")
    assert left == [f"{tmp_path}/data.0.now: set aside in this boot, kept until the next has succeeded"]
    assert os.listdir(tmp_path) == ["data.0.now"]
    assert trash.empty(tmp_path, 0, "next") == [] and os.listdir(tmp_path) == []


def test_a_volume_is_never_deleted(tmp_path: Path) -> None:
    for name in ("used.0", "unused.0"):
        (tmp_path / name / "volumes").mkdir(parents=True)
        (tmp_path / name / "volumes/metadata.db").touch()
    volume = tmp_path / "used.0/volumes/mine/_data/precious"
    volume.parent.mkdir(parents=True)
    volume.write_text("precious")
    assert trash.empty(tmp_path, 0, "now") == [
        f"{tmp_path}/used.0: holds 1 volumes of Docker's, such as mine"
    ]
    assert volume.read_text() == "precious" and os.listdir(tmp_path) == ["used.0"]


def test_what_holds_a_mount_stays_and_the_rest_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one.0", "two.0"):
        (tmp_path / name / "merged").mkdir(parents=True)
    merged = f"{tmp_path}/one.0/merged"
    monkeypatch.setattr(mounts, "listed", lambda: [mounts.Mount("0:30", "/", merged, "overlay", "overlay")])
    assert trash.empty(tmp_path, 0, "now") == [f"{tmp_path}/one.0: {merged} is a mount point"]
    assert os.listdir(tmp_path) == ["one.0"]


def test_it_is_emptied_at_the_pace_of_promotion(tmp_path: Path) -> None:
    (tmp_path / "data.0").mkdir()
    for number in range(192):  # each counts as 4 KiB
        (tmp_path / f"data.0/{number}").touch()
    started = time.monotonic()
    trash.empty(tmp_path, 3 << 20, "now")
    assert time.monotonic() - started >= 0.15
    assert os.listdir(tmp_path) == []
