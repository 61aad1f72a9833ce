"""The uses of a version, as Azure lists them; and that anything that can't be read never counts as unused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from image_builder.errors import FetchError, PublishError
from image_builder.gallery import uses
from image_builder.gallery.azure import Service
from image_builder.gallery.survey import RIGHTS
from image_builder.gallery.uses import LATEST, Use
from tests.support.arm.model import Request, error
from tests.support.arm.place import TRUSTED, Place
from tests.support.arm.publisher import Publisher

pytestmark = pytest.mark.root


def _image(**reference: str) -> dict[str, Any]:
    return {"storageProfile": {"imageReference": reference}}


def _scale_set(azure: Place, name: str, model: str, instances: dict[str, str], mode: str = "Uniform") -> str:
    """Add a scale set with a model's image, and instances by their exact version."""
    path = f"{azure.arm.group}/providers/Microsoft.Compute/virtualMachineScaleSets/{name}"
    profile = _image(id=model)
    azure.arm.add(path, properties={"orchestrationMode": mode, "virtualMachineProfile": profile})
    for number, version in instances.items():
        image = _image(id=azure.target.definition.upper(), exactVersion=version)
        azure.arm.add(f"{path}/virtualMachines/{number}", properties=image)
    return path


def _read(azure: Place) -> list[Use]:
    settings = azure.target.settings
    with Service(settings.subscription, endpoint=azure.arm.url) as service:
        return uses.read(service, azure.target, [settings.subscription])


def test_models_instances_and_single_machines_are_uses(azure: Place) -> None:
    target = azure.target
    pinned = _scale_set(azure, "a", target.version("1.0.0"), {"0": "1.0.0", "1": "0.9.0", "2": "1.0.0"})
    floating = _scale_set(azure, "b", target.definition, {})
    _scale_set(azure, "c", f"{target.gallery}/images/worker2/versions/1.0.0", {})
    flexible = _scale_set(azure, "d", target.version("0.7.0"), {}, mode="Flexible")
    machine = f"{azure.arm.group}/providers/Microsoft.Compute/virtualMachines/m"
    azure.arm.add(machine, properties=_image(id=target.version("0.8.0")))
    assert _read(azure) == [
        Use(pinned, "model", "1.0.0"),
        Use(pinned, "machines", "1.0.0", 2),
        Use(pinned, "machines", "0.9.0", 1),
        Use(floating, "model", LATEST),
        Use(flexible, "model", "0.7.0"),
        Use(machine, "machines", "0.8.0", 1),
    ]


def test_a_machine_that_does_not_say_its_version_is_an_error(azure: Place) -> None:
    machine = f"{azure.arm.group}/providers/Microsoft.Compute/virtualMachines/m"
    azure.arm.add(machine, properties=_image(id=azure.target.definition))
    with pytest.raises(FetchError, match="unknown version"):
        _read(azure)


def test_everything_that_cannot_be_read_is_told_at_once(azure: Place, publish: Publisher) -> None:
    _scale_set(azure, "a", azure.target.version("1.0.0"), {"0": "1.0.0"})
    azure.arm.actions = ["Microsoft.Compute/virtualMachineScaleSets/read"]
    publish("prune", "--delete", status=FetchError.exit_code)
    for action in (
        "galleries/images/versions/read",
        "galleries/images/versions/delete",
        "disks/read",
        "disks/delete",
        "images/read",
        "images/delete",
    ):
        assert f"the right Microsoft.Compute/{action} is missing" in publish.output
    for action in ("virtualMachineScaleSets/virtualMachines/read", "virtualMachines/read"):
        assert f"perform action 'Microsoft.Compute/{action}'" in publish.output
    assert azure.changes() == []


