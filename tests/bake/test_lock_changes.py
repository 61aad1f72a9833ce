"""A lock made from an earlier one differs from it only as much as the request requires; with real apt."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from image_builder.bake.lock.model import Lock
from image_builder.bake.lock.requirements import Group, Requirements
from image_builder.bake.lock.resolve import _resolve, _with_the_date_of, remembered_lock, resolve_lock
from image_builder.definition import ImageDefinition, load_inventory
from image_builder.errors import LockError
from image_builder.events import Monitor
from image_builder.settings import REPO_ROOT, Settings
from tests.support.debian_mirror import SUITE, Repository, serve

pytestmark = pytest.mark.root


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[tuple[Repository, str]]:
    made = Repository(tmp_path / "served/debian", tmp_path)
    made.add("apt", extra="Essential: yes\n")
    for name in ("dbus", "curl", "runtime"):
        made.add(name)
    made.publish()
    (tmp_path / "served/debian-security").symlink_to("debian")
    with serve(made.path.parent) as address:
        yield made, f"{address}/debian"


def _definition(keyring: Path) -> ImageDefinition:
    definition = load_inventory([REPO_ROOT / "inventories/lab"]).define("minimal")
    base = definition.base.model_copy(update={"keyring": str(keyring)})
    return dataclasses.replace(definition, base=base)


def _lock(
    tmp_path: Path,
    source: tuple[Repository, str],
    system: tuple[str, ...],
    known: Lock | None,
    monitor: Monitor | None = None,
) -> Lock:
    """Resolve a base and two layers, ``system`` and one with the package ``runtime``."""
    repository, mirror = source
    groups = {
        "base": Group(SUITE, ("dbus",)),
        "system": Group(SUITE, system, after="base"),
        "container_runtime": Group(SUITE, ("runtime",), after="system"),
    }
    staging = tmp_path / f"staging-{len(list(tmp_path.iterdir()))}"
    staging.mkdir()
    settings = Settings(store=tmp_path / "store", mirror=mirror)
    definition = _definition(repository.keyring)
    needs = Requirements(groups)
    return _resolve(definition, needs, settings, monitor or Monitor(), staging, known)


def _versions(lock: Lock) -> dict[str, dict[str, str]]:
    return {name: {p.name: p.version for p in group.packages} for name, group in lock.groups.items()}


def test_one_more_package_is_one_more_package(tmp_path: Path, repository: tuple[Repository, str]) -> None:
    first = _lock(tmp_path, repository, ("curl",), None)
    assert _versions(first)["base"] == {"apt": "1.0", "dbus": "1.0"}
    made, _ = repository
    for name in ("dbus", "curl", "runtime"):
        made.add(name, version="2.0")
    made.add("htop")
    made.publish()
    second = _lock(tmp_path, repository, ("curl", "htop"), first)
    assert _versions(second) == {
        "base": {"apt": "1.0", "dbus": "1.0"},
        "system": {"curl": "1.0", "htop": "1.0"},
        "container_runtime": {"runtime": "1.0"},
    }
    assert second.groups["base"] == first.groups["base"]
    assert second.source_date_epoch == first.source_date_epoch
    assert _versions(_lock(tmp_path, repository, ("curl", "htop"), None))["base"]["dbus"] == "2.0"


def test_what_the_mirror_has_no_more_is_kept_where_nothing_changed(
    tmp_path: Path, repository: tuple[Repository, str]
) -> None:
    """A security update replaces a version in its archive; the locked one is in the store, with its control file."""
    first = _lock(tmp_path, repository, ("curl",), None)
    made, _ = repository
    debs = tmp_path / "store/debs"
    debs.mkdir(parents=True)
    for package in first.groups["base"].packages:
        control = f"Package: {package.name}\nVersion: {package.version}\nArchitecture: amd64\n"
        (debs / f"{package.sha256}.control").write_text(control)
    (made.path / "pool/dbus_1.0_amd64.deb").unlink()
    (made.path / "pool/curl_1.0_amd64.deb").unlink()
    for name in ("dbus", "curl"):
        made.add(name, version="2.0")
    made.add("htop", extra="Depends: dbus\n")
    made.publish()
    second = _lock(tmp_path, repository, ("curl", "htop"), first)
    assert second.groups["base"] == first.groups["base"]
    assert _versions(second)["system"] == {"curl": "2.0", "htop": "1.0"}


@pytest.mark.parametrize("replaced", [("dbus",), ("apt", "dbus")])
def test_what_neither_mirror_nor_store_has_is_resolved_again(
    tmp_path: Path,
    repository: tuple[Repository, str],
    monkeypatch: pytest.MonkeyPatch,
    replaced: tuple[str, ...],
) -> None:
    """A lock without a build, a security update, one more package: nothing that apt can't know of may be left out."""
    first = _lock(tmp_path, repository, ("curl",), None)
    made, _ = repository
    for name in replaced:
        (made.path / f"pool/{name}_1.0_amd64.deb").unlink()
        made.add(name, version="2.0", extra="Essential: yes\n" if name == "apt" else "")
    made.add("curl", version="2.0")
    made.add("htop", extra="Depends: dbus\n")
    made.publish()
    monitor, notes = Monitor(), list[str]()
    monkeypatch.setattr(monitor, "note", notes.append)
    second = _lock(tmp_path, repository, ("curl", "htop"), first, monitor)
    assert _versions(second) == {
        "base": {"apt": "1.0", "dbus": "1.0"} | dict.fromkeys(replaced, "2.0"),
        "system": {"curl": "1.0", "htop": "1.0"},
        "container_runtime": {"runtime": "1.0"},
    }
    gone = ", ".join(f"{name} 1.0" for name in replaced)
    assert notes == [
        f"neither the mirror nor the store still has {gone}: "
        "the packages of base and of all layers on top are resolved again"
    ]


