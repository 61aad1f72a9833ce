"""The target of a roll: what it is, and all objections to it, reported at once."""

from __future__ import annotations

import pytest

from image_builder.errors import DefinitionError
from image_builder.pool.plan.model import Host
from image_builder.pool.scale_set.client import Client
from image_builder.pool.scale_set.target import read_target
from tests.support.arm.direct import Direct
from tests.support.arm.fleet import BUILDS, NEW, OLD, Fleet, fleet


def hosts(machines: Fleet, **changes: str) -> list[Host]:
    base = {"address": "192.0.2.1", "pool": "gpu", "scale_set": "gpu", "vm_size": "size", "image": "worker"}
    return [
        Host.model_validate(
            {
                **base,
                "name": f"gpu-{machine.id}",
                "vm_id": machine.vm_id,
                "scale_set_id": machines.path,
                "instance": machine.id,
                **changes,
            }
        )
        for machine in machines.group.machines.values()
    ]


def test_a_target_knows_the_way_back() -> None:
    machines = fleet(2)
    target = read_target(Client(Direct(machines.arm)), hosts(machines), NEW)
    assert (target.version, target.build) == (NEW, BUILDS[NEW])
    assert target.before == {machines.path: OLD}


def test_everything_is_told_at_once() -> None:
    machines = fleet(2)
    machines.group.content["properties"]["upgradePolicy"]["mode"] = "Automatic"
    machines.group.profile["storageProfile"]["osDisk"]["diskSizeGB"] = 16
    with pytest.raises(DefinitionError) as caught:
        read_target(Client(Direct(machines.arm)), hosts(machines, instance=""), NEW)
    text = str(caught.value)
    assert "`pool snapshot`" in text and "gpu-0, gpu-1" in text
    assert "Automatic, not Manual" in text and "OS disks have 16" in text


def test_ephemeral_disks_are_for_a_policy_that_forces_them() -> None:
    machines = fleet(1)
    machines.group.profile["storageProfile"]["osDisk"]["diffDiskSettings"] = {"option": "Local"}
    client = Client(Direct(machines.arm))
    with pytest.raises(DefinitionError, match="ephemeral: .* unless `roll.force_ephemeral` is set"):
        read_target(client, hosts(machines), NEW)
    assert read_target(client, hosts(machines), NEW, force_ephemeral=True).before == {machines.path: OLD}


def test_a_version_that_does_not_exist() -> None:
    machines = fleet(1)
    with pytest.raises(DefinitionError, match="there is no version"):
        read_target(Client(Direct(machines.arm)), hosts(machines), f"{NEW}.0")
