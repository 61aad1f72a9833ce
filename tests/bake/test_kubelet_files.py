"""The role kubelet's module: what it makes, leaves alone and refuses, and that check mode changes nothing."""

from __future__ import annotations

import importlib.util
import lzma
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.root

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def files() -> ModuleType:
    path = REPO / "roles/kubelet/library/kubelet_files.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def entry(dest: Path, **more: Any) -> dict[str, Any]:
    """Return an entry as the module gets it, with all options present."""
    return {
        "dest": str(dest),
        "mode": "0600",
        "state": "file",
        "content": None,
        "src": None,
        "unpack": False,
        **more,
    }


def state_of(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Map every path to its mode, owner and content (for a link, its target)."""
    found = {}
    for path in sorted(folder.rglob("*")):
        info = path.lstat()
        content = b""
        if path.is_symlink():
            content = os.fsencode(os.readlink(path))
        elif path.is_file():
            content = path.read_bytes()
        found[str(path.relative_to(folder))] = (info.st_mode & 0o7777, info.st_uid, content)
    return found


def test_everything_is_made_once_and_looking_changes_nothing(files: ModuleType, tmp_path: Path) -> None:
    source, top = tmp_path / "source", tmp_path / "top"
    source.write_bytes(b"\x7fELF" * 1000)
    top.mkdir()
    entries = [
        entry(top / "etc/deep", state="directory", mode="0750"),
        entry(top / "etc/deep/text", content="{{ not a template }}\n"),
        entry(top / "program", src=str(source), mode="0755"),
        entry(top / "link", src="/usr/lib/cni", state="link"),
    ]
    assert [files.apply(e, check=True) for e in entries] == [True] * 4
    assert state_of(top) == {}
    old = os.umask(0o077)
    try:
        assert [files.apply(e, check=False) for e in entries] == [True] * 4
    finally:
        os.umask(old)
    made = state_of(top)
    assert {name: what[:2] for name, what in made.items() if name != "link"} == {
        "etc": (0o750, 0),
        "etc/deep": (0o750, 0),
        "etc/deep/text": (0o600, 0),
        "program": (0o755, 0),
    }
    assert made["etc/deep/text"][2] == b"{{ not a template }}\n"
    assert made["program"][2] == source.read_bytes()
    assert made["link"][2] == b"/usr/lib/cni"
    assert [files.apply(e, check=False) for e in entries] == [False] * 4
    assert state_of(top) == made


def test_what_differs_is_mended(files: ModuleType, tmp_path: Path) -> None:
    text, folder, link = tmp_path / "text", tmp_path / "folder", tmp_path / "link"
    text.write_text("old")
    text.chmod(0o644)
    folder.mkdir(mode=0o777)
    link.symlink_to("elsewhere")
    os.chown(text, 1, 1)
    wanted = [
        entry(text, content="new"),
        entry(folder, state="directory", mode="0700"),
        entry(link, state="link", src="/there"),
    ]
    before = state_of(tmp_path)
    assert all(files.apply(e, check=True) for e in wanted)
    assert state_of(tmp_path) == before
    assert all(files.apply(e, check=False) for e in wanted)
    assert state_of(tmp_path) == {
        "folder": (0o700, 0, b""),
        "link": (link.lstat().st_mode & 0o7777, 0, b"/there"),
        "text": (0o600, 0, b"new"),
    }
    text.chmod(0o640)
    assert files.apply(wanted[0], check=False), "the mode alone differs"
    assert text.stat().st_mode & 0o7777 == 0o600


def test_nothing_else_is_replaced(files: ModuleType, tmp_path: Path) -> None:
    folder, text = tmp_path / "folder", tmp_path / "text"
    folder.mkdir()
    (folder / "kept").write_text("kept")
    text.write_text("kept")
    before = state_of(tmp_path)
    for refused in (
        entry(folder, content="new"),
        entry(folder, state="link", src="/there"),
        entry(text, state="directory"),
        entry(text, state="link", src="/there"),
    ):
        with pytest.raises(files.OccupiedError):
            files.apply(refused, check=False)
    with pytest.raises(OSError, match="missing"):
        files.apply(entry(tmp_path / "new", src=str(tmp_path / "missing")), check=False)
    assert state_of(tmp_path) == before, "a half-written file was left"


def test_a_compressed_program_is_unpacked_and_mended(files: ModuleType, tmp_path: Path) -> None:
    program, packed, dest = os.urandom(3 << 20), tmp_path / "packed", tmp_path / "program"
    packed.write_bytes(lzma.compress(program, preset=0))
    unpack = entry(dest, src=str(packed), mode="0755", unpack=True)
    assert files.apply(unpack, check=True) and not dest.exists()
    assert files.apply(unpack, check=False) and dest.read_bytes() == program
    assert not files.apply(unpack, check=False)
    for other in (program[:-1], program + b"x", b"", program[:-1] + b"x"):
        dest.write_bytes(other)
        assert files.apply(unpack, check=False) and dest.read_bytes() == program, len(other)
    packed.write_bytes(lzma.compress(program, preset=0)[:-100])
    dest.unlink()
    with pytest.raises(EOFError):
        files.apply(unpack, check=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["packed"]
