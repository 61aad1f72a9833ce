"""The simulator's scale sets: every shape against the models of Azure's SDK."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.arm.fleet import NEW, Fleet, fleet
from tests.support.arm.machines import Machines
from tests.support.arm.model import Json, Request
from tests.support.arm.shapes import model, unknown_keys

NEW_IMAGE = {"imageReference": {"id": NEW}}


def _get(machines: Fleet, part: str = "") -> Json:
    answer = machines.arm.answer(Request("GET", f"{machines.path}{part}", {"api-version": "x"}))
    assert answer and answer.body
    return answer.body


def test_every_answer_has_only_keys_that_the_service_knows() -> None:
    machines = fleet(4)
    machines.arm.actions = ["*"]  # more than a roll may do
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


@pytest.mark.parametrize(
    ("mode", "kind"), [("Uniform", "VirtualMachineScaleSetVM"), ("Flexible", "VirtualMachine")]
)
def test_machines_to_be_read_have_only_keys_that_the_service_knows(mode: str, kind: str) -> None:
    machines = Machines()
    path = machines.add("gpu", 2, mode=mode)
    for content in (resource.content for resource in machines.arm.resources.values()):
        if content["id"] == path:
            assert unknown_keys(model("VirtualMachineScaleSet"), content) == []
        elif "networkInterfaces" not in content["id"]:
            assert unknown_keys(model(kind), content) == []
