"""A pool's scale sets as a template: whatever the image needs, in keys that the service knows, and nothing guessed."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from image_builder.cli.main import app
from image_builder.errors import DefinitionError, UsageError
from image_builder.node.join.config import parse
from image_builder.pool.plan.template import MachineModel, PoolAzure, capacities
from tests.support.arm.place import SETTINGS
from tests.support.arm.shapes import model, unknown_keys
from tests.support.shipped import filled

pytestmark = pytest.mark.usefixtures("unread_layers")

GROUP = f"/subscriptions/{SETTINGS['subscription']}/resourceGroups/pools"
AZURE: dict[str, Any] = {
    "location": "westus3",
    "subnet": f"{GROUP}/providers/Microsoft.Network/virtualNetworks/net/subnets/gpu",
    "infiniband": True,
    "identities": [f"{GROUP}/providers/Microsoft.ManagedIdentity/userAssignedIdentities/node"],
    "ssh_keys": ["ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIP7 admin"],
    "os_disk": {"size_gib": 64, "type": "Premium_LRS"},
    "data_disks": [{"size_gib": 512, "type": "Premium_LRS"}],
}
VERSION = "2026.1125.0"


def _run(tmp_path: Path, *arguments: str, pool: dict[str, Any], image: dict[str, Any] | None = None) -> Any:
    """Run the command for the example's H100 pool, with more variables for it and for its image."""
    more = {
        "vmss_h100_a": {"vars": pool},
        "images": {"hosts": {"worker_h100": {"image_gallery": SETTINGS, **(image or {})}}},
    }
    (tmp_path / "more.yml").write_text(yaml.safe_dump({"all": {"children": more}}))
    argv = [
        "pool",
        "template",
        "vmss_h100_a",
        "-i",
        str(filled("azure_vmss", tmp_path)),
        "-i",
        str(tmp_path / "more.yml"),
    ]
    argv += ["--out", str(tmp_path / "template.json"), "--json", "--version", VERSION, *arguments]
    return CliRunner().invoke(app, argv)


def _template(tmp_path: Path, pool: dict[str, Any], image: dict[str, Any] | None = None) -> dict[str, Any]:
    done = _run(tmp_path, pool=pool, image=image)
    assert done.exit_code == 0, done.output
    document: dict[str, Any] = json.loads((tmp_path / "template.json").read_text())
    return document


def _problems(tmp_path: Path, pool: dict[str, Any], image: dict[str, Any] | None = None) -> dict[str, str]:
    done = _run(tmp_path, pool=pool, image=image)
    assert done.exit_code == DefinitionError.exit_code, done.output
    assert not (tmp_path / "template.json").exists()
    return {p["path"]: p["what"] for p in json.loads(done.stdout)["error"]["problems"]}


def test_a_set_has_the_exact_version_and_whatever_its_image_needs(tmp_path: Path) -> None:
    document = _template(tmp_path, {"pool_capacity": 2, "pool_azure": AZURE})
    (scale_set,) = document["resources"]
    assert (scale_set["name"], scale_set["zones"], scale_set["sku"]["capacity"]) == ("vmss_h100_a", ["2"], 2)
    properties = scale_set["properties"]
    assert properties["upgradePolicy"] == {"mode": "Manual"} and properties["singlePlacementGroup"]
    profile = properties["virtualMachineProfile"]
    assert profile["storageProfile"]["imageReference"]["id"].endswith(
        f"/galleries/nodes/images/worker/versions/{VERSION}"
    )
    assert profile["storageProfile"]["osDisk"]["diskSizeGB"] == 64
    assert [disk["lun"] for disk in profile["storageProfile"]["dataDisks"]] == [0]
    assert profile["securityProfile"] == {
        "securityType": "TrustedLaunch",
        "uefiSettings": {"secureBootEnabled": True, "vTpmEnabled": True},
    }
    assert profile["osProfile"]["computerNamePrefix"] == "vmss-h100-a-"
    assert list(scale_set["identity"]["userAssignedIdentities"]) == AZURE["identities"]
    configuration = parse(base64.b64decode(profile["userData"]))
    assert configuration.credentials.kind == "broker"
    (health,) = profile["extensionProfile"]["extensions"]
    assert health["properties"]["settings"]["port"] == 10299
    assert health["properties"]["settings"]["gracePeriod"] >= 1800 + configuration.window


def test_every_key_is_one_of_the_services(tmp_path: Path) -> None:
    network = {"security_group": f"{GROUP}/providers/Microsoft.Network/networkSecurityGroups/g"}
    document = _template(tmp_path, {"pool_capacity": 2, "pool_azure": {**AZURE, **network}})
    assert set(document) == {"$schema", "contentVersion", "resources"}
    (scale_set,) = document["resources"]
    assert (scale_set.pop("type"), scale_set.pop("apiVersion")) == (
        "Microsoft.Compute/virtualMachineScaleSets",
        "2024-07-01",
    )
    assert unknown_keys(model("VirtualMachineScaleSet"), scale_set) == []


