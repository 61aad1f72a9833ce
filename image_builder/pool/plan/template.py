"""A pool's scale sets as an Azure Resource Manager template: what the inventory says about them, matched to the image.

The image determines the machines' security profile and where to ask for their health; the pool's group determines the
rest, in ``pool_azure`` and the variables that a rollout reads too. Nothing is guessed: a missing value is an error.
User data is the node configuration that all machines share, so what belongs to one machine is refused.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError

from image_builder.canonical import JSON
from image_builder.definition.evaluate import resolved_variables
from image_builder.definition.model import ImageDefinition
from image_builder.definition.placeholders import placeholders
from image_builder.definition.values import Place, is_vaulted
from image_builder.errors import DefinitionError, Problem, UsageError
from image_builder.node.join import config as node_config
from image_builder.pool.plan.render import VARIABLES, one_nodes_of_several, render_host
from image_builder.pool.plan.source import opened, values_of, where
from image_builder.settings import VaultId
from image_builder.strict_yaml import Strict
from image_builder.text import did_you_mean

VARIABLE = "pool_azure"
_JOIN_LAYER = "join"
_READ = ("pool_image", "pool_vm_size", "pool_zone", "pool_scale_set", "pool_capacity", VARIABLE)
_API = "2024-07-01"
_SCHEMA = "https://schema.management.azure.com/schemas/2019-04-01/deploymentTemplate.json#"
# InfiniBand spans one placement group. Without it, a scale set with a gallery image has up to 1000 machines.
_PLACEMENT_GROUP, _LARGEST_SET = 100, 1000
# The longest grace period that the health extension can give a new machine.
_LONGEST_GRACE = 14400
# With the numbers of a set and a machine appended, it is a host name, which has at most 64 characters.
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,49}", re.ASCII)

_NETWORK = r"(?i)^/subscriptions/[0-9a-f-]{36}/resourceGroups/[\w.()-]{1,90}/providers/Microsoft\.Network"
Subnet = Annotated[str, StringConstraints(pattern=_NETWORK + r"/virtualNetworks/[\w.-]+/subnets/[\w.-]+$")]
SecurityGroup = Annotated[str, StringConstraints(pattern=_NETWORK + r"/networkSecurityGroups/[\w.-]+$")]
Identity = Annotated[
    str,
    StringConstraints(
        pattern=r"(?i)^/subscriptions/[0-9a-f-]{36}/resourceGroups/[\w.()-]{1,90}"
        r"/providers/Microsoft\.ManagedIdentity/userAssignedIdentities/[\w-]+$"
    ),
]
PublicKey = Annotated[str, StringConstraints(pattern=r"^ssh-(rsa|ed25519) [A-Za-z0-9+/=]+( [^\n]*)?$")]


class AzureDisk(Strict):
    """A managed disk of each machine."""

    size_gib: int = Field(ge=1, le=32767, description="Size in GiB.")
    type: Literal["Standard_LRS", "StandardSSD_LRS", "StandardSSD_ZRS", "Premium_LRS", "Premium_ZRS"] = Field(
        description="Azure's name of its kind."
    )


class PoolAzure(Strict):
    """The properties of a pool's scale sets, other than size and zone."""

    location: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]+$")] = Field(
        description="Region, by Azure's short name; the image's gallery must replicate to it."
    )
    subnet: Subnet = Field(description="Id of the subnet.")
    security_group: SecurityGroup | None = Field(None, description="Id of a network security group.")
    accelerated_networking: bool = Field(True, description="The size supports it; nearly all do.")
    infiniband: bool = Field(
        description="The machines share an InfiniBand network: one placement group, at most 100 machines a set."
    )
    identities: tuple[Identity, ...] = Field(
        min_length=1, description="Ids of the managed identities that machines have."
    )
    admin_user: Annotated[str, StringConstraints(pattern=r"^[a-z_][a-z0-9_-]{0,31}$")] = Field(
        "azureuser", description="The user that Azure has made at the first boot."
    )
    ssh_keys: tuple[PublicKey, ...] = Field(
        min_length=1, description="Public keys of that user; there is no password."
    )
    os_disk: AzureDisk = Field(
        description="The disk of the image: `size_gib`, no less than the image, and `type`."
    )
    data_disks: tuple[AzureDisk, ...] = Field((), description="Further disks, in the order of their LUNs.")


@dataclass(frozen=True)
class MachineModel:
    """What all machines of a pool have in common. ``configuration`` is how they join, if the inventory says so."""

    name: str
    image: str
    vm_size: str
    zone: str
    capacity: int
    azure: PoolAzure
    configuration: str = ""


