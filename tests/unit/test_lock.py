"""A lock is checked when it is read and compared with what a definition asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from image_builder.errors import LockError
from image_builder.lock import Lock, LockedArchive, LockedGroup, LockedPackage


def _package(name: str, sha256: str = "a" * 64) -> LockedPackage:
    return LockedPackage(
        name=name,
        sha256=sha256,
        size=1,
        path=f"pool/{name}.deb",
        repository="debian",
        version="1",
        architecture="amd64",
    )


def _lock(**groups: list[str]) -> Lock:
    return Lock(
        image="worker",
        source_date_epoch=1,
        repositories={"debian": None},
        groups={
            name: LockedGroup(suite="trixie", requested=names, packages=[_package(n) for n in names])
            for name, names in groups.items()
        },
    )


def test_a_lock_survives_its_file(tmp_path: Path) -> None:
    lock = _lock(base=["dbus"])
    lock.save(tmp_path / "lock.json")
    assert Lock.load(tmp_path / "lock.json") == lock


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{}", "is not a lock"),
        ("no json", "is not a lock"),
        ('{"format": 2}', "is not a lock"),
    ],
)
def test_a_malformed_lock_is_refused(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "lock.json").write_text(text)
    with pytest.raises(LockError, match=told):
        Lock.load(tmp_path / "lock.json")


def test_a_missing_lock_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LockError, match="can't read the lock"):
        Lock.load(tmp_path / "none.json")


def test_misfits_are_all_named() -> None:
    lock = _lock(base=["dbus"], gone=["x"])
    archive = LockedArchive(url="https://example.invalid/a.tgz", sha256="b" * 64)
    assert lock.misfit({"base": ["dbus", "udev"], "new": ["y"]}, [archive]) == [
        "base: not locked: udev",
        "gone: locked, but not a stage of the definition",
        "new: not locked",
        "archive not locked: https://example.invalid/a.tgz",
    ]
    assert lock.misfit({"base": ["dbus"], "gone": ["x"]}, []) == []


def test_a_group_digest_is_about_bytes_alone() -> None:
    one = LockedGroup(
        suite="trixie", requested=["a"], packages=[_package("a", "1" * 64), _package("b", "2" * 64)]
    )
    two = LockedGroup(
        suite="other", requested=[], packages=[_package("b", "2" * 64), _package("a", "1" * 64)]
    )
    assert one.digest == two.digest
    changed = LockedGroup(suite="trixie", requested=["a"], packages=[_package("a", "3" * 64)])
    assert changed.digest != one.digest
