"""The agent as one file: the same bytes everywhere, its own compiled code, and nothing but the node's package."""

from __future__ import annotations

import importlib.util
import io
import marshal
import os
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from image_builder.node import zipapp


def _package(folder: Path) -> Path:
    (folder / "part/__pycache__").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "__main__.py").write_text("def main():\n    return 0\n")
    (folder / "part/__init__.py").write_text("X = 1\n")
    (folder / "part/__pycache__/__init__.cpython-311.pyc").write_bytes(b"old")
    (folder / "loose.pyc").write_bytes(b"old")
    return folder


def _names(data: bytes) -> list[str]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.namelist()


def test_the_shipped_archive_is_the_nodes_package_alone() -> None:
    data = zipapp.archive()
    assert data.startswith(b"#!/usr/bin/python3 -I\n")
    names = _names(data)
    package = Path(zipapp.__file__).parent
    wanted = {f"image_builder/node/{p.relative_to(package)}" for p in package.rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == wanted | {
        "__main__.py",
        "image_builder/__init__.py",
    }
    assert not [name for name in names if name.endswith(".pyc")]


def test_data_lies_beside_the_code_and_is_found_there(tmp_path: Path) -> None:
    package = Path(zipapp.__file__).parent
    wanted = {
        f"image_builder/node/{path.relative_to(package)}": path.read_bytes()
        for kind in ("*.ptx", "*.json")
        for path in package.rglob(kind)
    }
    assert "image_builder/node/gpu/smoke/kernels/base.ptx" in wanted
    assert "image_builder/node/gpu/sizes.json" in wanted
    made = tmp_path / "node-agent"
    made.write_bytes(zipapp.compiled(zipapp.archive()))
    for name, data in wanted.items():
        # The way importlib.resources reads it when a package is in an archive.
        assert zipfile.Path(made, name).read_bytes() == data


def test_nothing_but_sources_and_data_is_packed(tmp_path: Path) -> None:
    package = _package(tmp_path)
    for name in ("kernels/one.ptx", "table.json"):
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_text("x")
    for name in (".one.ptx.swp", "table.json~", "notes.md", "table.json.orig"):
        (package / name).write_text("x")
    names = [name.removeprefix("image_builder/node/") for name in _names(zipapp.archive(package))]
    assert {"kernels/one.ptx", "table.json"} <= set(names)
    assert {Path(name).suffix for name in names} == {".py", ".ptx", ".json"}


def test_the_same_sources_give_the_same_bytes(tmp_path: Path) -> None:
    one = zipapp.archive(_package(tmp_path / "one"))
    os.utime(_package(tmp_path / "two") / "__init__.py", (1, 1))
    assert one == zipapp.archive(tmp_path / "two")
    assert "image_builder/node/loose.pyc" not in _names(one)


def test_code_lies_beside_its_source_and_is_never_checked_against_it(tmp_path: Path) -> None:
    made = zipapp.compiled(zipapp.archive(_package(tmp_path)))
    with zipfile.ZipFile(io.BytesIO(made)) as archive:
        data = archive.read("image_builder/node/part/__init__.pyc")
        sources = [name for name in archive.namelist() if name.endswith(".py")]
        assert sorted(archive.namelist()) == sorted([*sources, *(f"{name}c" for name in sources)])
    assert data[:4] == importlib.util.MAGIC_NUMBER
    assert int.from_bytes(data[4:8], "little") == 0b01  # PEP 552: by hash, unchecked
    found: dict[str, int] = {}
    exec(marshal.loads(data[16:]), found)
    assert found["X"] == 1


def test_compiling_again_changes_nothing(tmp_path: Path) -> None:
    source, target = tmp_path / "agent.pyz", tmp_path / "bin/agent"
    source.write_bytes(zipapp.archive(_package(tmp_path / "package")))
    assert zipapp.install(source, target)
    assert target.stat().st_mode & 0o777 == 0o755
    assert not zipapp.install(source, target)
    # It also works from a compiled archive: the installed agent can do it.
    assert not zipapp.install(target, target)
    target.chmod(0o644)
    assert zipapp.install(source, target) and target.stat().st_mode & 0o777 == 0o755


def test_a_running_agents_file_can_be_opened_by_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork that has closed its files still imports, and a GPU's worker is started from it."""
    agent = tmp_path / "node-agent"
    agent.write_bytes(zipapp.archive())
    with zipfile.ZipFile(agent) as opened:
        start = opened.read("__main__.py")
    monkeypatch.setattr(sys, "path", [str(agent), *sys.path])
    monkeypatch.setitem(sys.modules, "image_builder.node.__main__", SimpleNamespace(main=lambda: 7))
    with pytest.raises(SystemExit) as ended:
        exec(start, {})
    directory, number = os.path.split(sys.path[0])
    os.close(int(number))
    assert (ended.value.code, directory, sys.path[1]) == (7, f"/proc/{os.getpid()}/fd", str(agent))