def test_nothing_is_asked_of_a_mirror_for_what_is_known(
    tmp_path: Path, repository: tuple[Repository, str]
) -> None:
    first = _lock(tmp_path, repository, ("curl",), None)
    made, _ = repository
    assert _lock(tmp_path, (made, "http://127.0.0.1:9/debian"), ("curl",), first) == first


def test_the_archives_date_is_that_of_the_base(tmp_path: Path, repository: tuple[Repository, str]) -> None:
    """Another date would rebuild every layer."""
    first = _lock(tmp_path, repository, ("curl",), None)
    later = first.model_copy(update={"source_date_epoch": first.source_date_epoch + 3600})
    made, _ = repository
    made.add("curl", version="2.0")
    made.publish()
    other_layer = _lock(tmp_path, repository, ("curl",), None).model_copy(
        update={"source_date_epoch": later.source_date_epoch}
    )
    assert _versions(other_layer)["system"] == {"curl": "2.0"}
    assert _with_the_date_of(other_layer, first).source_date_epoch == first.source_date_epoch
    made.add("dbus", version="2.0")
    made.publish()
    other_base = _lock(tmp_path, repository, ("curl",), None).model_copy(
        update={"source_date_epoch": later.source_date_epoch}
    )
    assert _with_the_date_of(other_base, first).source_date_epoch == later.source_date_epoch


def test_a_mirror_that_serves_an_old_state_is_a_warning(
    tmp_path: Path, repository: tuple[Repository, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is signed and hasn't expired, as all of Debian stable stays forever."""
    made, mirror = repository
    definition = _definition(made.keyring)
    settings = Settings(store=tmp_path / "store", mirror=mirror)
    needs = Requirements({"base": Group(SUITE, ("dbus",))})
    notes: list[str] = []
    monitor = Monitor()
    monkeypatch.setattr(monitor, "note", notes.append)

    def lock() -> list[str]:
        notes.clear()
        lock = resolve_lock(definition, needs, settings, monitor)
        lock.save(remembered_lock(settings, definition.record_name))
        return [note for note in notes if "old state" in note]

    assert lock() == []
    assert lock() == []
    made.publish(age=3 * 86400.0)
    assert [note.split(" is of ")[0] for note in lock()] == [
        f"warning: Lab {suite}" for suite in (SUITE, f"{SUITE}-security", f"{SUITE}-updates")
    ]


def test_a_layers_repository_replaces_no_package_of_the_base(
    tmp_path: Path, repository: tuple[Repository, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, mirror = repository
    vendor = Repository(tmp_path / "served/vendor", _folder(tmp_path / "vendor"))
    vendor.add("dbus", version="9.0")
    vendor.publish()
    from image_builder.bake.lock import resolve
    from image_builder.bake.lock.apt import Source

    known = resolve._sources
    address = f"{mirror.removesuffix('debian')}vendor"
    source = Source("vendor", address, (SUITE,), ("main",), vendor.keyring)
    monkeypatch.setattr(resolve, "_sources", lambda *args: [*known(*args), source])
    with pytest.raises(LockError, match=r"would not be Debian's: dbus 9.0 of vendor"):
        _lock(tmp_path, repository, ("curl",), None)


def _folder(path: Path) -> Path:
    path.mkdir()
    return path
