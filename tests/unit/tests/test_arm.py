"""The simulator of Resource Manager: its states and refusals, and every shape against the models of Azure's SDK.

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
from tests.support.arm.limits import Limits, Policy
from tests.support.arm.model import Answer, Json, Request, error
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


def _replicate(arm: Arm, version: str) -> None:
    """Let time pass until all regions have a version."""
    arm.percent = 100
    _get(arm, version, **{"$expand": "ReplicationStatus"})


# -- states ------------------------------------------------------------------------------------------------------


def test_a_disk_is_ready_when_its_operation_has_ended(arm: Arm, plan: Plan) -> None:
    arm.looks = 3
    call = _calls(plan)["disk"]
    answer = _send(arm, call)
    assert answer.status == 202
    assert _get(arm, call.path).body["properties"]["provisioningState"] == "Updating"  # type: ignore[index]
    _follow(arm, answer)
    assert _get(arm, call.path).body["properties"]["diskState"] == "ReadyToUpload"  # type: ignore[index]


def test_an_upload_without_its_footer_never_becomes_a_disk(arm: Arm, plan: Plan) -> None:
    calls = _calls(plan)
    for step in ("definition", "disk", "access"):
        _follow(arm, _send(arm, calls[step]))
    state = _follow(arm, _send(arm, calls["release"]))
    assert state["error"]["code"] == "InvalidVhd"
    assert _send(arm, calls["version"]).status == 400


@pytest.mark.parametrize("plan", [TRUSTED], indirect=True)
def test_a_disk_is_no_source_where_only_images_are(arm: Arm, plan: Plan) -> None:
    calls, disk = _calls(plan), {"osDiskImage": {"source": {"id": plan.disk}}}
    _published(arm, plan)
    body = calls["version"].body or {}
    body = {**body, "properties": {**body["properties"], "storageProfile": disk}}
    refused = _send(arm, replace(calls["version"], body=body))
    assert refused.status == 400 and refused.body
    assert refused.body["error"]["code"] == "InvalidParameter"
    assert f"'TrustedLaunchSupported' is not supported for the source id '{plan.disk}'" in str(refused.body)


@pytest.mark.parametrize("plan", [TRUSTED], indirect=True)
def test_an_image_needs_a_whole_disk_and_a_version_an_image_that_did_not_fail(arm: Arm, plan: Plan) -> None:
    calls = _calls(plan)
    for step in ("definition", "disk"):
        _follow(arm, _send(arm, calls[step]))
    assert _send(arm, calls["image"]).status == 400
    arm.failing_images = 1
    arm.resources[plan.disk.lower()].content["properties"]["diskState"] = "Unattached"
    answer = _send(arm, calls["image"])
    assert answer.status == 201 and _follow(arm, answer)["status"] == "Failed"
    assert _send(arm, calls["version"]).status == 400


def test_a_version_is_replicated_with_each_look_at_it(arm: Arm, plan: Plan) -> None:
    version = _published(arm, plan)
    states = []
    for _ in range(3):
        properties = _get(arm, version, **{"$expand": "ReplicationStatus"}).body["properties"]  # type: ignore[index]
        states.append((properties["provisioningState"], properties["replicationStatus"]["aggregatedState"]))
    assert states == [("Creating", "InProgress"), ("Succeeded", "Completed"), ("Succeeded", "Completed")]
    assert "replicationStatus" not in _get(arm, version).body["properties"]  # type: ignore[index]


def test_a_version_is_protected_until_its_end_of_life(arm: Arm, plan: Plan) -> None:
    version = _published(arm, plan)
    deletion = Call("clean", "DELETE", version, "2024-03-03")
    assert _send(arm, deletion).status == 409
    _replicate(arm, version)
    profile = {"publishingProfile": {"endOfLifeDate": "2026-01-01T00:00:00Z"}}
    _send(arm, Call("version", "PATCH", version, "2024-03-03", {"properties": profile}))
    assert _send(arm, deletion).status == 202


def test_what_was_just_made_is_hidden_for_some_reads(arm: Arm, plan: Plan) -> None:
    arm.lag = 2
    call = _calls(plan)["disk"]
    _send(arm, call)
    assert [_get(arm, call.path).status for _ in range(3)] == [404, 404, 200]


def test_a_change_of_a_version_that_is_replicated_or_under_a_condition_that_no_longer_holds_is_refused(
    arm: Arm, plan: Plan
) -> None:
    version = _published(arm, plan)
    etag = _get(arm, version).headers["ETag"]
    body = {"tags": {"a": "b"}}

    def patch() -> Answer | None:
        return arm.answer(Request("PATCH", version, {"api-version": "x"}, body, {"if-match": etag}))

    early = patch()
    _replicate(arm, version)
    first, second = patch(), patch()
    assert early and first and second and (early.status, first.status, second.status) == (409, 200, 412)


@pytest.mark.parametrize(
    ("version", "status"), [("2026.105.0", 400), ("1.2", 400), ("01.2.3", 400), ("a.b.c", 400)]
)
def test_a_version_needs_three_integers_and_a_disk(arm: Arm, plan: Plan, version: str, status: int) -> None:
    calls = _calls(plan)
    _follow(arm, _send(arm, calls["definition"]))
    path = calls["version"].path.replace("2026.1125.0", version)
    assert _send(arm, Call("version", "PUT", path, "x", calls["version"].body)).status == status


def test_everything_but_the_rights_that_one_has_is_forbidden(arm: Arm, plan: Plan) -> None:
    arm.actions = ["Microsoft.Compute/disks/write"]
    calls = _calls(plan)
    assert _send(arm, calls["disk"]).status == 202
    refused = _send(arm, calls["access"])
    assert refused.status == 403
    assert "Microsoft.Compute/disks/beginGetAccess/action" in str(refused.body)


def test_faults_come_before_the_truth_and_a_lost_answer_after_it(arm: Arm, plan: Plan) -> None:
    call = _calls(plan)["disk"]
    request = Request(call.method, call.path, {"api-version": call.api}, dict(call.body or {}))
    arm.faults = [lambda _: error(500, "InternalServerError", "later")]
    refused = arm.answer(request)
    assert refused and refused.body == error(500, "InternalServerError", "later").body
    arm.faults = [lambda _: "drop"]
    assert arm.answer(request) is None
    assert call.path.lower() not in arm.resources
    arm.faults = [lambda r: "lose" if r.method == "PUT" else None]
    assert arm.answer(request) is None
    assert _get(arm, call.path).status == 200
    assert [entry.status for entry in arm.log] == [500, 0, 202]


# -- shapes ------------------------------------------------------------------------------------------------------


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


# -- limits ------------------------------------------------------------------------------------------------------


def test_an_empty_bucket_refuses_until_it_is_refilled_and_counts_who_comes_early(arm: Arm) -> None:
    now = 0.0
    arm.limits = Limits({**Limits().policies, "reads": Policy(2, 30)}, clock=lambda: now)
    statuses = [_get(arm, _target().gallery).status for _ in range(3)]
    assert statuses == [200, 200, 429]
    refused = _get(arm, _target().gallery)
    assert refused.headers["Retry-After"] == "2" and (arm.limits.refused, arm.limits.early) == (2, 1)
    now = 2.0
    answer = _get(arm, _target().gallery)
    assert (answer.status, answer.headers["x-ms-ratelimit-remaining-subscription-reads"]) == (200, "0")
    assert arm.limits.shares() == {("reads", ""): 3 / 30}


def test_a_scale_set_has_buckets_of_its_own_beside_those_of_its_subscription(arm: Arm) -> None:
    sets = [f"{arm.group}/providers/Microsoft.Compute/virtualMachineScaleSets/{name}" for name in "ab"]
    for path in sets:
        for _ in range(36):
            _get(arm, path)
    assert [_get(arm, path).status for path in sets] == [429, 429]
    instances = _get(arm, f"{sets[0]}/virtualMachines")
    assert instances.headers["x-ms-ratelimit-remaining-resource"] == (
        "Microsoft.Compute/Instances;29,Microsoft.Compute/AllInstances;1079"
    )
