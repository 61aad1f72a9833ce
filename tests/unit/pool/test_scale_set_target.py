"""The target of a roll: what it is, and all objections to it, reported at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from image_builder.errors import DefinitionError
from image_builder.gallery.tags import WITHDRAWN_TAG
from image_builder.pool.plan.model import Host
from image_builder.pool.scale_set.client import Client
from image_builder.pool.scale_set.model import Instance
from image_builder.pool.scale_set.target import read_target, spelled_as_planned
from tests.support.arm.direct import Direct
from tests.support.arm.fleet import BUILDS, DEFINITION, NEW, OLD, Fleet, fleet
from tests.support.arm.model import Json


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


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tags": {WITHDRAWN_TAG: "it panics"}}, "was withdrawn: it panics"),
        (
            {"publishingProfile": {"endOfLifeDate": "2020-01-01T00:00:00Z"}},
            "is past its end of life: 2020-01-01T00:00:00Z",
        ),
    ],
)
def test_a_way_back_that_a_rollback_would_refuse_is_warned_of(change: Json, reason: str) -> None:
    machines, warnings = fleet(1), list[str]()
    old = machines.arm.resources[OLD.lower()].content
    old["properties"]["safetyProfile"] = {"blockDeletionBeforeEndOfLife": True}
    read_target(Client(Direct(machines.arm)), hosts(machines), NEW, warn=warnings.append)
    assert warnings == []
    (old if "tags" in change else old["properties"]).update(change)
    read_target(Client(Direct(machines.arm)), hosts(machines), NEW, warn=warnings.append)
    assert warnings == [f"version 1.7.0 {reason}; `pool rollback` to it will be refused"]


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


def test_ids_are_spelled_as_the_plan_does() -> None:
    machines = fleet(1)
    (host,) = hosts(machines)
    target = read_target(Client(Direct(machines.arm)), [host], NEW)
    upper = machines.path.upper()
    present = [
        host.model_copy(update={"scale_set_id": path}) for path in (upper, "/elsewhere", machines.path)
    ]
    spelled = [one.scale_set_id for one in spelled_as_planned(present, target)]
    assert spelled == [machines.path, "/elsewhere", machines.path]
    # A plan may have both spellings: its journal's records have the host's own.
    both = target.model_copy(update={"before": {machines.path: OLD, upper: OLD}})
    assert [one.scale_set_id for one in spelled_as_planned(present[::2], both)] == [upper, machines.path]


def test_versions_that_azure_does_not_tell_are_found_out_before_the_first_canary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machines = fleet(3)
    known = Client.instances

    def instances(client: Client, path: str) -> list[Instance]:
        one, two, three = known(client, path)
        return [
            one,
            replace(two, image=f"{DEFINITION}/versions/"),
            replace(three, image=f"{DEFINITION}/versions/"),
        ]

    monkeypatch.setattr(Client, "instances", instances)
    with pytest.raises(DefinitionError) as caught:
        read_target(Client(Direct(machines.arm)), hosts(machines), NEW)
    assert "doesn't say which version" in str(caught.value) and "1, 2" in str(caught.value)
