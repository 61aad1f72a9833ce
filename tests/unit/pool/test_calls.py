"""The requests that a roll will send, as its plan lists them."""

from __future__ import annotations

from collections import Counter

from image_builder.pool.plan.plan import PlannedFrom, make_plan
from image_builder.pool.plan.policy import Policy
from image_builder.pool.scale_set.client import HOLD_TAG, Client
from image_builder.pool.scale_set.target import read_target
from image_builder.pool.show.calls import Call, calls, rows
from tests.support.arm.direct import Direct
from tests.support.arm.fleet import NEW, Fleet, fleet
from tests.unit.pool.test_scale_set_target import hosts


def _calls(machines: Fleet, **roll: str | bool) -> list[Call]:
    client = Client(Direct(machines.arm))
    target = read_target(client, hosts(machines), NEW, force_ephemeral=bool(roll.get("force_ephemeral")))
    inventory = PlannedFrom(paths=(), digest="")
    policy = Policy.model_validate({"mode": "roll", "roll": roll})
    return calls(make_plan(inventory, [], hosts(machines), policy, target=target), client)


def test_each_host_has_its_own_requests() -> None:
    listed = _calls(fleet(3))
    assert set(Counter(call.host for call in listed if call.host).values()) == {6}
    assert [call.body for call in listed if call.purpose == "upgrade"] == [
        {"instanceIds": [number]} for number in "012"
    ]
    assert rows(listed)[-1][-1] == str(len(listed)) == str(3 * 6 + 7)


def test_what_is_so_already_is_not_sent() -> None:
    """A model that already names the version, a service that somebody suspended, tags of others."""
    machines = fleet(1)
    machines.group.profile["storageProfile"]["imageReference"]["id"] = NEW
    machines.group.services["AutomaticRepairs"] = "Suspended"
    machines.group.content["tags"] = {"team": "ml"}
    listed = _calls(machines)
    assert not any("virtualMachineProfile" in str(call.body) for call in listed)
    assert [call.purpose for call in listed if "Automatic" in call.purpose] == [
        "Suspend AutomaticZoneRebalancing",
        "Resume AutomaticZoneRebalancing",
    ]
    claim, release = (call.body for call in listed if call.body and "tags" in call.body)
    assert set(claim["tags"]) == {"team", HOLD_TAG} and release == {"tags": {"team": "ml"}}


def test_an_ephemeral_disk_is_replaced_by_force() -> None:
    machines = fleet(1)
    forced = [call.body for call in _calls(machines, force_ephemeral=True) if call.purpose == "reimage"]
    machines.group.profile["storageProfile"]["osDisk"]["diffDiskSettings"] = {"option": "Local"}
    forced += [call.body for call in _calls(machines, force_ephemeral=True) if call.purpose == "reimage"]
    assert forced == [{}, {"forceUpdateOSDiskForEphemeral": True}]


def test_evictions_after_a_deadline_are_among_them() -> None:
    listed = _calls(fleet(2), deadline="2026-01-02T00:00:00Z")
    evictions = [call for call in listed if call.path.endswith("/eviction")]
    assert [call.host for call in evictions] == ["gpu-0", "gpu-1"]
    assert {call.purpose for call in evictions} == {"evict after 2026-01-02T00:00:00Z"}
    assert len(listed) == len(_calls(fleet(2))) + 2
