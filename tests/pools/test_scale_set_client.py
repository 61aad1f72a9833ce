"""A scale set is read, patched, upgraded and reimaged through Azure's own SDK, and by a driver that is killed.

Kills come where an uninterrupted run changes something: each request is one point before it arrives and one after.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from image_builder.pool.scale_set.client import Client
from image_builder.pool.scale_set.records import open_journal
from image_builder.pool.scale_set.roll import driving, roll_instance
from image_builder.pool.scale_set.upgrades import Ending
from image_builder.system.resource_manager import ResourceManager
from tests.support.arm.fleet import NEW, OLD, Fleet, fleet
from tests.support.arm.model import SUBSCRIPTION
from tests.support.arm.roller import PATIENCE
from tests.support.arm.serving import Served, found_by, served

pytestmark = pytest.mark.root


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Fleet, Served]]:
    """Serve a scale set, in an environment in which the SDK finds it."""
    machines = fleet(5, page=2)
    (tmp_path / "cloud").mkdir()
    with served(machines.arm, tmp_path / "cloud") as service:
        found_by(service.environment, monkeypatch)
        yield machines, service


def test_an_instance_is_rolled_through_the_real_sdk(cloud: tuple[Fleet, Served], tmp_path: Path) -> None:
    machines, service = cloud
    with (
        ResourceManager(SUBSCRIPTION, endpoint=service.url) as manager,
        open_journal(tmp_path / "roll.jsonl") as journal,
    ):
        client = Client(manager)
        assert [instance.id for instance in client.instances(machines.path)] == ["0", "1", "2", "3", "4"]
        with driving(client, machines.path, "run-1", journal, patience=PATIENCE) as drive:
            version = client.version(NEW)
            assert version is not None
            drive.set_image(client.scale_set(machines.path), NEW)
            assert set(client.services(machines.path).values()) == {"Suspended"}
            vm_id = machines.machine("3").vm_id
            assert roll_instance(drive, "3", vm_id, version, machines.node("3")) == Ending("ok")
    assert [machine.disk for machine in machines.group.machines.values()] == [OLD, OLD, OLD, NEW, OLD]
    assert machines.group.services == dict.fromkeys(machines.group.services, "Running")
    # Each change is sent once: the service has received nothing twice.
    posts = [entry.path for entry in machines.arm.log if entry.method == "POST" and "Orch" not in entry.path]
    assert len(posts) == len(set(posts)) == 2
