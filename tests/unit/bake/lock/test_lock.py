"""A lock is validated when it is read, and compared with what a definition requires."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from image_builder.bake.lock.model import Lock, LockedArchive, LockedGroup, LockedPackage, Question
from image_builder.errors import LockError


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


def _group(requested: list[str], packages: list[LockedPackage]) -> LockedGroup:
    return LockedGroup(suite="trixie", components=["main"], requested=requested, packages=packages)


def _lock(**groups: list[str]) -> Lock:
    return Lock(
        image="worker",
        source_date_epoch=1,
        repositories={"debian": None},
        groups={
            name: LockedGroup(
                suite="trixie", components=["main"], requested=names, packages=[_package(n) for n in names]
            )
            for name, names in groups.items()
        },
    )


def test_a_lock_survives_its_file(tmp_path: Path) -> None:
    lock = _lock(base=["dbus"])
    lock.save(tmp_path / "lock.json")
    assert Lock.load(tmp_path / "lock.json") == lock


def test_two_builds_may_save_the_same_lock_at_once(tmp_path: Path) -> None:
    locks = [_lock(base=[f"package{n}" for n in range(count)]) for count in (200, 400)]
    path = tmp_path / "lock.json"

    def save_often(lock: Lock) -> None:
        for _ in range(50):
            lock.save(path)

    with ThreadPoolExecutor(2) as pool:
        for saved in [pool.submit(save_often, lock) for lock in locks]:
            saved.result()
    assert Lock.load(path) in locks
    assert [p.name for p in tmp_path.iterdir()] == ["lock.json"]


@pytest.mark.parametrize("place", ["missing/lock.json", "folder"])
def test_a_lock_that_can_not_be_written_there_is_told(tmp_path: Path, place: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(LockError, match=f"can't write the lock {tmp_path / place}"):
        _lock(base=[]).save(tmp_path / place)
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{}", "is not a lock"),
        ("no json", "is not a lock"),
        ("", "is not a lock"),
        ('{"format": 2}', "is not a lock"),
    ],
)
def test_a_malformed_lock_is_refused(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "lock.json").write_text(text)
    with pytest.raises(LockError, match=told) as caught:
        Lock.load(tmp_path / "lock.json")
    # `image-builder lock` compares the new lock with this one, so it doesn't overwrite one that it can't read.
    assert "remove it" in (caught.value.hint or "")


def test_a_remembered_lock_that_is_damaged_is_no_new_one(tmp_path: Path) -> None:
    """Treating it as new would silently lock the newest versions."""
    path = tmp_path / "lock.json"
    assert Lock.remembered(path) is None
    path.write_text('{"format": 2}')  # another version of this program wrote it
    assert Lock.remembered(path) is None
    lock = _lock(base=["dbus"])
    lock.save(path)
    assert Lock.remembered(path) == lock
    whole = path.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], b"[]"):
        path.write_bytes(damaged)
        with pytest.raises(LockError, match="is not a lock") as caught:
            Lock.remembered(path)
        assert "remove it" in (caught.value.hint or "")


def test_a_lock_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced = tmp_path / "lock.json", []

    def note(fd: int) -> None:
        synced.append((os.fstat(fd).st_size > 0, path.exists()))

    monkeypatch.setattr(os, "fsync", note)
    _lock(base=["dbus"]).save(path)
    assert synced[0] == (True, False) and synced[1][1], "the file, then its directory"


def test_a_base_without_security_updates_is_a_warning() -> None:
    lock = _lock(base=["dbus"])
    known = {"debian": None, "debian-security": None}
    assert lock.model_copy(update={"repositories": known}).warnings == ()
    (warning,) = lock.model_copy(update={"repositories": {"debian": None}}).warnings
    assert "without its security updates" in warning


def test_a_missing_lock_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LockError, match="can't read the lock"):
        Lock.load(tmp_path / "none.json")


def _question(*names: str, **changes: object) -> Question:
    values = {"suite": "trixie", "components": ["main"], "requested": list(names), **changes}
    return Question(**values)  # type: ignore[arg-type]


def test_a_lock_that_fits() -> None:
    assert _lock(base=["dbus"]).misfit({"base": _question("dbus")}, {}, []) == []


def test_misfits_are_all_named() -> None:
    lock = _lock(base=["dbus"], gone=["x"])  # what it has besides may stay
    archive = LockedArchive(url="https://example.invalid/a.tgz", sha256="b" * 64)
    questions = {"base": _question("udev"), "new": _question("y")}
    assert lock.misfit(questions, {"kubernetes": "bookworm"}, [archive]) == [
        "base: not locked: udev",
        "base: no longer asked for: dbus",
        "new: not locked",
        "source packages: locked none, asked for kubernetes of bookworm",
        "archive not locked: https://example.invalid/a.tgz",
    ]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"suite": "bookworm"}, "locked for trixie, not for bookworm"),
        ({"components": ["main", "contrib"]}, "components: locked main, asked for main, contrib"),
        (
            {"repositories": ["https://r.example x"]},
            "repositories: locked none, asked for https://r.example x",
        ),
    ],
)
def test_a_lock_from_elsewhere_does_not_fit(change: dict[str, object], told: str) -> None:
    assert _lock(base=["dbus"]).misfit({"base": _question("dbus", **change)}, {}, []) == [f"base: {told}"]


def test_a_group_digest_is_about_bytes_alone() -> None:
    one = _group(["a"], [_package("a", "1" * 64), _package("b", "2" * 64)])
    two = _group([], [_package("b", "2" * 64), _package("a", "1" * 64)])
    assert one.digest == two.digest
    assert _group(["a"], [_package("a", "3" * 64)]).digest != one.digest


def test_an_older_archive_than_before_is_named() -> None:
    """Only where both dates are known: a newly added archive has nothing to be older than."""
    before = _lock(base=["dbus"]).model_copy(
        update={"release_dates": {"Debian trixie": 1_700_000_000, "Debian-Security trixie-security": 10}}
    )
    now = before.model_copy(
        update={
            "release_dates": {"Debian trixie": 1_699_990_000, "Debian-Security trixie-security": 11, "v x": 1}
        }
    )
    (warning,) = now.older_than(before)
    assert warning.startswith(
        "Debian trixie is of 2023-11-14 19:26 here, and was of 2023-11-14 22:13 when it was locked before"
    )
    assert before.older_than(before) == before.older_than(_lock(base=["dbus"])) == []