@pytest.mark.parametrize(
    ("command", "lacking"),
    [
        (("promote", "1.0.0", "--because", "x"), "galleries/images/versions/write"),
        (("withdraw", "1.0.0", "--because", "x"), "galleries/images/versions/write"),
        (("age",), "galleries/images/versions/read"),
        (("prune",), "disks/read"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_command_asks_for_its_own_rights_first(
    azure: Place, publish: Publisher, command: tuple[str, ...], lacking: str
) -> None:
    """Lacking only one of its permissions, it names that one; with all of them, it does its work."""
    rights = [f"Microsoft.Compute/{action}" for action in RIGHTS[command[0]]]
    machines = ["Microsoft.Compute/virtualMachine*/read"]
    azure.arm.add(
        azure.target.version("1.0.0"),
        tags={"image-builder-build": "ab" * 6, "image-builder-vhd-sha256": "12" * 32},
        properties={"publishingProfile": {"targetRegions": [{"name": "westus3"}]}}
        | {"provisioningState": "Succeeded"}
        | {"replicationStatus": {"summary": []}},
    )
    azure.arm.actions = [right for right in rights if not right.endswith(lacking)] + machines
    publish(*command, status=PublishError.exit_code)
    assert f"the right Microsoft.Compute/{lacking} is missing" in publish.output
    assert azure.changes() == []
    azure.arm.actions = rights + machines
    publish(*command)


def test_a_disk_that_an_upload_left_is_deleted_a_day_later(azure: Place, publish: Publisher) -> None:
    azure.host.faults = [lambda page: 403 if page.length == 512 else None]
    publish("run", status=PublishError.exit_code)
    azure.host.faults = []
    (path,) = [path for path in azure.arm.resources if "/disks/" in path]
    disk = azure.arm.resources[path].content
    foreign = f"{azure.arm.group}/providers/Microsoft.Compute/disks/data"
    azure.arm.add(foreign, properties={"diskState": "Unattached", "timeCreated": "2026-01-01T00:00:00+00:00"})
    before = azure.changes()
    (verdict,) = publish("prune", "--delete")["disks"]
    assert verdict["reasons"] == ["it is less than a day old: an upload may be in progress"]
    disk["properties"]["timeCreated"] = "yesterday"
    publish("prune", "--delete", status=FetchError.exit_code)
    disk["properties"]["timeCreated"] = "2026-01-01T00:00:00.1234567+00:00"
    assert publish("prune")["disks"] == [{"disk": disk["name"], "unused": True, "reasons": []}]
    assert azure.changes() == before
    publish("prune", "--delete")
    assert azure.changes() == [*before, ("DELETE", disk["id"])]
    assert foreign.lower() in azure.arm.resources


@pytest.mark.parametrize("security_type", [TRUSTED], indirect=True)
def test_a_managed_image_is_deleted_with_its_disk(azure: Place, publish: Publisher) -> None:
    def unsent(request: Request) -> Any:
        is_version = request.method == "PUT" and "/versions/" in request.path
        return error(403, "AuthorizationFailed", "no") if is_version else None

    azure.arm.faults = [unsent]
    publish("run", status=PublishError.exit_code)
    (disk,) = [r.content for path, r in azure.arm.resources.items() if "/disks/" in path]
    (image,) = [r.content for path, r in azure.arm.resources.items() if "compute/images/" in path]
    azure.arm.add(f"{azure.arm.group}/providers/Microsoft.Compute/images/theirs")
    assert publish("prune", "--delete")["images"] == [
        {"image": image["name"], "unused": False, "reasons": ["its disk is kept"]}
    ]
    disk["properties"]["timeCreated"] = "2026-01-01T00:00:00+00:00"
    before = azure.changes()
    publish("prune", "--delete")
    assert azure.changes() == [*before, ("DELETE", image["id"]), ("DELETE", disk["id"])]


def test_only_what_is_proven_unused_is_deleted(azure: Place, publish: Publisher, tmp_path: Path) -> None:
    name = publish("run")["version"].rsplit("/", 1)[1]
    target = azure.target
    for version in ("1.0.0", "0.9.0"):
        tags = {"image-builder-build": "ab" * 6}
        profile = {"excludeFromLatest": True, "endOfLifeDate": "2026-01-01T00:00:00Z", "targetRegions": []}
        properties = {"publishingProfile": profile, "replicationStatus": {"summary": []}}
        azure.arm.add(target.version(version), tags=tags, properties=properties)
    _scale_set(azure, "a", target.version(name), {"0": "1.0.0"})

    def unread(request: Request) -> Any:
        return error(403, "AuthorizationFailed", "no") if request.path.endswith("/virtualMachines") else None

    azure.arm.faults = [unread]
    publish("prune", "--delete", status=FetchError.exit_code)
    azure.arm.faults = []
    before = azure.changes()
    verdicts = {v["version"]: v["reasons"] for v in publish("prune")["versions"]}
    assert verdicts["0.9.0"] == [] and verdicts["1.0.0"] == ["1 machines of a run it"]
    assert azure.changes() == before
    publish("prune", "--delete")
    assert [c for c in azure.changes() if c not in before] == [("DELETE", target.version("0.9.0"))]
    assert publish("age", status=1)["ages"][0]["problem"] == "its publication date is unknown"