def read_model(paths: Sequence[Path], pool: str, vault: Sequence[VaultId] = ()) -> MachineModel:
    """Return what an inventory says about a pool's machines, none of which has to exist yet.

    Raises UsageError for an unknown group, DefinitionError with every problem, VaultError.
    """
    absolute = [path.absolute() for path in paths]
    # Not a valid host name, so that a value derived from it, which would be one machine's own, is invalid.
    machine = f"each machine of {pool}"
    with opened(absolute, vault) as source:
        if source.group(pool) is None:
            groups = [str(name) for name in source.manager.groups]
            raise UsageError(f"no group `{pool}` in the inventory{did_you_mean(pool, groups)}")
        source.manager.add_host(machine, group=pool)
        values, failures = values_of(source, machine, _READ.__contains__)
        faults = dict(failures)
        azure = _azure(values, faults)
        texts = {name: _text(values, name, faults) for name in _READ[:4]}
        capacity = values.get("pool_capacity")
        if "pool_capacity" not in faults and (type(capacity) is not int or capacity < 1):
            faults["pool_capacity"] = f"must be the number of machines, got {json.dumps(capacity)}"
        name = texts["pool_scale_set"] or pool
        if not _NAME.fullmatch(name):
            faults["pool_scale_set"] = f"can't be a scale set's name: `{name}`"
        own, problems = _configuration(source, machine)
        here = str(Place(str(absolute[0])))
        problems += [
            Problem(where(source, machine, variable.partition(".")[0]) or here, variable, reason)
            for variable, reason in faults.items()
        ]
        problems += placeholders(absolute)
    if problems or azure is None or type(capacity) is not int:
        raise DefinitionError(problems, hint="docs/how-to/make-scale-sets.md has an example")
    size, zone = texts["pool_vm_size"], texts["pool_zone"]
    return MachineModel(name, texts["pool_image"], size, zone, capacity, azure, own)


def _configuration(source: Any, machine: str) -> tuple[str, list[Problem]]:
    """Return the node configuration that all machines share, and what is wrong with it; empty if there is none."""
    if not any(values_of(source, machine, VARIABLES.__contains__)):
        return "", []
    rendered, problems = render_host(source, machine)
    node = json.loads(rendered.text).get("node", {})
    problems += [
        Problem("", f"join_{'node_' if key != 'provider_id' else ''}{key}", f"{value} is one machine's own")
        for key, value in one_nodes_of_several({"one": node, "another": node})
    ]
    return rendered.text, problems


def _azure(values: Mapping[str, JSON], faults: dict[str, str]) -> PoolAzure | None:
    value = values.get(VARIABLE)
    if VARIABLE in faults:
        return None
    if value is None:
        faults[VARIABLE] = "is missing: it says what a scale set is"
        return None
    try:
        return PoolAzure.model_validate_json(json.dumps(value))
    except ValidationError as error:
        for fault in error.errors():
            faults[".".join([VARIABLE, *map(str, fault["loc"])])] = fault["msg"]
    return None


def _text(values: Mapping[str, JSON], name: str, faults: dict[str, str]) -> str:
    value = values.get(name)
    if name in faults:
        return ""
    if value is None or value == "":
        if name in ("pool_image", "pool_vm_size"):
            faults[name] = "is missing"
        return ""
    if is_vaulted(value) or isinstance(value, bool) or not isinstance(value, str | int):
        faults[name] = f"must be a text, got {json.dumps(value)}"
        return ""
    return str(value)


def require_fit(model: MachineModel, image: ImageDefinition) -> None:
    """Raise DefinitionError with every reason why a pool's machines and an image don't match."""
    variables, problems = resolved_variables(image), list[Problem]()
    if image.gallery is None:
        problems.append(Problem("", "image_gallery", f"is missing: `{image.name}` is in no gallery"))
    elif model.azure.location not in (regions := [region.name for region in image.gallery.regions]):
        reason = f"`{image.name}` is published to {', '.join(regions)} only"
        problems.append(Problem("", f"{VARIABLE}.location", reason))
    if variables.get("azure_guest_agent") is not True:
        reason = f"is false for `{image.name}`: Azure's agent runs the health extension"
        problems.append(Problem("", "azure_guest_agent", reason))
    if variables.get("node_health_endpoint") is not True:
        reason = f"`{image.name}` has none (layer `gate`), and the health extension asks it"
        problems.append(Problem("", "node_health_endpoint", reason))
    if _JOIN_LAYER in image.layers and not model.configuration:
        problems.append(
            Problem("", "join_*", f"is missing: `{image.name}` joins by itself, and reads where to")
        )
    size = image.disk.root_size_mib
    if size != "auto" and model.azure.os_disk.size_gib << 10 < (least := size + image.disk.esp_size_mib):
        reason = f"is smaller than the image, which has {math.ceil(least / 1024)} GiB"
        problems.append(Problem("", f"{VARIABLE}.os_disk.size_gib", reason))
    if not problems and (grace := _grace(model, variables)) > _LONGEST_GRACE:
        reason = f"a machine may take {grace} s to join, Azure waits {_LONGEST_GRACE} s for its health"
        problems.append(Problem("", "node_health_endpoint_grace_seconds", reason))
    if problems:
        raise DefinitionError(problems)


def template(model: MachineModel, image: ImageDefinition, version: str) -> dict[str, Any]:
    """Return the template; ``version`` is a gallery version's id. Model and image must match: see ``require_fit``."""
    return {
        "$schema": _SCHEMA,
        "contentVersion": "1.0.0.0",
        "resources": [
            _scale_set(model, image, version, name, capacity) for name, capacity in capacities(model).items()
        ],
    }


