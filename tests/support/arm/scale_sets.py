"""Resource Manager's scale sets in Uniform mode: a model, instances that run some version of it, operations on them.

Behavior that can't be verified without an account is an attribute, so that tests can cover both cases: whether an
upgrade of an instance replaces its disk at once (`upgrade_replaces`), and whether an operation on a busy set preempts
the earlier one or is refused (`preempts`). ``clock`` gives the time; ``seconds`` is how long each operation takes.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.support.arm.model import Answer, Json, Request, Resource, error
from tests.support.arm.service import Arm, Operation

SERVICES = ("AutomaticRepairs", "AutomaticZoneRebalancing")
_KIND = "/providers/Microsoft.Compute/virtualMachineScaleSets/"
_SIZE = "Standard_ND96isr_H100_v5"
# What a PATCH may change, according to the model VirtualMachineScaleSetUpdate.
_CHANGEABLE = {
    "upgradePolicy",
    "automaticRepairsPolicy",
    "virtualMachineProfile",
    "overprovision",
    "singlePlacementGroup",
    "scaleInPolicy",
    "resiliencyPolicy",
}
Verb = Literal["upgrade", "reimage", "restart", "service", "model", "scale"]


@dataclass
class Machine:
    """An instance: ``version`` is the id of the image that Azure intends to run, ``disk`` the one on its OS disk.

    ``generation`` is that of the model that was applied to it.
    """

    id: str
    version: str
    disk: str
    generation: int
    vm_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    boot_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    state: str = "Succeeded"
    code: str = ""
    reimages: int = 0
    restarts: int = 0


@dataclass(kw_only=True)
class Task(Operation):
    """A long-running operation on some instances, or on the whole set (``whole``), that ends at ``due``."""

    group: SetState
    machines: tuple[Machine, ...]
    due: float
    whole: bool
    settle: Callable[[], None]

    def look(self) -> None:
        self.settle()


@dataclass
class SetState:
    """A scale set; ``resource`` holds the model as it is served, with its ETag."""

    resource: Resource
    machines: dict[str, Machine] = field(default_factory=dict)
    generation: int = 1
    services: dict[str, str] = field(default_factory=lambda: dict.fromkeys(SERVICES, "Running"))

    @property
    def content(self) -> Json:
        return self.resource.content

    @property
    def profile(self) -> Json:
        profile: Json = self.content["properties"]["virtualMachineProfile"]
        return profile

    @property
    def image(self) -> str:
        return str(self.profile["storageProfile"]["imageReference"]["id"])

    def touch(self) -> None:
        self.resource.etag += 1
        self.content["etag"] = f'"{self.resource.etag}"'


@dataclass
class ScaleSets:
    """The scale sets of a service. ``reimaged`` is called after an instance got a new OS disk, ``restarted`` after it
    restarted with the same one; ``failures`` has the error codes of the next operations on each instance.
    """

    arm: Arm
    clock: Callable[[], float] = time.monotonic
    seconds: dict[str, float] = field(default_factory=dict)
    page: int = 100
    upgrade_replaces: bool = False
    preempts: bool = True
    reimaged: Callable[[SetState, Machine], None] = lambda _set, _machine: None
    restarted: Callable[[SetState, Machine], None] = lambda _set, _machine: None
    failures: dict[str, list[str]] = field(default_factory=dict)
    sets: dict[str, SetState] = field(default_factory=dict)
    tasks: list[Task] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.arm.providers.append(self.answer)

    def add(self, name: str, image: str, count: int, **properties: Any) -> str:
        """Add a scale set whose instances run its model; return its id."""
        path = f"{self.arm.group}{_KIND}{name}"
        body: Json = {
            "orchestrationMode": "Uniform",
            "singlePlacementGroup": True,
            "provisioningState": "Succeeded",
            "upgradePolicy": {"mode": "Manual"},
            "virtualMachineProfile": {
                "storageProfile": {
                    "imageReference": {"id": image},
                    "osDisk": {"createOption": "FromImage", "caching": "ReadOnly", "diskSizeGB": 64},
                },
                "extensionProfile": {"extensions": []},
            },
            **properties,
        }
        sku = {"name": _SIZE, "tier": "Standard", "capacity": 0}
        self.arm.add(path, sku=sku, tags={}, zones=["1", "2"], properties=body)
        group = self.sets[path.lower()] = SetState(self.arm.resources[path.lower()])
        group.touch()
        self._scale(group, count)
        return path

    # -- what the platform and others do ---------------------------------------------------------------------

    def scale(self, path: str, count: int) -> None:
        """Scale out with new instances of the model, or in, as an autoscaler does: in one operation on the set."""
        group = self.sets[path.lower()]
        self._begin(group, "scale", (), lambda: self._scale(group, count), whole=True)

    def remove(self, path: str, number: str) -> None:
        """Delete an instance; the next new one reuses its id."""
        group = self.sets[path.lower()]
        del group.machines[number]
        group.content["sku"]["capacity"] -= 1

    def repair(self, path: str, number: str) -> bool:
        """Replace an instance with another machine if automatic repairs are on; return whether they are."""
        group = self.sets[path.lower()]
        if group.services["AutomaticRepairs"] != "Running":
            return False
        group.machines[number] = Machine(number, group.image, group.image, group.generation)
        return True

    def _scale(self, group: SetState, count: int) -> None:
        while len(group.machines) > count:
            del group.machines[max(group.machines, key=int)]
        while len(group.machines) < count:
            number = next(str(n) for n in itertools.count() if str(n) not in group.machines)
            group.machines[number] = Machine(number, group.image, group.image, group.generation)
        group.content["sku"]["capacity"] = count
        group.touch()

    # -- answers ---------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """End the operations that are due, in the order of their due times."""
        now = self.clock()
        over = sorted((t for t in self.tasks if t.result is None and t.due <= now), key=lambda task: task.due)
        for task in over:
            task.result = task.finish()

    def answer(self, request: Request) -> Answer | None:
        path, _, rest = request.path.lower().partition(_KIND.lower())
        name, *parts = rest.split("/")
        group = self.sets.get(f"{path}{_KIND}{name}".lower())
        if not name or group is None:
            return None
        self.settle()
        match request.method, parts:
            case "GET", []:
                return Answer(200, group.content, {"ETag": group.content["etag"]})
            case "GET", ["instanceview"]:
                return Answer(200, _view(group))
            case "GET", ["virtualmachines"]:
                return self._list(request, group)
            case "GET", ["virtualmachines", number]:
                machine = group.machines.get(number)
                return Answer(200, _instance(group, machine)) if machine else _missing(request)
            case "PATCH", []:
                return self._patch(request, group)
            case "POST", ["manualupgrade"]:
                return self._upgrade(request, group)
            case "POST", ["reimage"]:
                numbers = (request.body or {}).get("instanceIds") or list(group.machines)
                return self._reimage(request, group, numbers, whole=True)
            case "POST", ["virtualmachines", number, "reimage"]:
                return self._reimage(request, group, [number])
            case "POST", ["virtualmachines", number, "restart"]:
                return self._restart(request, group, number)
            case "POST", ["setorchestrationservicestate"]:
                return self._set_service(request, group)
            case _:
                return error(405, "MethodNotAllowed", f"{request.method} {request.path}")

    def _list(self, request: Request, group: SetState) -> Answer:
        start = int(request.query.get("$skiptoken", "0"))
        machines = list(group.machines.values())
        body: Json = {"value": [_instance(group, m) for m in machines[start : start + self.page]]}
        if start + self.page < len(machines):
            query = "&".join(f"{name}={value}" for name, value in request.query.items() if name[0] != "$")
            body["nextLink"] = f"{self.arm.url}{request.path}?{query}&$skiptoken={start + self.page}"
        return Answer(200, body)

    def _patch(self, request: Request, group: SetState) -> Answer:
        body = request.body or {}
        required = request.headers.get("if-match")
        if required and required != group.content["etag"]:
            return error(412, "PreconditionFailed", "The condition specified was not satisfied.")
        properties = body.get("properties", {})
        if unknown := sorted(set(properties) - _CHANGEABLE) or sorted(
            set(body) - {"properties", "sku", "tags"}
        ):
            return error(400, "PropertyChangeNotAllowed", f"Changing property '{unknown[0]}' is not allowed.")
        storage = properties.get("virtualMachineProfile", {}).get("storageProfile", {})
        image = storage.get("imageReference", {}).get("id")
        if image and (refusal := self._refused_image(group, image)):
            return refusal
        # Setting a property of the OS disk makes all instances outdated, even if its value stays the same.
        if "osDisk" in storage or (image and image.lower() != group.image.lower()):
            group.generation += 1
        if image:
            group.profile["storageProfile"]["imageReference"] = {}
        _merge(group.content["properties"], properties)
        group.content["tags"] = body.get("tags", group.content["tags"])
        group.touch()
        if "capacity" in body.get("sku", {}):
            return self._begin(
                group, "scale", (), lambda: self._scale(group, body["sku"]["capacity"]), whole=True
            )
        if group.content["properties"]["upgradePolicy"]["mode"] != "Manual":
            # The platform updates all instances to the model without being asked.
            for machine in group.machines.values():
                self._apply(group, machine)
                self._replace(group, machine)
        return self._begin(group, "model", (), lambda: None, status=200, body=group.content)

    def _refused_image(self, group: SetState, image: str) -> Answer | None:
        version = self.arm.resources.get(image.lower())
        if version is None:
            return error(404, "GalleryImageNotFound", f"The gallery image {image} is not available.")
        summary = version.content["properties"].get("replicationStatus", {}).get("summary", ())
        regions = [r["region"].replace(" ", "").lower() for r in summary if r["state"] == "Completed"]
        if group.content["location"] not in regions:
            message = f"The gallery image {image} is not available in {group.content['location']} region."
            return error(404, "GalleryImageNotFound", message)
        return None

    def _upgrade(self, request: Request, group: SetState) -> Answer:
        numbers = (request.body or {}).get("instanceIds")
        if not numbers:
            return error(400, "InvalidParameter", "Required parameter 'instanceIds' is missing (null).")
        if numbers == ["*"]:
            numbers = list(group.machines)
        if refusal := self._busy(group, numbers):
            return refusal
        machines = tuple(group.machines[number] for number in numbers)

        def act(machine: Machine) -> None:
            changed = machine.version != group.image
            self._apply(group, machine)
            if changed and self.upgrade_replaces:
                self._replace(group, machine)

        return self._work(group, "upgrade", machines, act, whole=True)

    def _reimage(
        self, request: Request, group: SetState, numbers: list[str], *, whole: bool = False
    ) -> Answer:
        if any(number not in group.machines for number in numbers):
            return _missing(request)
        if refusal := self._busy(group, numbers):
            return refusal
        forced = bool((request.body or {}).get("forceUpdateOSDiskForEphemeral"))
        ephemeral = "diffDiskSettings" in group.profile["storageProfile"]["osDisk"]

        def act(machine: Machine) -> None:
            self._replace(group, machine, stale=ephemeral and not forced)

        machines = tuple(group.machines[number] for number in numbers)
        return self._work(group, "reimage", machines, act, whole=whole)

    def _restart(self, request: Request, group: SetState, number: str) -> Answer:
        if number not in group.machines:
            return _missing(request)
        if refusal := self._busy(group, [number]):
            return refusal

        def act(machine: Machine) -> None:
            machine.boot_id = str(uuid.uuid4())
            machine.restarts += 1
            self.restarted(group, machine)

        return self._work(group, "restart", (group.machines[number],), act, whole=False)

    def _set_service(self, request: Request, group: SetState) -> Answer:
        body = request.body or {}
        is_known = group.services.get(str(body.get("serviceName")), "NotRunning") != "NotRunning"
        if not is_known or body.get("action") not in ("Resume", "Suspend"):
            return error(400, "InvalidParameter", "The value of parameter serviceName or action is invalid.")
        state = {"Resume": "Running", "Suspend": "Suspended"}[body["action"]]

        def finish() -> None:
            group.services[body["serviceName"]] = state

        return self._begin(group, "service", (), finish)

    # -- operations ------------------------------------------------------------------------------------------

    def _busy(self, group: SetState, numbers: list[str]) -> Answer | None:
        """Return the refusal of an operation if one of its instances doesn't exist or is being updated."""
        for number in numbers:
            if number not in group.machines:
                return error(
                    400, "InvalidParameter", f"The provided instanceId {number} is not an active VM."
                )
            if group.machines[number].state == "Updating":
                return error(
                    409, "OperationNotAllowed", f"Another operation on instance {number} is running."
                )
        return None

    def _work(
        self,
        group: SetState,
        verb: Verb,
        machines: tuple[Machine, ...],
        act: Callable[[Machine], None],
        *,
        whole: bool,
    ) -> Answer:
        def finish() -> None:
            for machine in machines:
                codes = self.failures.get(machine.id, [])
                if codes:
                    machine.state, machine.code = "Failed", codes.pop(0)
                else:
                    act(machine)
                    machine.state, machine.code = "Succeeded", ""

        answer = self._begin(group, verb, machines, finish, whole=whole)
        if answer.status < 300:
            for machine in machines:
                machine.state = "Updating"
        return answer

    def _begin(
        self,
        group: SetState,
        verb: Verb,
        machines: tuple[Machine, ...],
        change: Callable[[], None],
        *,
        whole: bool = False,
        status: int = 202,
        body: Json | None = None,
    ) -> Answer:
        if whole:
            for other in self.tasks:
                if other.whole and other.group is group and other.result is None:
                    if not self.preempts:
                        return error(409, "Conflict", "Another operation on the scale set is in progress.")
                    _fail(other, "OperationPreempted", "Operation execution has been preempted.")

        def finish() -> Json:
            change()
            broken = next((machine for machine in machines if machine.code), None)
            if broken:
                return _failed(broken.code, f"VM '{broken.id}' has not reported status.")
            return {"status": "Succeeded"}

        due = self.clock() + self.seconds.get(verb, 0.0)
        task = Task("", finish, 0, group=group, machines=machines, due=due, whole=whole, settle=self.settle)
        name = f"/operations/set-{len(self.tasks) + 1}"
        self.tasks.append(task)
        self.arm.operations[name] = task
        address = f"{self.arm.url}{name}"
        headers = {"Azure-AsyncOperation": address, "Location": f"{address}/result", "Retry-After": "0"}
        return Answer(status, body, headers)

    def _apply(self, group: SetState, machine: Machine) -> None:
        machine.version, machine.generation = group.image, group.generation

    def _replace(self, group: SetState, machine: Machine, *, stale: bool = False) -> None:
        if not stale:
            machine.disk = machine.version
        machine.boot_id = str(uuid.uuid4())
        machine.reimages += 1
        self.reimaged(group, machine)


