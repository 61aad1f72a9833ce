"""Scale sets to be read: in Uniform and in Flexible mode, with instance views and network interfaces.

They follow the REST reference (Microsoft.Compute 2024-11-01 and later: `Virtual Machine Scale Sets - Get`,
`Virtual Machine Scale Set VMs - List`, `Virtual Machines - List`; Microsoft.Network: `Network Interfaces - List` and
`- List Virtual Machine Scale Set Network Interfaces`), shortened, with made-up ids. They aren't recordings.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.support.arm.fleet import NoDisks
from tests.support.arm.limits import Limits
from tests.support.arm.model import SUBSCRIPTION, Answer, Json, Request, error
from tests.support.arm.service import Arm

GROUP = f"/subscriptions/{SUBSCRIPTION}/resourceGroups/Pools-West"
SETS = f"{GROUP}/providers/Microsoft.Compute/virtualMachineScaleSets"
GALLERY = f"{GROUP}/providers/Microsoft.Compute/galleries/nodes/images"
_IMAGE = f"{GALLERY}/worker_h100/versions/1.4.2"
_SIZE = "Standard_ND96isr_H100_v5"


def _service() -> Arm:
    arm = Arm(NoDisks(), group=GROUP, page=3, limits=Limits(clock=lambda: 0.0))
    arm.providers.append(_require_views)
    return arm


@dataclass
class Machines:
    """The service, whose lists are answered three items at a time; its limits are never refilled."""

    arm: Arm = field(default_factory=_service)
    _networks: Iterator[int] = field(default_factory=itertools.count)

    def add(self, name: str, count: int, *, capacity: int | None = None, mode: str = "Uniform") -> str:
        """Add a scale set with ``count`` instances, each with a network interface; return its id."""
        path, network = f"{SETS}/{name}", next(self._networks)
        self.arm.add(path, **_model(count if capacity is None else capacity, mode))
        for number in range(count):
            if mode == "Uniform":
                machine = _instance(path, number)
                at, of = f"{path}/virtualMachines/{number}", f"{path}/networkInterfaces/{number}"
            else:
                machine = _machine(path, number)
                at = machine["id"]
                of = f"{GROUP}/providers/Microsoft.Network/networkInterfaces/{machine['name']}"
            self.arm.add(at, **machine)
            address = f"10.{network}.{number // 250}.{number % 250 + 4}"
            self.arm.add(of, **_interface(machine["id"], address))
        return path

    def machine(self, path: str, number: int) -> Json:
        return self.arm.resources[f"{path}/virtualMachines/{number}".lower()].content

    def interface(self, path: str, number: int) -> Json:
        return self.arm.resources[f"{path}/networkInterfaces/{number}".lower()].content


def number_of(name: str) -> int:
    """Return the number that the VM ids of a scale set's instances have in common."""
    return zlib.crc32(name.encode()) % 0x10000


def _require_views(request: Request) -> Answer | None:
    """Refuse a list of instances without their views, of which nothing could be told."""
    is_list = request.path.lower().endswith("/virtualmachines")
    if is_list and request.query.get("$expand") != "instanceView":
        return error(400, "BadRequest", "only instances with their views are served")
    return None


def _model(capacity: int, mode: str) -> Json:
    return {
        "tags": {"image-builder-build": "3f9c2a71d0b4"},
        "zones": ["1", "2"],
        "sku": {"name": _SIZE, "capacity": capacity},
        "properties": {
            "orchestrationMode": mode,
            "singlePlacementGroup": True,
            "provisioningState": "Succeeded",
            "virtualMachineProfile": {"storageProfile": {"imageReference": {"id": _IMAGE}}},
        },
    }


def _instance(path: str, number: int) -> Json:
    """Return an instance in Uniform mode, with its instance view."""
    name = path.rpartition("/")[2]
    return {
        "name": f"{name}_{number}",
        # The service doesn't keep the case of names in a resource's id.
        "id": f"{path}/virtualMachines/{number}".replace("Pools-West", "POOLS-WEST"),
        "type": "Microsoft.Compute/virtualMachineScaleSets/virtualMachines",
        "instanceId": str(number),
        "sku": {"name": _SIZE, "tier": "Standard"},
        "zones": [str(number % 2 + 1)],
        "properties": {
            "latestModelApplied": number != 1,
            "vmId": f"02AAB8A4-74EF-476E-8182-{number_of(name):04X}{number:08X}",
            "provisioningState": "Succeeded",
            "storageProfile": {"imageReference": {"id": _IMAGE, "exactVersion": "1.4.2"}},
            "osProfile": {"computerName": f"{name}{number:06d}".upper(), "adminUsername": "operator"},
            "instanceView": {
                "platformUpdateDomain": 0,
                "platformFaultDomain": number % 5,
                "statuses": [
                    {"code": "ProvisioningState/succeeded", "level": "Info"},
                    {"code": "PowerState/running", "level": "Info", "displayStatus": "VM running"},
                ],
            },
        },
    }


def _machine(path: str, number: int) -> Json:
    """Return a machine of a scale set in Flexible mode."""
    machine = _instance(path, number)
    properties = machine["properties"]
    properties["hardwareProfile"] = {"vmSize": machine.pop("sku")["name"]}
    properties["virtualMachineScaleSet"] = {"id": path}
    del properties["latestModelApplied"], machine["instanceId"]
    id_ = f"{GROUP}/providers/Microsoft.Compute/virtualMachines/{machine['name']}"
    return machine | {"id": id_, "type": "Microsoft.Compute/virtualMachines"}


def _interface(owner: str, address: str) -> Json:
    """Return the network interface of an instance. Its first address is for pods."""
    return {
        "name": "eth0",
        "id": f"{owner}/networkInterfaces/eth0",
        "type": "Microsoft.Network/networkInterfaces",
        "properties": {
            "primary": True,
            "virtualMachine": {"id": owner.lower()},
            "ipConfigurations": [
                {"name": "pod", "properties": {"privateIPAddress": f"10.99{address[4:]}", "primary": False}},
                {"name": "node", "properties": {"privateIPAddress": address, "primary": True}},
            ],
        },
    }