@pytest.mark.parametrize(
    ("infiniband", "machines", "sets"),
    [
        (True, 100, {"vmss_h100_a": 100}),
        (True, 101, {"vmss_h100_a-0": 51, "vmss_h100_a-1": 50}),
        (True, 600, {f"vmss_h100_a-{number}": 100 for number in range(6)}),
        (False, 600, {"vmss_h100_a": 600}),
        (False, 1001, {"vmss_h100_a-0": 501, "vmss_h100_a-1": 500}),
    ],
)
def test_a_set_is_one_placement_group_where_there_is_infiniband(
    infiniband: bool, machines: int, sets: dict[str, int]
) -> None:
    azure = PoolAzure.model_validate_json(json.dumps({**AZURE, "infiniband": infiniband}))
    assert capacities(MachineModel("vmss_h100_a", "i", "s", "", machines, azure)) == sets


def test_ids_are_those_that_azure_prints_whatever_their_case() -> None:
    group = GROUP.replace("resourceGroups", "resourcegroups")
    ids = {
        "subnet": f"{group}/providers/microsoft.network/virtualnetworks/net/subnets/gpu",
        "security_group": f"{group}/providers/microsoft.network/networksecuritygroups/g",
        "identities": [f"{group}/providers/Microsoft.ManagedIdentity/userAssignedIdentities/node"],
    }
    azure = PoolAzure.model_validate_json(json.dumps({**AZURE, **ids}))
    assert azure.model_dump(mode="json", include=set(ids)) == ids


def test_a_pool_without_any_machine_yet_has_a_template(tmp_path: Path) -> None:
    more = {"pool_image": "worker_h100", "pool_vm_size": "Standard_ND96isr_H100_v5", "pool_zone": "3"}
    groups = {"vmss_h100_b": {"vars": {**more, "pool_capacity": 4, "pool_azure": AZURE}}}
    tree = {"all": {"children": {"pools": {"children": {"vmss_h100_b": None}}, **groups}}}
    (tmp_path / "b.yml").write_text(yaml.safe_dump(tree))
    images = {"images": {"hosts": {"worker_h100": {"image_gallery": SETTINGS}}}}
    (tmp_path / "images.yml").write_text(yaml.safe_dump({"all": {"children": images}}))
    out = tmp_path / "b.json"
    argv = ["pool", "template", "vmss_h100_b", "-i", str(filled("azure_vmss", tmp_path))]
    argv += [f"-i{tmp_path / name}" for name in ("b.yml", "images.yml")]
    done = CliRunner().invoke(app, [*argv, "--version", VERSION, "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "vmss_h100_b" in done.output and "4" in done.output


def test_an_image_without_secure_boot_has_plain_sets_as_many_as_it_takes(tmp_path: Path) -> None:
    pool = {
        "pool_capacity": 1001,
        "pool_subnet": "10.48.0.0/15",
        "pool_azure": {**AZURE, "infiniband": False},
    }
    resources = _template(tmp_path, pool, {"image_secure_boot": False})["resources"]
    assert [(r["name"], r["sku"]["capacity"]) for r in resources] == [
        ("vmss_h100_a-0", 501),
        ("vmss_h100_a-1", 500),
    ]
    for resource in resources:
        assert resource["properties"]["singlePlacementGroup"] is False
        assert "securityProfile" not in resource["properties"]["virtualMachineProfile"]


def test_everything_that_is_missing_is_asked_for_at_once(tmp_path: Path) -> None:
    problems = _problems(tmp_path, {"pool_capacity": None, "pool_scale_set": "a set" * 20})
    assert problems["pool_azure"] == "is missing: it says what a scale set is"
    assert problems["pool_capacity"] == "must be the number of machines, got null"
    assert "a set" in problems["pool_scale_set"]
    azure = {**AZURE, "subnet": "gpu", "os_disk": {"size_gib": 0}, "password": "x"}
    del azure["infiniband"]
    problems = _problems(tmp_path, {"pool_capacity": 2, "pool_azure": azure})
    assert set(problems) == {
        "pool_azure.subnet",
        "pool_azure.infiniband",
        "pool_azure.os_disk.size_gib",
        "pool_azure.os_disk.type",
        "pool_azure.password",
    }


def test_an_image_that_does_not_fit_is_refused_with_every_reason(tmp_path: Path) -> None:
    azure = {**AZURE, "location": "atlantis", "os_disk": {"size_gib": 8, "type": "Premium_LRS"}}
    image = {"azure_guest_agent": False, "node_health_endpoint": False}
    problems = _problems(tmp_path, {"pool_capacity": 2, "pool_azure": azure}, image)
    assert problems["pool_azure.location"] == "`worker_h100` is published to westus3, eastus only"
    assert problems["pool_azure.os_disk.size_gib"] == "is smaller than the image, which has 17 GiB"
    assert set(problems) >= {"azure_guest_agent", "node_health_endpoint"}


def test_what_belongs_to_one_machine_is_no_user_data_of_all(tmp_path: Path) -> None:
    pool = {"pool_capacity": 2, "pool_azure": AZURE, "join_node_ip": "10.0.0.9"}
    assert "one machine's own" in _problems(tmp_path, pool)["join_node_ip"]
    pool = {**pool, "join_node_ip": "platform", "join_node_name": "{{ inventory_hostname }}"}
    assert "join_node_name" in _problems(tmp_path, pool)


@pytest.mark.parametrize("version", ["latest", "2026.1125", "", "2026.1125.0/../1"])
def test_a_version_is_an_exact_one(tmp_path: Path, version: str) -> None:
    done = _run(tmp_path, "--version", version, pool={"pool_capacity": 2, "pool_azure": AZURE})
    assert done.exit_code == UsageError.exit_code
    assert "not a version" in done.output