def _fail(task: Task, code: str, message: str) -> None:
    task.result = _failed(code, message)
    for machine in task.machines:
        machine.state = "Succeeded"


def _failed(code: str, message: str) -> Json:
    return {"status": "Failed", "error": {"code": code, "message": message}}


def _missing(request: Request) -> Answer:
    return error(404, "ResourceNotFound", f"The Resource '{request.path}' was not found.")


def _merge(content: Json, changes: Json) -> None:
    for name, value in changes.items():
        if isinstance(value, dict) and isinstance(content.get(name), dict):
            _merge(content[name], value)
        else:
            content[name] = value


def _view(group: SetState) -> Json:
    return {
        "virtualMachine": {"statusesSummary": [{"code": "ProvisioningState/succeeded", "count": 1}]},
        "orchestrationServices": [
            {"serviceName": name, "serviceState": state} for name, state in group.services.items()
        ],
    }


def _instance(group: SetState, machine: Machine) -> Json:
    state = {"Succeeded": "succeeded", "Updating": "updating", "Failed": f"failed/{machine.code}"}
    name = f"{group.content['name']}_{machine.id}"
    return {
        "id": f"{group.content['id']}/virtualMachines/{machine.id}",
        "name": name,
        "instanceId": machine.id,
        "location": group.content["location"],
        "sku": {"name": _SIZE, "tier": "Standard"},
        "zones": [str(int(machine.id) % 2 + 1)],
        "properties": {
            "vmId": machine.vm_id,
            "latestModelApplied": machine.generation == group.generation,
            "provisioningState": machine.state,
            "storageProfile": {
                "imageReference": {"id": machine.version, "exactVersion": machine.version.rsplit("/", 1)[1]},
                "osDisk": group.profile["storageProfile"]["osDisk"],
            },
            "osProfile": {"computerName": f"{group.content['name']}{int(machine.id):06d}"},
            "instanceView": {
                "statuses": [
                    {"code": f"ProvisioningState/{state.get(machine.state, machine.state.lower())}"},
                    {"code": "PowerState/running"},
                ]
            },
        },
    }
