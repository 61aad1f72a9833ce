"""Reads of a scale set, and requests to it: under If-Match, for named instances, never blindly twice."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal

import pytest

from image_builder.errors import PoolError
from image_builder.pool.scale_set.client import HOLD_TAG, Client
from image_builder.pool.scale_set.model import Instance
from tests.support.arm.direct import Direct
from tests.support.arm.fleet import DEFINITION, NEW, OLD, Fleet, fleet
from tests.support.arm.model import Answer, Fault, Request, error

IMAGE_PATCH = {"properties": {"virtualMachineProfile": {"storageProfile": {"imageReference": {"id": NEW}}}}}


@pytest.fixture
def machines() -> Fleet:
    return fleet(5, page=2)


@pytest.fixture
def client(machines: Fleet) -> Client:
    return Client(Direct(machines.arm), lambda _seconds: None, lambda: 1.8e9)


def _before(act: Callable[[], None], method: str = "PATCH", count: int = 1) -> Fault:
    """Return a fault that calls ``act`` right before each of the first requests of a kind."""
    numbers = itertools.count()

    def fault(request: Request) -> None:
        if request.method == method and next(numbers) < count:
            act()

    return fault


def _first(method: str, effect: Answer | Literal["drop", "lose"], count: int = 1) -> Fault:
    numbers = itertools.count()
    return lambda request: effect if request.method == method and next(numbers) < count else None


def _patches(machines: Fleet) -> list[tuple[Any, int]]:
    return [(entry.body, entry.status) for entry in machines.arm.log if entry.method == "PATCH"]


def test_all_pages_of_instances_are_read(client: Client, machines: Fleet) -> None:
    instances = client.instances(machines.path)
    assert [instance.id for instance in instances] == ["0", "1", "2", "3", "4"]
    machine = machines.machine("3")
    assert instances[3] == Instance("3", machine.vm_id, OLD, "Succeeded", has_latest_model=True)
    assert client.instance(machines.path, "9") is None


def test_a_scale_set_that_is_not_there_is_an_error(client: Client, machines: Fleet) -> None:
    with pytest.raises(PoolError, match="there is no scale set"):
        client.scale_set(f"{machines.path}-2")


def test_the_image_alone_is_changed_and_no_instance_with_it(client: Client, machines: Fleet) -> None:
    before = client.scale_set(machines.path)
    after = client.set_image(before, NEW)
    assert (after.image, after.etag != before.etag) == (NEW, True)
    assert _patches(machines) == [(IMAGE_PATCH, 200)]
    assert {instance.image for instance in client.instances(machines.path)} == {OLD}
    assert not any(instance.has_latest_model for instance in client.instances(machines.path))
    # Setting it again sends nothing.
    assert client.set_image(before, NEW) == after
    assert len(_patches(machines)) == 1


@pytest.mark.parametrize("effect", ["lose", "drop", error(500, "InternalServerError", "later")])
def test_a_lost_answer_to_a_patch_is_read_from_the_model(
    client: Client, machines: Fleet, effect: Literal["lose", "drop"] | Answer
) -> None:
    machines.arm.faults = [_first("PATCH", effect)]
    assert client.set_image(client.scale_set(machines.path), NEW).image == NEW
    assert [status for _, status in _patches(machines)].count(200) == 1


def test_another_field_that_somebody_changed_meanwhile_is_kept(client: Client, machines: Fleet) -> None:
    def tag() -> None:
        machines.group.content["tags"]["owner"] = "somebody"
        machines.group.touch()

    machines.arm.faults = [_before(tag)]
    after = client.set_image(client.scale_set(machines.path), NEW)
    assert (after.image, after.tags) == (NEW, {"owner": "somebody"})
    assert [status for _, status in _patches(machines)] == [412, 200]


@pytest.mark.parametrize(("times", "ends"), [(20, True), (10**6, False)])
def test_others_that_write_to_it_all_the_time_are_no_failed_attempts(
    client: Client, machines: Fleet, times: int, *, ends: bool
) -> None:
    numbers = itertools.count()

    def churn(request: Request) -> None:
        if request.method == "PATCH" and next(numbers) < times:
            machines.group.content["tags"]["owner"] = f"provider-{request}"[:20]
            machines.group.touch()

    before = client.scale_set(machines.path)
    machines.arm.faults = [churn]
    with nullcontext() if ends else pytest.raises(PoolError):
        client.set_image(before, NEW)
    statuses = [status for _, status in _patches(machines)]
    assert statuses == [412] * 20 + [200] if ends else set(statuses) == {412} and len(statuses) < 100


def test_an_image_or_a_mode_that_somebody_changed_meanwhile_stops(client: Client, machines: Fleet) -> None:
    other = f"{DEFINITION}/versions/1.9.0"

    def image() -> None:
        machines.group.profile["storageProfile"]["imageReference"] = {"id": other}
        machines.group.touch()

    before = client.scale_set(machines.path)
    machines.arm.faults = [_before(image)]
    with pytest.raises(PoolError, match=r"was changed by another: its model names .*1\.9\.0"):
        client.set_image(before, NEW)
    machines.group.content["properties"]["upgradePolicy"]["mode"] = "Automatic"
    with pytest.raises(PoolError, match="is left alone"):
        client.set_image(client.scale_set(machines.path), NEW)
    assert [status for _, status in _patches(machines)] == [412]
    assert all(machine.reimages == 0 for machine in machines.group.machines.values())


def test_nothing_is_changed_without_an_etag(client: Client, machines: Fleet) -> None:
    machines.group.content["etag"] = ""
    before = client.scale_set(machines.path)
    with pytest.raises(PoolError, match="has no ETag"):
        client.set_image(before, NEW)
    assert _patches(machines) == []


def test_conflicts_are_waited_for_and_end(client: Client, machines: Fleet) -> None:
    before = client.scale_set(machines.path)
    machines.arm.faults = [_first("PATCH", error(409, "OperationPreempted", "by the autoscaler"), 3)]
    assert client.set_image(before, NEW).image == NEW
    # The last try counts, too.
    machines.arm.faults = [_first("PATCH", error(409, "OperationPreempted", "by the autoscaler"), 5)]
    assert client.set_image(client.scale_set(machines.path), OLD, force_ephemeral=True).image == OLD
    machines.arm.faults = [_first("PATCH", error(409, "Conflict", "busy"), 99)]
    with pytest.raises(PoolError, match="was not changed: .*Conflict"):
        client.hold(machines.path, "run-1", 1.8e9 + 60)


def test_a_missing_right_is_told_at_once(client: Client, machines: Fleet) -> None:
    machines.arm.actions = ["Microsoft.Compute/virtualMachineScaleSets/read"]
    with pytest.raises(PoolError, match="AuthorizationFailed"):
        client.set_image(client.scale_set(machines.path), NEW)
    assert [status for _, status in _patches(machines)] == [403]


@pytest.mark.parametrize("numbers", [[], ["*"], ["1", ""], ["1;2"], ["٣"], ["-1"], ["0x1"]])
def test_no_request_is_for_all_instances(client: Client, machines: Fleet, numbers: list[str]) -> None:
    with pytest.raises(ValueError, match="instance"):
        client.upgrade(machines.path, numbers)
    for number in numbers or [""]:
        if number != "1":
            with pytest.raises(ValueError, match="number of an instance"):
                client.reimage(machines.path, number)
    assert machines.arm.log == []


def test_what_replaces_a_disk_is_sent_once(client: Client, machines: Fleet) -> None:
    machines.arm.faults = [_first("POST", error(503, "ServiceUnavailable", "later"), 9)]
    assert client.upgrade(machines.path, ["1", "2"]).status == 503
    assert client.reimage(machines.path, "1").status == 503
    machines.arm.faults = [_first("POST", "lose", 9)]
    assert client.reimage(machines.path, "1").status == 0
    assert len(machines.arm.log) == 3


def test_a_forced_reimage_brings_an_ephemeral_disk_to_the_new_version(
    client: Client, machines: Fleet
) -> None:
    machines.group.profile["storageProfile"]["osDisk"]["diffDiskSettings"] = {"option": "Local"}
    client.set_image(client.scale_set(machines.path), NEW, force_ephemeral=True)
    disks = []
    for force_ephemeral in (False, True):
        client.operation(client.upgrade(machines.path, ["1"]).operation)
        client.operation(client.reimage(machines.path, "1", force_ephemeral=force_ephemeral).operation)
        disks.append(machines.machine("1").disk)
    assert disks == [OLD, NEW]


@pytest.mark.parametrize("effect", ["lose", "drop", error(429, "TooManyRequests", "wait", Retry_After="9")])
def test_a_service_is_suspended_whatever_answer_is_lost(
    client: Client, machines: Fleet, effect: Literal["lose", "drop"] | Answer
) -> None:
    machines.arm.faults = [_first("POST", effect)]
    client.set_services(machines.path, ["AutomaticRepairs"], "Suspend")
    assert client.services(machines.path)["AutomaticRepairs"] == "Suspended"
    assert machines.scale_sets.repair(machines.path, "1") is False
    client.set_services(machines.path, ["AutomaticRepairs"], "Resume")
    assert machines.scale_sets.repair(machines.path, "1") is True


def test_a_service_that_cannot_be_suspended_is_an_error(client: Client, machines: Fleet) -> None:
    machines.arm.faults = [_first("POST", error(403, "AuthorizationFailed", "no"), 9)]
    with pytest.raises(PoolError, match="AutomaticRepairs is not Suspended: .*AuthorizationFailed"):
        client.set_services(machines.path, ["AutomaticRepairs"], "Suspend")


@pytest.mark.parametrize(
    ("mark", "is_free"),
    [
        ("", True),
        ("run-1 until 2099-01-01T00:00:00+00:00", True),
        ("run-2 until 2027-01-15T07:00:00+00:00", True),  # ended an hour ago
        ("run-2 until 2027-01-15T09:00:00Z", False),
        ("run-2", False),
        ("run-2 until tomorrow", False),
    ],
)
def test_a_scale_set_is_held_by_one(client: Client, machines: Fleet, mark: str, is_free: bool) -> None:
    machines.group.content["tags"] = {"owner": "x", **({HOLD_TAG: mark} if mark else {})}
    if not is_free:
        with pytest.raises(PoolError, match="is driven by run-2"):
            client.hold(machines.path, "run-1", 1.8e9 + 60)
        assert _patches(machines) == []
        return
    client.hold(machines.path, "run-1", 1.8e9 + 60)
    tags = {"owner": "x", HOLD_TAG: "run-1 until 2027-01-15T08:01:00Z"}
    assert machines.group.content["tags"] == tags
    client.release(machines.path, "run-2")
    assert machines.group.content["tags"] == tags
    client.release(machines.path, "run-1")
    assert machines.group.content["tags"] == {"owner": "x"}


def test_of_two_that_want_it_at_once_one_gets_a_scale_set(client: Client, machines: Fleet) -> None:
    other = Client(Direct(machines.arm), client.wait, client.now)
    machines.arm.faults = [_before(lambda: other.hold(machines.path, "run-2", 1.8e9 + 60))]
    with pytest.raises(PoolError, match="is driven by run-2"):
        client.hold(machines.path, "run-1", 1.8e9 + 60)
