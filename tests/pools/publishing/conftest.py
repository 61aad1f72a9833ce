"""The environment for publishing: Azurite behind the import host, the simulated service, an inventory and a build."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.arm.pages import Store, azurite
from tests.support.arm.place import SETTINGS, Place, place, write_build, write_inventory
from tests.support.arm.publisher import Publisher
from tests.support.arm.serving import found_by


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with azurite(tmp_path_factory.mktemp("azurite")) as running:
        yield running


@pytest.fixture
def security_type(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the definition and the inventory a security type, if the test names one."""
    if value := getattr(request, "param", None):
        monkeypatch.setitem(SETTINGS, "security_type", value)


@pytest.fixture
def azure(
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    security_type: None,  # it changes what is served
) -> Iterator[Place]:
    """Serve a subscription with a gallery, in an environment in which the SDK finds it."""
    (tmp_path / "cloud").mkdir()
    with place(store, tmp_path / "cloud") as cloud:
        found_by(cloud.environment, monkeypatch)
        yield cloud


@pytest.fixture
def inventory(tmp_path: Path, security_type: None) -> Path:  # it changes what is written
    """Write an inventory with the image `worker` and its publishing target."""
    return write_inventory(tmp_path / "hosts.yml")


@pytest.fixture
def publish(azure: Place, inventory: Path, tmp_path: Path) -> Publisher:
    write_build(tmp_path / "output")
    return Publisher(azure, inventory, tmp_path / "output")
