"""The simulator of Resource Manager: every shape against the models of Azure's SDK.

The SDK's models are generated from azure-rest-api-specs: a key that they lack doesn't exist in the service either.
"""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from image_builder.definition.model import ImageGallery
from image_builder.gallery import artefact
from image_builder.gallery.plan import Call, Plan, Target, definition_properties, make_plan
from tests.support.arm.model import Answer, Json, Request
from tests.support.arm.place import MIB, SETTINGS, TRUSTED, write_build
from tests.support.arm.service import Arm
from tests.support.arm.shapes import model, unknown_keys

COOKIE = b"conectix".ljust(512, b"\0")


class Memory:
    """Disks whose last 512 bytes are all that matters."""

    def __init__(self) -> None:
        self.footers: dict[str, bytes] = {}

    def create(self, name: str, size: int) -> None:  # noqa: ARG002
        self.footers[name] = bytes(512)

    def sas(self, name: str, seconds: int) -> str:  # noqa: ARG002
        return f"https://md-impexp/{name}?sig=x"

    def footer(self, name: str) -> bytes:
        return self.footers[name]

    def delete(self, name: str) -> None:
        del self.footers[name]


@pytest.fixture
def arm() -> Arm:
    service = Arm(Memory(), url="https://arm")
    service.add(_target().gallery)
    return service


def _target(**changes: str) -> Target:
    return Target(ImageGallery.model_validate_json(json.dumps(SETTINGS | changes)))


@pytest.fixture(params=["Standard", TRUSTED])
def plan(tmp_path: Path, request: pytest.FixtureRequest) -> Plan:
    """Plan to publish a version that is made of a disk, or of a managed image."""
    build = write_build(tmp_path, size=20 * MIB, data=MIB).build_id[:12]
    built = artefact.read(tmp_path / "worker" / build, tmp_path / "boot" / build, unverified=False)
    built = replace(built, certificate="QUJD")
    now = datetime.now(UTC)
    target = _target(security_type=request.param)
    return make_plan(target, built, "2026.1125.0", [(0, MIB)], now=now, creates_definition=True)


def _calls(plan: Plan) -> dict[str, Call]:
    return {step.step: step for step in plan.steps if isinstance(step, Call)}


def _send(arm: Arm, call: Call) -> Answer:
    answer = arm.answer(Request(call.method, call.path, {"api-version": call.api}, dict(call.body or {})))
    assert answer is not None
    return answer


def _follow(arm: Arm, answer: Answer) -> Json:
    """Poll an operation until it has ended, and return its state."""
    path = answer.headers["Azure-AsyncOperation"].removeprefix(arm.url).partition("?")[0]
    while (look := arm.answer(Request("GET", path))) and look.body == {"status": "InProgress"}:
        pass
    assert look and look.body
    return look.body


def _get(arm: Arm, path: str, **query: str) -> Answer:
    answer = arm.answer(Request("GET", path, {"api-version": "x", **query}))
    assert answer is not None
    return answer


def _published(arm: Arm, plan: Plan) -> str:
    """Send a whole plan, writing the footer's page by hand, and return the version's id."""
    calls = _calls(plan)
    for step in ("definition", "disk", "access"):
        _follow(arm, _send(arm, calls[step]))
    memory = arm.disks
    assert isinstance(memory, Memory)
    memory.footers = dict.fromkeys(memory.footers, COOKIE)
    for step in ("release", "image", "version"):
        if step not in calls:
            continue
        assert _follow(arm, _send(arm, calls[step])) == {"status": "Succeeded"}
    return calls["version"].path


def test_unknown_keys_are_seen_at_any_depth() -> None:
    body = {"properties": {"publishingProfile": {"targetRegions": [{"nam": "westus3"}]}}, "tag": {}}
    assert unknown_keys(model("GalleryImageVersion"), body) == [
        "properties.publishingProfile.targetRegions.nam",
        "tag",
    ]


def test_every_request_has_only_keys_that_the_service_knows(plan: Plan) -> None:
    kinds = {
        "definition": "GalleryImage",
        "disk": "Disk",
        "access": "GrantAccessData",
        "image": "Image",
        "version": "GalleryImageVersion",
    }
    calls = _calls(plan)
    for step in kinds.keys() & calls.keys():
        assert unknown_keys(model(kinds[step]), calls[step].body or {}) == [], step


def test_every_answer_has_only_keys_that_the_service_knows(arm: Arm, plan: Plan) -> None:
    version = _published(arm, plan)
    calls = _calls(plan)
    answers = {
        "Gallery": _get(arm, _target().gallery),
        "GalleryImage": _get(arm, calls["definition"].path),
        "Disk": _get(arm, calls["disk"].path),
        "GalleryImageVersion": _get(arm, version, **{"$expand": "ReplicationStatus"}),
        **({"Image": _get(arm, calls["image"].path)} if "image" in calls else {}),
    }
    for name, answer in answers.items():
        assert answer.body and unknown_keys(model(name), answer.body) == [], name


def test_counters_of_a_region_are_of_the_services_shape(arm: Arm, plan: Plan) -> None:
    _published(arm, plan)
    path = f"/subscriptions/{SETTINGS['subscription']}/providers/Microsoft.Compute/locations/westus3/usages"
    usages = (_get(arm, path).body or {})["value"]
    assert [unknown_keys(model("Usage"), usage) for usage in usages] == [[]] * 4
    assert {usage["name"]["value"]: usage["currentValue"] for usage in usages} == {
        "StandardDiskCount": 1,
        "Gallery": 1,
        "GalleryImage": 1,
        "GalleryImageVersion": 1,
    }


def test_an_address_is_granted_in_the_services_shape(arm: Arm, plan: Plan) -> None:
    calls = _calls(plan)
    _follow(arm, _send(arm, calls["disk"]))
    granted = _follow(arm, _send(arm, calls["access"]))["properties"]["output"]
    assert granted and unknown_keys(model("AccessUri"), granted) == []


def test_the_definition_of_the_plan_is_the_one_that_is_compared(plan: Plan) -> None:
    body = _calls(plan)["definition"].body or {}
    assert body["properties"] == definition_properties(plan.target, plan.artefact)
