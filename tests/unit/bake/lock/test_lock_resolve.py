"""The repositories whose addresses a lock keeps, and the addresses of their files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from image_builder.bake.lock import resolve
from image_builder.bake.lock.apt import Source
from image_builder.bake.lock.model import DEBIAN, SECURITY, Lock, LockedGroup, LockedPackage
from image_builder.bake.lock.requirements import Group, Requirements
from image_builder.errors import FetchError
from image_builder.events import Monitor
from image_builder.settings import Settings

MIRROR, BACKPORTS = "https://mirror.example/debian", "https://backports.example/debian"


def _source(name: str, uri: str) -> Source:
    return Source(name, uri, ("trixie",), ("main",), Path("/keyring"))


class _Apt:
    """An apt that installs nothing."""

    def __init__(self, _path: Path, sources: list[Source], _architecture: str) -> None:
        self.sources = sources

    def update(self) -> None:
        pass

    def release_dates(self, _ids: Iterable[str] | None = None) -> dict[str, int]:
        return {"Debian trixie": 1}

    def install(self, _names: Iterable[str]) -> list[LockedPackage]:
        return []

    def prefer(self, _packages: Iterable[LockedPackage]) -> None:
        pass

    def mark_installed(self, _packages: Iterable[LockedPackage], _debs: Path) -> list[LockedPackage]:
        return []


def _definition() -> Any:
    base = SimpleNamespace(distribution="debian", architecture="amd64")
    return SimpleNamespace(name="worker", record_names=("worker",), base=base)


def test_only_debians_own_repositories_are_locked_without_an_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [_source(DEBIAN, MIRROR), _source(SECURITY, MIRROR), _source("debian-backports", BACKPORTS)]
    monkeypatch.setattr(resolve, "Apt", _Apt)
    monkeypatch.setattr(resolve, "_sources", lambda *_: sources)
    needs = Requirements({"base": Group("trixie", ())})
    lock = resolve.resolve_lock(_definition(), needs, Settings(store=tmp_path / "store"), Monitor())
    assert lock.repositories == {DEBIAN: None, SECURITY: None, "debian-backports": BACKPORTS}


def _package(name: str, repository: str) -> LockedPackage:
    more = {"sha256": "a" * 64, "size": 1, "path": f"{name}.deb", "version": "1", "architecture": "amd64"}
    return LockedPackage.model_validate({"name": name, "repository": repository, **more})


@pytest.mark.parametrize("used", [True, False])
def test_a_lock_of_an_earlier_version_gets_its_addresses_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used: bool
) -> None:
    """Only the groups that have packages of such a repository are resolved again."""
    needs = Requirements({"base": Group("trixie", ()), "system": Group("trixie", ("tool",), after="base")})
    packages = {
        "base": [_package("dbus", DEBIAN)],
        "system": [_package("tool", "debian-backports" if used else DEBIAN)],
    }
    previous = Lock(
        image="worker",
        source_date_epoch=1,
        repositories={DEBIAN: None, SECURITY: None, "debian-backports": None},
        groups={
            name: LockedGroup(**needs.groups[name].question.model_dump(), packages=packages[name])
            for name in packages
        },
    )
    reasons = ["repository locked without its address: debian-backports"] if used else []
    assert needs.misfit(previous) == reasons
    sources = [_source(DEBIAN, MIRROR), _source(SECURITY, MIRROR), _source("debian-backports", BACKPORTS)]
    monkeypatch.setattr(resolve, "Apt", _Apt)
    monkeypatch.setattr(resolve, "_sources", lambda *_: sources)
    lock = resolve.resolve_lock(_definition(), needs, Settings(store=tmp_path / "store"), Monitor(), previous)
    assert needs.misfit(lock) == []
    assert lock.groups["base"] == previous.groups["base"]
    assert (lock.groups["system"] == previous.groups["system"]) is not used
    assert lock.repositories == {DEBIAN: None, SECURITY: None} | (
        {"debian-backports": BACKPORTS} if used else {}
    )


def test_a_repository_without_a_mirror_is_named_if_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "debian_sources", lambda *_: [_source(DEBIAN, MIRROR)])
    base = SimpleNamespace(mirror=None, suite="trixie", keyring=None)
    definition: Any = SimpleNamespace(base=base)
    repositories = {DEBIAN: None, SECURITY: None, "vendor": "https://vendor.example"}
    lock = Lock(image="worker", source_date_epoch=1, repositories=repositories, groups={})
    assert resolve.addresses(definition, Settings(), lock, {DEBIAN, "vendor"}) == {
        DEBIAN: MIRROR,
        SECURITY: "",
        "vendor": "https://vendor.example",
    }
    with pytest.raises(FetchError, match="no mirror is known for debian-security") as raised:
        resolve.addresses(definition, Settings(), lock, {SECURITY})
    assert raised.value.hint and "IMAGE_BUILDER_MIRROR" in raised.value.hint
