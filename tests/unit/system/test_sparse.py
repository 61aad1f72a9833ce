"""Copies keep holes and bytes; hashes count holes as zeros."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from image_builder.system import sparse

BLOCK = 65536


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.booleans(), max_size=12), st.binary(max_size=BLOCK), st.integers(0, BLOCK), st.booleans())
def test_a_copy_is_the_same_and_as_sparse(
    tmp_path: Path, blocks: list[bool], end: bytes, tail: int, direct: bool
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    with source.open("wb") as stream:
        for number, data in enumerate(blocks):
            if data:
                stream.seek(number * BLOCK)
                stream.write(bytes([number + 1]) * BLOCK)
        stream.seek(len(blocks) * BLOCK)
        stream.write(end)
        stream.truncate(size := len(blocks) * BLOCK + len(end) + tail)
    target.unlink(missing_ok=True)
    assert sparse.copy(source, target, direct=direct) == size
    assert target.read_bytes() == source.read_bytes()
    assert sparse.sha256(target, direct=direct) == hashlib.sha256(source.read_bytes()).hexdigest()
    assert target.stat().st_blocks <= source.stat().st_blocks + 8


def test_progress_ends_at_the_whole(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"x" * 100)
    told: list[tuple[int, int]] = []
    sparse.copy(source, tmp_path / "target", lambda done, total: told.append((done, total)))
    sparse.sha256(source, lambda done, total: told.append((done, total)))
    assert set(told) == {(100, 100)}


def test_a_copy_never_overwrites(tmp_path: Path) -> None:
    for name in ("source", "target"):
        (tmp_path / name).write_text(name)
    with pytest.raises(FileExistsError):
        sparse.copy(tmp_path / "source", tmp_path / "target")
    assert (tmp_path / "target").read_text() == "target"


def test_an_empty_file_is_copied(tmp_path: Path) -> None:
    (tmp_path / "source").touch()
    assert sparse.copy(tmp_path / "source", tmp_path / "target") == 0
    assert sparse.sha256(tmp_path / "target") == hashlib.sha256(b"").hexdigest()


def test_pieces_are_hashed_in_order(tmp_path: Path) -> None:
    """The file fills several of the buffers that reading and hashing share, each with different content."""
    content = b"".join(bytes([number]) * (1 << 20) for number in range(1, 12)) + b"end"
    (tmp_path / "source").write_bytes(content)
    for direct in (False, True):
        assert sparse.sha256(tmp_path / "source", direct=direct) == hashlib.sha256(content).hexdigest()


def test_a_filesystem_without_direct_transfers_is_used_as_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: os.PathLike[str], flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    (tmp_path / "source").write_bytes(b"x" * 5000)
    assert sparse.copy(tmp_path / "source", tmp_path / "target", direct=True) == 5000
    assert (tmp_path / "target").read_bytes() == b"x" * 5000
    assert sparse.sha256(tmp_path / "target", direct=True) == hashlib.sha256(b"x" * 5000).hexdigest()
