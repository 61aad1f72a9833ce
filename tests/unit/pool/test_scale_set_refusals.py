"""Every reason not to touch a scale set, individually and all at once."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from image_builder.errors import PoolError
from image_builder.gallery.tags import WITHDRAWN_TAG
from image_builder.pool.scale_set.client import Client
from image_builder.pool.scale_set.refusals import policy_refusals, refusals
from tests.support.arm.direct import Direct
from tests.support.arm.fleet import BUILDS, DEFINITION, NEW, OLD, Fleet, add_version, fleet

NOW = datetime(2026, 11, 26, tzinfo=UTC)
DISK = {"createOption": "FromImage", "diskSizeGB": 64}


def _properties(machines: Fleet) -> dict[str, Any]:
    properties: dict[str, Any] = machines.group.content["properties"]
    return properties


def _storage(machines: Fleet) -> dict[str, Any]:
    storage: dict[str, Any] = machines.group.profile["storageProfile"]
    return storage


def _refusals(machines: Fleet, target: str = NEW, *, force_ephemeral: bool = False) -> list[str]:
    client = Client(Direct(machines.arm))
    scale_set, version = client.scale_set(machines.path), client.version(target)
    assert version is not None
    present = client.version(scale_set.image) if scale_set.image else None
    return refusals(scale_set, present, version, NOW, force_ephemeral=force_ephemeral)


def _version(machines: Fleet) -> dict[str, Any]:
    version: dict[str, Any] = machines.arm.resources[NEW.lower()].content
    return version


def test_a_scale_set_that_can_be_rolled_has_no_refusal() -> None:
    assert _refusals(fleet()) == []


@pytest.mark.parametrize("mode", ["Automatic", "Rolling"])
def test_azure_must_not_replace_instances_by_itself(mode: str) -> None:
    machines = fleet()
    _properties(machines)["upgradePolicy"] = {"mode": mode}
    assert _refusals(machines) == [
        f"its upgrade policy is {mode}, not Manual: Azure would replace busy nodes"
    ]


def test_another_version_must_be_of_another_build() -> None:
    machines = fleet()
    assert _refusals(machines, OLD) == []
    _version(machines)["tags"]["image-builder-build"] = BUILDS[OLD]
    assert _refusals(machines) == [
        "versions 1.8.0 and 1.7.0 are of the same build: a node couldn't tell which one it runs"
    ]


def test_automatic_os_upgrade_must_be_off() -> None:
    machines = fleet()
    _properties(machines)["upgradePolicy"]["automaticOSUpgradePolicy"] = {"enableAutomaticOSUpgrade": True}
    assert _refusals(machines) == ["automatic OS upgrade is on: Azure would replace busy nodes"]


def test_flexible_is_refused() -> None:
    machines = fleet()
    _properties(machines)["orchestrationMode"] = "Flexible"
    assert _refusals(machines) == [
        "its orchestration mode is Flexible: only Uniform scale sets are reimaged in place"
    ]


@pytest.mark.parametrize(
    "reference",
    [
        {"id": DEFINITION},
        {"id": f"{DEFINITION}/versions/latest"},
        {"publisher": "Debian", "offer": "debian-13", "sku": "13-gen2", "version": "latest"},
    ],
)
def test_a_model_has_to_name_one_version(reference: dict[str, str]) -> None:
    machines = fleet()
    _storage(machines)["imageReference"] = reference
    assert any("its model names no version" in refusal for refusal in _refusals(machines))


def test_ephemeral_disks_have_to_be_forced() -> None:
    machines = fleet()
    _storage(machines)["osDisk"] = {**DISK, "diffDiskSettings": {"option": "Local"}}
    assert _refusals(machines) == [
        "its OS disks are ephemeral: a reimage brings the old version back unless `roll.force_ephemeral` is set"
    ]
    assert _refusals(machines, force_ephemeral=True) == []


def test_an_image_has_to_fit_its_disk() -> None:
    machines = fleet()
    _storage(machines)["osDisk"] = {**DISK, "diskSizeGB": 31}
    assert _refusals(machines) == ["version 1.8.0 needs 32 GiB, its OS disks have 31"]
    for fits in ({**DISK, "diskSizeGB": 32}, {"createOption": "FromImage"}):
        _storage(machines)["osDisk"] = fits
        assert _refusals(machines) == []


@pytest.mark.parametrize(
    ("summary", "state"),
    [
        ([], "not replicated"),
        ([{"region": "East US", "state": "Completed"}], "not replicated"),
        (
            [
                {"region": "West US 3", "state": "Replicating", "progress": 0},
                {"region": "e", "state": "Completed"},
            ],
            "Replicating",
        ),
    ],
)
def test_a_version_has_to_be_in_the_scale_sets_region(summary: list[dict[str, str]], state: str) -> None:
    machines = fleet()
    _version(machines)["properties"]["replicationStatus"] = {"summary": summary}
    assert f"version 1.8.0 isn't in westus3: {state}" in _refusals(machines)


def test_a_version_has_to_be_alive() -> None:
    machines = fleet()
    _version(machines)["properties"]["publishingProfile"]["endOfLifeDate"] = "2026-11-26T00:00:00Z"
    assert _refusals(machines) == ["version 1.8.0 is past its end of life: 2026-11-26T00:00:00Z"]


def test_a_version_must_not_be_withdrawn() -> None:
    machines = fleet()
    _version(machines)["tags"][WITHDRAWN_TAG] = "kubelet crashes"
    assert _refusals(machines) == ["version 1.8.0 was withdrawn: kubelet crashes"]


def test_a_version_has_to_be_whole_and_of_a_known_build() -> None:
    machines = fleet()
    summary = _version(machines)["properties"]["replicationStatus"]["summary"]
    summary.append({"region": "East US", "state": "Failed"})
    _version(machines)["tags"] = {}
    assert _refusals(machines) == [
        "version 1.8.0 is Failed",
        "version 1.8.0 names no build: a node that runs it couldn't be recognized",
    ]


@pytest.mark.parametrize(
    ("properties", "refusal"),
    [
        (
            {"architecture": "Arm64", "hyperVGeneration": "V2"},
            "version 1.0.0 is for Arm64, its machines are x64",
        ),
        ({"hyperVGeneration": "V1"}, "version 1.0.0 is of generation V1, its machines of V2"),
    ],
)
def test_a_version_has_to_be_for_the_same_machines(properties: dict[str, str], refusal: str) -> None:
    machines = fleet()
    other = DEFINITION.replace("worker", "other")
    machines.arm.add(other, properties=properties)
    add_version(machines.arm, f"{other}/versions/1.0.0")
    assert _refusals(machines, f"{other}/versions/1.0.0") == [refusal]


def test_the_way_back_has_to_exist() -> None:
    machines = fleet()
    del machines.arm.resources[OLD.lower()]
    assert _refusals(machines) == [
        "the version that its model names doesn't exist: a rollback would be impossible"
    ]


def test_all_refusals_are_told_at_once() -> None:
    machines = fleet()
    _properties(machines)["upgradePolicy"] = {
        "mode": "Rolling",
        "automaticOSUpgradePolicy": {"enableAutomaticOSUpgrade": True},
    }
    _storage(machines)["osDisk"] = {"diskSizeGB": 30, "diffDiskSettings": {"option": "Local"}}
    _version(machines)["properties"]["replicationStatus"] = {"summary": []}
    _version(machines)["tags"][WITHDRAWN_TAG] = "x"
    assert len(_refusals(machines)) == 6


@pytest.mark.parametrize(
    "changes",
    [{"mode": "Automatic"}, {"is_upgraded_by_azure": True}, {"is_flexible": True}, {"is_ephemeral": True}],
)
def test_a_policy_that_flips_is_seen_right_before_the_model_is_changed(changes: dict[str, Any]) -> None:
    machines = fleet()
    client = Client(Direct(machines.arm))
    before = client.scale_set(machines.path)
    assert policy_refusals(before) == []
    assert policy_refusals(replace(before, **changes))
    properties = _properties(machines)
    if "mode" in changes:
        properties["upgradePolicy"]["mode"] = "Automatic"
    elif "is_flexible" in changes:
        properties["orchestrationMode"] = "Flexible"
    elif "is_ephemeral" in changes:
        _storage(machines)["osDisk"]["diffDiskSettings"] = {"option": "Local"}
    else:
        properties["upgradePolicy"]["automaticOSUpgradePolicy"] = {"enableAutomaticOSUpgrade": True}
    with pytest.raises(PoolError, match="is left alone"):
        client.set_image(before, NEW)
    assert machines.arm.log == []


SECURE, CONTROLLERS = "SecurityType", "DiskControllerTypes"


@pytest.mark.parametrize(
    ("security", "controller", "present", "target", "reason"),
    [
        ("", "", {}, {SECURE: "TrustedLaunchSupported"}, ""),
        ("", "", {}, {SECURE: "TrustedLaunch"}, "SecurityType Standard, version 1.8.0 is for TrustedLaunch"),
        ("TrustedLaunch", "", {SECURE: "TrustedLaunch"}, {SECURE: "TrustedLaunchSupported"}, ""),
        (
            "TrustedLaunch",
            "",
            {SECURE: "TrustedLaunch"},
            {},
            "SecurityType TrustedLaunch, version 1.8.0 is for nothing",
        ),
        ("TrustedLaunch", "", {}, {}, ""),
        (
            "ConfidentialVM",
            "",
            {SECURE: "ConfidentialVmSupported"},
            {SECURE: "TrustedLaunch"},
            "ConfidentialVM, version",
        ),
        (
            "ConfidentialVM",
            "",
            {SECURE: "ConfidentialVM"},
            {SECURE: "TrustedLaunchAndConfidentialVmSupported"},
            "",
        ),
        ("", "NVMe", {CONTROLLERS: "SCSI, NVMe"}, {CONTROLLERS: "NVMe"}, ""),
        (
            "",
            "NVMe",
            {CONTROLLERS: "SCSI,NVMe"},
            {},
            "DiskControllerTypes NVMe, version 1.8.0 is for nothing",
        ),
        ("", "SCSI", {}, {CONTROLLERS: "NVMe"}, "DiskControllerTypes SCSI, version 1.8.0 is for NVMe"),
        ("", "NVMe", {}, {}, ""),
    ],
)
def test_a_definition_has_to_support_the_machines(
    security: str, controller: str, present: dict[str, str], target: dict[str, str], reason: str
) -> None:
    client = Client(Direct(fleet().arm))
    scale_set = replace(client.scale_set(fleet().path), security_type=security, disk_controller=controller)
    versions = [client.version(path) for path in (OLD, NEW)]
    assert versions[0] and versions[1]
    old, new = replace(versions[0], features=present), replace(versions[1], features=target)
    found = refusals(scale_set, old, new, NOW)
    assert len(found) == bool(reason) and reason in "".join(found)


def test_what_the_machines_are_is_read_from_the_model_and_the_definition() -> None:
    machines = fleet()
    machines.group.profile["securityProfile"] = {"securityType": "TrustedLaunch"}
    _storage(machines)["diskControllerType"] = "NVMe"
    features = [{"name": SECURE, "value": "TrustedLaunch"}, {"name": CONTROLLERS, "value": "SCSI, NVMe"}]
    machines.arm.resources[DEFINITION.lower()].content["properties"]["features"] = features
    client = Client(Direct(machines.arm))
    scale_set, version = client.scale_set(machines.path), client.version(NEW)
    assert (scale_set.security_type, scale_set.disk_controller) == ("TrustedLaunch", "NVMe")
    assert version and version.features == {SECURE: "TrustedLaunch", CONTROLLERS: "SCSI, NVMe"}