def capacities(model: MachineModel) -> dict[str, int]:
    """Return the scale sets that a pool needs, and how many machines each has: as equal as possible."""
    largest = _PLACEMENT_GROUP if model.azure.infiniband else _LARGEST_SET
    count = math.ceil(model.capacity / largest)
    if count == 1:
        return {model.name: model.capacity}
    share, rest = divmod(model.capacity, count)
    return {f"{model.name}-{number}": share + (number < rest) for number in range(count)}


def _scale_set(
    model: MachineModel, image: ImageDefinition, version: str, name: str, capacity: int
) -> dict[str, Any]:
    azure = model.azure
    return {
        "type": "Microsoft.Compute/virtualMachineScaleSets",
        "apiVersion": _API,
        "name": name,
        "location": azure.location,
        **({"zones": [model.zone]} if model.zone else {}),
        "sku": {"name": model.vm_size, "tier": "Standard", "capacity": capacity},
        "identity": {
            "type": "UserAssigned",
            "userAssignedIdentities": {identity: {} for identity in azure.identities},
        },
        "properties": {
            "orchestrationMode": "Uniform",
            "upgradePolicy": {"mode": "Manual"},
            "overprovision": False,
            "singlePlacementGroup": azure.infiniband,
            "virtualMachineProfile": {
                "storageProfile": _storage(azure, version),
                "osProfile": _system(azure, name),
                "networkProfile": {"networkInterfaceConfigurations": [_interface(azure)]},
                "extensionProfile": {"extensions": [_health(model, resolved_variables(image))]},
                **_security(image),
                **({"userData": _encoded(model.configuration)} if _JOIN_LAYER in image.layers else {}),
            },
        },
    }


def _storage(azure: PoolAzure, version: str) -> dict[str, Any]:
    def disk(settings: AzureDisk, caching: str) -> dict[str, Any]:
        managed = {"storageAccountType": settings.type}
        return {"diskSizeGB": settings.size_gib, "caching": caching, "managedDisk": managed}

    return {
        "imageReference": {"id": version},
        "osDisk": {"createOption": "FromImage", "osType": "Linux", **disk(azure.os_disk, "ReadWrite")},
        "dataDisks": [
            {"lun": number, "createOption": "Empty", **disk(settings, "None")}
            for number, settings in enumerate(azure.data_disks)
        ],
    }


def _system(azure: PoolAzure, name: str) -> dict[str, Any]:
    path = f"/home/{azure.admin_user}/.ssh/authorized_keys"
    return {
        # Azure appends six letters or digits; a host name has neither dots nor underscores.
        "computerNamePrefix": re.sub(r"[._]", "-", name.lower()) + "-",
        "adminUsername": azure.admin_user,
        "linuxConfiguration": {
            "disablePasswordAuthentication": True,
            "provisionVMAgent": True,
            "ssh": {"publicKeys": [{"path": path, "keyData": key} for key in azure.ssh_keys]},
        },
    }


def _interface(azure: PoolAzure) -> dict[str, Any]:
    address = {"name": "primary", "properties": {"primary": True, "subnet": {"id": azure.subnet}}}
    return {
        "name": "primary",
        "properties": {
            "primary": True,
            "enableAcceleratedNetworking": azure.accelerated_networking,
            "ipConfigurations": [address],
            **({"networkSecurityGroup": {"id": azure.security_group}} if azure.security_group else {}),
        },
    }


def _health(model: MachineModel, variables: Mapping[str, JSON]) -> dict[str, Any]:
    """Return the extension that polls each node's health (docs/how-to/tell-azure-of-health.md)."""
    return {
        "name": "health",
        "properties": {
            "publisher": "Microsoft.ManagedServices",
            "type": "ApplicationHealthLinux",
            "typeHandlerVersion": "2.0",
            "autoUpgradeMinorVersion": True,
            "settings": {
                "protocol": "http",
                "port": variables["node_health_endpoint_port"],
                "requestPath": "/health",
                "intervalInSeconds": 10,
                "numberOfProbes": 3,
                "gracePeriod": _grace(model, variables),
            },
        },
    }


def _grace(model: MachineModel, variables: Mapping[str, JSON]) -> int:
    """Return the seconds that a first boot may take, including the wait for its turn to join."""
    turn = 0.0
    if model.configuration:
        turn = node_config.parse(model.configuration.encode()).window
    return math.ceil(float(str(variables["node_health_endpoint_grace_seconds"])) + turn)


def _security(image: ImageDefinition) -> dict[str, Any]:
    """Return the security profile that the image was built for; a plain image has none."""
    if not image.secure_boot and not (image.gallery and image.gallery.security_type == "TrustedLaunch"):
        return {}
    firmware = {"secureBootEnabled": image.secure_boot, "vTpmEnabled": True}
    return {"securityProfile": {"securityType": "TrustedLaunch", "uefiSettings": firmware}}


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
