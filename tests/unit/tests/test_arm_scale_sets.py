"""The simulator's scale sets: their states and refusals, and every shape against the models of Azure's SDK."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.arm.fleet import NEW, OLD, Fleet, fleet
from tests.support.arm.model import Answer, Json, Request
from tests.support.arm.service import Arm
from tests.support.arm.shapes import model, unknown_keys

NEW_IMAGE = {"imageReference": {"id": NEW}}


class Clock:
    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def machines(clock: Clock) -> Fleet:
    machines = fleet(4, clock=clock, seconds={"upgrade": 10.0, "reimage": 100.0, "restart": 20.0})
    machines.arm.actions = ["*"]  # more than a roll may do
    return machines


def _send(arm: Arm, method: str, path: str, body: Json | None = None, **headers: str) -> Answer:
    answer = arm.answer(Request(method, path, {"api-version": "x"}, body, headers))
    assert answer is not None
    return answer


def _patch(machines: Fleet, storage: Json, **headers: str) -> Answer:
    body = {"properties": {"virtualMachineProfile": {"storageProfile": storage}}}
    return _send(machines.arm, "PATCH", machines.path, body, **headers)


def _post(machines: Fleet, verb: str, body: Json | None = None) -> Answer:
    return _send(machines.arm, "POST", f"{machines.path}/{verb}", body)


def _get(machines: Fleet, part: str = "") -> Json:
    body = _send(machines.arm, "GET", f"{machines.path}{part}").body
    assert body
    return body


def _state(machines: Fleet, answer: Answer) -> Json:
    address = answer.headers["Azure-AsyncOperation"].removeprefix(machines.arm.url)
    return _send(machines.arm, "GET", address).body or {}


def _disks(machines: Fleet) -> list[str]:
    return [machine.disk for machine in machines.group.machines.values()]


def test_a_changed_model_outdates_instances_and_changes_none(machines: Fleet) -> None:
    assert _patch(machines, NEW_IMAGE).status == 200
    instance = _get(machines, "/virtualMachines/1")["properties"]
    assert instance["latestModelApplied"] is False
    assert instance["storageProfile"]["imageReference"]["exactVersion"] == "1.7.0"
    assert set(_disks(machines)) == {OLD}


def test_any_property_of_the_os_disk_outdates_instances(machines: Fleet) -> None:
    _patch(machines, {"osDisk": {"caching": "ReadOnly"}})
    assert _get(machines, "/virtualMachines/1")["properties"]["latestModelApplied"] is False


@pytest.mark.parametrize("mode", ["Automatic", "Rolling"])
def test_with_another_policy_a_changed_model_replaces_every_disk(machines: Fleet, mode: str) -> None:
    machines.group.content["properties"]["upgradePolicy"]["mode"] = mode
    _patch(machines, NEW_IMAGE)
    assert set(_disks(machines)) == {NEW}


def test_a_change_under_another_etag_is_refused(machines: Fleet) -> None:
    etag = _get(machines)["etag"]
    headers = {"if-match": etag}
    assert [_patch(machines, NEW_IMAGE, **headers).status for _ in range(2)] == [200, 412]
    assert _get(machines)["etag"] != etag


@pytest.mark.parametrize(
    "body", [{"location": "eastus"}, {"properties": {"orchestrationMode": "Flexible"}}, {"zones": ["3"]}]
)
def test_what_a_patch_may_not_change_is_refused(machines: Fleet, body: Json) -> None:
    before = machines.group.resource.etag
    assert _send(machines.arm, "PATCH", machines.path, body).status == 400
    assert machines.group.resource.etag == before


def test_a_model_cannot_name_what_is_not_there(machines: Fleet) -> None:
    assert _patch(machines, {"imageReference": {"id": f"{NEW}9"}}).status == 404
    machines.arm.resources[NEW.lower()].content["properties"]["replicationStatus"]["summary"] = []
    assert _patch(machines, NEW_IMAGE).status == 404


@pytest.mark.parametrize("replaces", [False, True])
def test_an_upgrade_is_of_the_instances_that_it_names(machines: Fleet, clock: Clock, replaces: bool) -> None:
    machines.scale_sets.upgrade_replaces = replaces
    _patch(machines, NEW_IMAGE)
    answer = _post(machines, "manualupgrade", {"instanceIds": ["1", "3"]})
    assert _get(machines, "/virtualMachines/1")["properties"]["provisioningState"] == "Updating"
    assert _state(machines, answer) == {"status": "InProgress"}
    clock.at = 10.0
    assert _state(machines, answer) == {"status": "Succeeded"}
    versions = [machine.version for machine in machines.group.machines.values()]
    assert versions == [OLD, NEW, OLD, NEW]
    assert _disks(machines) == (versions if replaces else [OLD] * 4)


def test_a_reimage_brings_what_the_instance_has_and_its_node_a_new_boot(
    machines: Fleet, clock: Clock
) -> None:
    seen = []
    machines.scale_sets.reimaged = lambda _, machine: seen.append(machine.id)
    boot = machines.machine("1").boot_id
    _patch(machines, NEW_IMAGE)
    _post(machines, "virtualMachines/1/reimage")
    clock.at = 100.0
    assert _get(machines, "/virtualMachines/1")["properties"]["provisioningState"] == "Succeeded"
    assert (seen, machines.machine("1").boot_id != boot, set(_disks(machines))) == (["1"], True, {OLD})


def test_a_restart_leaves_the_disk_and_brings_a_new_boot(machines: Fleet, clock: Clock) -> None:
    seen = []
    machines.scale_sets.restarted = lambda _, machine: seen.append(machine.id)
    boot = machines.machine("1").boot_id
    answer = _post(machines, "virtualMachines/1/restart")
    assert _post(machines, "virtualMachines/1/restart").status == 409
    assert _post(machines, "virtualMachines/9/restart").status == 404
    clock.at = 100.0
    assert _state(machines, answer) == {"status": "Succeeded"}
    assert (seen, machines.machine("1").boot_id != boot, set(_disks(machines))) == (["1"], True, {OLD})


def test_no_ids_means_all_of_them(machines: Fleet, clock: Clock) -> None:
    assert _post(machines, "manualupgrade", {"instanceIds": []}).status == 400
    _post(machines, "manualupgrade", {"instanceIds": ["*"]})
    clock.at = 10.0
    _post(machines, "reimage")
    clock.at = 200.0
    _get(machines)
    assert [machine.reimages for machine in machines.group.machines.values()] == [1] * 4


def test_an_instance_in_work_takes_nothing_else(machines: Fleet) -> None:
    _post(machines, "virtualMachines/1/reimage")
    assert _post(machines, "virtualMachines/1/reimage").status == 409
    assert _post(machines, "manualupgrade", {"instanceIds": ["1"]}).status == 409
    assert _post(machines, "manualupgrade", {"instanceIds": ["9"]}).status == 400
    assert _post(machines, "virtualMachines/9/reimage").status == 404


@pytest.mark.parametrize("preempts", [True, False])
def test_an_operation_on_the_set_preempts_another_or_is_refused(machines: Fleet, preempts: bool) -> None:
    machines.scale_sets.preempts = preempts
    first = _post(machines, "manualupgrade", {"instanceIds": ["1"]})
    second = _post(machines, "manualupgrade", {"instanceIds": ["2"]})
    if preempts:
        assert _state(machines, first)["error"]["code"] == "OperationPreempted"
        assert machines.machine("1").state == "Succeeded"
    else:
        assert (second.status, machines.machine("2").state) == (409, "Succeeded")


def test_a_failure_is_told_by_operation_and_instance(machines: Fleet, clock: Clock) -> None:
    machines.scale_sets.failures["1"] = ["AllocationFailed"]
    answer = _post(machines, "virtualMachines/1/reimage")
    clock.at = 100.0
    assert _state(machines, answer)["error"]["code"] == "AllocationFailed"
    codes = [
        s["code"] for s in _get(machines, "/virtualMachines/1")["properties"]["instanceView"]["statuses"]
    ]
    assert "ProvisioningState/failed/AllocationFailed" in codes


def test_ids_come_back_with_other_machines(machines: Fleet) -> None:
    before = machines.machine("1").vm_id
    machines.scale_sets.remove(machines.path, "1")
    assert _get(machines)["sku"]["capacity"] == 3
    machines.scale_sets.scale(machines.path, 4)
    assert _get(machines)["sku"]["capacity"] == 4
    assert machines.machine("1").vm_id != before
    machines.scale_sets.scale(machines.path, 2)
    _get(machines)
    assert sorted(machines.group.machines) == ["0", "1"]


def test_what_is_created_has_the_models_image(machines: Fleet) -> None:
    _patch(machines, NEW_IMAGE)
    _send(machines.arm, "PATCH", machines.path, {"sku": {"capacity": 5}})
    _get(machines)
    assert _disks(machines) == [OLD] * 4 + [NEW]


def test_rights_are_those_that_azure_names(machines: Fleet) -> None:
    machines.arm.actions = []
    provider = "Microsoft.Compute/virtualMachineScaleSets"
    for answer, action in [
        (_patch(machines, NEW_IMAGE), f"{provider}/write"),
        (_post(machines, "manualupgrade"), f"{provider}/manualupgrade/action"),
        (_post(machines, "virtualMachines/1/reimage"), f"{provider}/virtualMachines/reimage/action"),
        (_post(machines, "setOrchestrationServiceState"), f"{provider}/setOrchestrationServiceState/action"),
    ]:
        assert answer.status == 403 and action in str(answer.body)


# -- shapes ------------------------------------------------------------------------------------------------------


def test_every_answer_has_only_keys_that_the_service_knows(machines: Fleet) -> None:
    answers: dict[str, Any] = {
        "VirtualMachineScaleSet": _get(machines),
        "VirtualMachineScaleSetInstanceView": _get(machines, "/instanceView"),
        "VirtualMachineScaleSetVM": _get(machines, "/virtualMachines")["value"][0],
    }
    for name, answer in answers.items():
        assert unknown_keys(model(name), answer) == [], name
        # What the SDK reads is what was served.
        assert model(name)(answer).as_dict() == answer


def test_every_request_has_only_keys_that_the_service_knows() -> None:
    bodies: dict[str, Json] = {
        "VirtualMachineScaleSetUpdate": {
            "tags": {"a": "b"},
            "properties": {"virtualMachineProfile": {"storageProfile": NEW_IMAGE}},
        },
        "VirtualMachineScaleSetVMInstanceRequiredIDs": {"instanceIds": ["1"]},
        "VirtualMachineScaleSetVMReimageParameters": {"forceUpdateOSDiskForEphemeral": True},
        "OrchestrationServiceStateInput": {"serviceName": "AutomaticRepairs", "action": "Suspend"},
    }
    for name, body in bodies.items():
        assert unknown_keys(model(name), body) == [], name
