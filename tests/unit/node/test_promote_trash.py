"""What the seed set aside is deleted whole, whatever containers had made of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from image_builder.node.promote import trash

# A path of these has more bytes than the kernel takes.
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
    assert trash.empty(aside.parent, 0) == []
    assert list(aside.parent.iterdir()) == []


def test_what_links_lead_to_stays(tmp_path: Path) -> None:
    kept = tmp_path / "store" / "layer"
    kept.mkdir(parents=True)
    (kept / "file").touch()
    aside = tmp_path / "trash" / "docker.0"
    aside.mkdir(parents=True)
    (aside / "diff").symlink_to(kept)
    (aside.parent / "link").symlink_to(kept)
    assert trash.empty(aside.parent, 0) == []
    assert list(aside.parent.iterdir()) == [] and (kept / "file").exists()
