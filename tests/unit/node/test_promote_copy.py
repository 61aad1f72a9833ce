"""Copies: where a big file gets holes, the order of the files, and trees too deep for any path."""

from __future__ import annotations

import os
import random
import stat
import struct
from pathlib import Path

import pytest

from image_builder.node import files
from image_builder.node.promote.copy import BLOCK, _finish, copy_tree, extents

_DATA = b"\x01" * BLOCK
_ZERO = bytes(BLOCK)
_ALMOST = bytes(BLOCK - 1) + b"\x01"


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (_DATA, [(0, 4096)]),
        (_ZERO, []),
        (_ALMOST, [(0, 4096)]),
        (_ZERO + _DATA + _DATA + _ZERO, [(4096, 12288)]),
        (_DATA + _ZERO + _DATA, [(0, 4096), (8192, 12288)]),
        (_DATA + _ZERO[:100], [(0, 4096)]),
        (_ZERO + b"\x00\x01", [(4096, 4098)]),
    ],
)
def test_whole_blocks_of_zeros_are_left_out(data: bytes, wanted: list[tuple[int, int]]) -> None:
    assert extents(data) == wanted


def test_what_is_written_at_its_place_is_the_same_file() -> None:
    chance = random.Random(4)
    for _ in range(200):
        blocks = [chance.choice((_DATA, _ZERO, _ALMOST, chance.randbytes(BLOCK))) for _ in range(20)]
        data = b"".join(blocks) + chance.randbytes(chance.randrange(BLOCK))
        found = bytearray(len(data))
        for start, end in extents(data):
            found[start:end] = data[start:end]
            assert data[start:end].strip(b"\0")
        assert bytes(found) == data


def _in_order(folder: Path) -> list[int]:
    """Return the sizes of the files below a directory in the order of the inodes, directory by directory."""
    entries = sorted(folder.iterdir(), key=lambda path: path.stat().st_ino)
    below = [size for path in entries if path.is_dir() for size in _in_order(path)]
    return [path.stat().st_size for path in entries if path.is_file()] + below


def test_files_are_read_in_the_order_of_their_inodes(tmp_path: Path) -> None:
    """The size of each file tells which it is; a directory counts as one block."""
    chance, source = random.Random(5), tmp_path / "source"
    for number in chance.sample(range(1, 60), 59):
        folder = source / f"d{number % 4}" / f"e{number % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{chance.random()}").write_bytes(b"x" * number)
    costs: list[int] = []
    copy_tree(source, tmp_path / "copy", costs.append)
    assert [cost - BLOCK for cost in costs if cost > BLOCK] == _in_order(source)


def _open_below(folder: int, name: str) -> int:
    below = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder)
    os.close(folder)
    return below


def _deepest(top: Path, name: str, levels: int) -> int:
    folder = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(levels):
        folder = _open_below(folder, name)
    return folder


@pytest.mark.parametrize(
    ("name", "levels"), [("d" * 200, 60), ("d", 1200)], ids=["long paths", "many levels"]
)
def test_a_tree_deeper_than_any_path_is_copied(name: str, levels: int, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "first").write_text("linked")
    folder = os.open(source, os.O_RDONLY | os.O_DIRECTORY)
    top = os.dup(folder)
    for _ in range(levels):
        os.mkdir(name, dir_fd=folder)
        folder = _open_below(folder, name)
    os.link("first", "last", src_dir_fd=top, dst_dir_fd=folder)
    os.symlink("/nowhere", "link", dir_fd=folder)
    for fd in (folder, top):
        os.close(fd)
    before = len(os.listdir("/proc/self/fd"))
    copy_tree(source, tmp_path / "copy")
    assert len(os.listdir("/proc/self/fd")) == before
    folder = _deepest(tmp_path / "copy", name, levels)
    try:
        assert sorted(os.listdir(folder)) == ["last", "link"]
        assert os.stat("last", dir_fd=folder).st_ino == (tmp_path / "copy/first").stat().st_ino
    finally:
        os.close(folder)
        for tree in (source, tmp_path / "copy"):  # pytest can't
            files.remove_tree(tree)


def test_a_mode_comes_after_an_acl_whose_mask_would_change_it(tmp_path: Path) -> None:
    """An ACL lets a second user read and write; the mode's middle bits are its mask."""
    no_one, entries = 0xFFFFFFFF, ((1, 6, None), (2, 6, 1), (4, 4, None), (16, 6, None), (32, 0, None))
    acl = struct.pack("<I", 2) + b"".join(
        struct.pack("<HHI", t, p, no_one if i is None else i) for t, p, i in entries
    )
    path = tmp_path / "file"
    path.touch()
    path.chmod(0o640)
    with path.open("r+b") as stream:
        _finish(stream.fileno(), path.stat(), {"system.posix_acl_access": acl})
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_file_that_ends_with_a_hole_has_its_size(tmp_path: Path) -> None:
    size = 9 << 20
    (tmp_path / "source").mkdir()
    with (tmp_path / "source/file").open("wb") as stream:
        stream.write(_DATA)
        stream.truncate(size)
    copy_tree(tmp_path / "source", tmp_path / "target")
    info = (tmp_path / "target/file").stat()
    assert info.st_size == size and info.st_blocks * 512 < 1 << 20
    assert (tmp_path / "target/file").read_bytes() == _DATA + bytes(size - BLOCK)
