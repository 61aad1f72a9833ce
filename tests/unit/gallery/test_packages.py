"""Two locks compared: which of the image's packages are newer today, by Debian's order; and the wrong lock."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from image_builder.bake.lock.model import DEBIAN, SECURITY, Lock, LockedGroup, LockedPackage
from image_builder.canonical import digest
from image_builder.gallery.packages import Behind, behind
from image_builder.gallery.versions import Version

BUILD = "ab" * 6


def _package(name: str, version: str, repository: str = DEBIAN) -> LockedPackage:
    return LockedPackage(
        name=name,
        version=version,
        architecture="amd64",
        sha256="0" * 64,
        size=1,
        path=f"{name}.deb",
        repository=repository,
    )


def _lock(**groups: list[LockedPackage]) -> Lock:
    made = {
        name: LockedGroup(suite="trixie", components=["main"], requested=[], packages=packages)
        for name, packages in groups.items()
    }
    return Lock(image="worker", source_date_epoch=1, repositories={DEBIAN: None}, groups=made)


OLD = _lock(
    tools=[_package("mmdebstrap", "1.0")],
    base=[_package("openssl", "3.0.9-1"), _package("zlib1g", "1.3~rc1"), _package("gone", "1")],
    system=[_package("systemd", "257.8-1"), _package("curl", "8.14.1-2")],
)
NOW = _lock(
    tools=[_package("mmdebstrap", "2.0")],
    base=[_package("openssl", "3.0.10-1", SECURITY), _package("zlib1g", "1.3"), _package("new", "1")],
    system=[_package("systemd", "257.8-1"), _package("curl", "8.14.1-1")],
)


@pytest.fixture
def version(tmp_path: Path) -> Version:
    (tmp_path / BUILD).mkdir()
    OLD.save(tmp_path / BUILD / "lock.json")
    return Version("1.0.0", BUILD, True, "", "", "Succeeded", {}, lock_sha256=digest(OLD.as_json()))


def test_newer_versions_are_named_in_debians_order(tmp_path: Path, version: Version) -> None:
    result = behind(tmp_path, version, NOW, ["base", "system", "join"])
    assert result == Behind(("openssl 3.0.9-1 -> 3.0.10-1", "zlib1g 1.3~rc1 -> 1.3"), 1)
    assert str(result) == (
        "2 packages are behind, 1 of them security updates: openssl 3.0.9-1 -> 3.0.10-1, zlib1g 1.3~rc1 -> 1.3"
    )


def test_what_is_as_new_as_can_be_says_nothing(tmp_path: Path, version: Version) -> None:
    assert str(behind(tmp_path, version, OLD, ["base", "system"])) == ""


def test_a_lock_that_is_missing_or_another_is_no_proof(tmp_path: Path, version: Version) -> None:
    for other, reason in (
        (replace(version, lock_sha256="0" * 64), "isn't the one of the version's tag"),
        (replace(version, lock_sha256=""), "isn't the one of the version's tag"),
        (replace(version, build="cd" * 6), "can't read the lock"),
    ):
        result = behind(tmp_path, other, NOW, ["base"])
        assert reason in str(result) and result.packages == ()
