"""The control files that a repository's index repeats: read once, kept durably, and repaired."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from pathlib import Path

import pytest

from image_builder.bake.lock.apt import Apt
from image_builder.bake.lock.model import LockedPackage
from image_builder.bake.lock.repository import known_control, write_repository
from image_builder.bake.store import Store

CONTROL = "Package: hello\nVersion: 1.0\nArchitecture: all\nDescription: greets\n at length\n"


def _archive(name: str, data: bytes) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        member = tarfile.TarInfo(name)
        member.size = len(data)
        tar.addfile(member, io.BytesIO(data))
    return stream.getvalue()


def _deb(control: str = CONTROL) -> bytes:
    """Return a package in deb(5) format: an ar archive of a version, a control archive and a data archive."""
    members = {
        "debian-binary": b"2.0\n",
        "control.tar.gz": _archive("./control", control.encode()),
        "data.tar.gz": _archive("./usr/bin/hello", b"hello"),
    }
    made = b"!<arch>\n"
    for name, data in members.items():
        made += f"{name:<16}{0:<12}{0:<6}{0:<6}{0o100644:<8o}{len(data):<10}`\n".encode()
        made += data + b"\n" * (len(data) % 2)
    return made


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "store")
    made.prepare()
    return made


@pytest.fixture
def package(store: Store) -> LockedPackage:
    data = _deb()
    sha256 = hashlib.sha256(data).hexdigest()
    (store.path / "debs" / sha256).write_bytes(data)
    return LockedPackage(
        name="hello",
        sha256=sha256,
        size=len(data),
        path="hello.deb",
        repository="debian",
        version="1.0",
        architecture="all",
    )


def _index(store: Store, package: LockedPackage, target: Path) -> str:
    write_repository([package], "trixie", store.path / "debs", target)
    return (target / "Packages").read_text()


def test_a_control_file_is_on_the_disk_before_it_has_its_name(
    store: Store, package: LockedPackage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = store.path / "debs" / f"{package.sha256}.control"
    synced: list[tuple[bool, bool]] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append((os.fstat(fd).st_size > 0, control.exists())))
    assert CONTROL in _index(store, package, tmp_path / "repository")
    assert synced[0] == (True, False) and control.exists()


@pytest.mark.parametrize("damaged", ["", "\0" * 80, CONTROL.replace("1.0", "6.6"), CONTROL[:20]])
def test_a_damaged_control_file_is_named_and_written_anew(
    store: Store, package: LockedPackage, tmp_path: Path, damaged: str
) -> None:
    index = _index(store, package, tmp_path / "first")
    assert store.verify() == []
    control = store.path / "debs" / f"{package.sha256}.control"
    control.write_text(damaged)
    (damage,) = store.verify()
    assert (damage.id, damage.name, damage.repaired) == (package.sha256, "debs", True)
    assert "control file" in damage.difference
    assert store.verify() == []
    assert _index(store, package, tmp_path / "second") == index


def test_a_control_file_without_its_package_goes_where_it_is_damaged(
    store: Store, package: LockedPackage, tmp_path: Path
) -> None:
    """An intact one still records what an earlier lock installed (``Apt.mark_installed``)."""
    _index(store, package, tmp_path / "repository")
    (store.path / "debs" / package.sha256).unlink()
    control = store.path / "debs" / f"{package.sha256}.control"
    assert store.verify() == [] and control.exists()
    control.write_text("")
    assert [damage.repaired for damage in store.verify()] == [True]
    assert not control.exists() and store.verify() == []


def test_an_empty_control_file_is_read_anew(store: Store, package: LockedPackage, tmp_path: Path) -> None:
    (store.path / "debs" / f"{package.sha256}.control").touch()
    assert CONTROL in _index(store, package, tmp_path / "repository")


def test_a_package_is_known_by_its_control_file_or_by_itself(store: Store, package: LockedPackage) -> None:
    """An import has only the package."""
    debs = store.path / "debs"
    control = debs / f"{package.sha256}.control"
    assert known_control(debs, package.sha256) == CONTROL and not control.exists()
    control.write_text(other := CONTROL.replace("greets", "waves"))
    assert known_control(debs, package.sha256) == other
    control.write_text("")
    assert known_control(debs, package.sha256) == CONTROL
    control.unlink()
    (debs / package.sha256).write_bytes(b"not a package")
    assert known_control(debs, package.sha256) == ""
    (debs / package.sha256).unlink()
    assert known_control(debs, package.sha256) == ""


def test_an_imported_package_counts_as_installed(
    store: Store, package: LockedPackage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if no mirror has it any more."""
    monkeypatch.setattr(Apt, "_run", lambda *_: "")
    asked = Apt(tmp_path / "apt", [], "amd64")
    assert asked.mark_installed([package], store.path / "debs") == []
    assert (tmp_path / "apt/status").read_text() == f"{CONTROL}Status: install ok installed\n\n"


def _damaged(data: bytes, how: str) -> bytes:
    """Return a package that python-debian refuses with ValueError, or that installs something else."""
    if how == "header":
        return data[:56] + b"x" + data[57:]  # the size of the first member
    return _deb(CONTROL.replace("hello", "other"))


@pytest.mark.parametrize("how", ["header", "content"])
def test_a_damaged_package_is_not_known_by_itself(
    store: Store, package: LockedPackage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """An import has no control file; a lock that is resolved again then asks the mirror about the package."""
    monkeypatch.setattr(Apt, "_run", lambda *_: "")
    deb = store.path / "debs" / package.sha256
    deb.write_bytes(_damaged(deb.read_bytes(), how))
    asked = Apt(tmp_path / "apt", [], "amd64")
    assert asked.mark_installed([package], store.path / "debs") == [package]
    assert (tmp_path / "apt/status").read_text() == ""


@pytest.mark.parametrize("how", ["header", "content"])
def test_a_damaged_package_does_not_change_its_control_file(
    store: Store, package: LockedPackage, tmp_path: Path, how: str
) -> None:
    index = _index(store, package, tmp_path / "repository")
    deb = store.path / "debs" / package.sha256
    sound = deb.read_bytes()
    deb.write_bytes(_damaged(sound, how))
    (damage,) = store.verify()
    assert (damage.id, damage.repaired) == (package.sha256, False)
    deb.write_bytes(sound)
    assert store.verify() == [] and _index(store, package, tmp_path / "again") == index
