"""The plan of a rollback: which hosts are in it, what it needs, and what it must be given."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from image_builder.errors import DefinitionError, ImageBuilderError, UsageError
from image_builder.pool.plan.inventory import Fleet as Inventory
from image_builder.pool.plan.model import OK, Host, Outcome, ended, failed
from image_builder.pool.plan.plan import Plan, PlannedFrom, make_plan, parse, render
from image_builder.pool.plan.policy import Policy, Roll
from image_builder.pool.rollback import Rollback, _way_back, plan_rollback
from image_builder.pool.run.progress import replay
from image_builder.pool.run.records import Began, Intent, Opened, Record, Result
from image_builder.pool.run.state import Progress
from image_builder.pool.scale_set.client import HOLD_TAG, Client
from image_builder.pool.scale_set.target import read_target
from tests.support.arm.direct import Direct
from tests.support.arm.fleet import BUILDS, NEW, OLD, Fleet, fleet
from tests.unit.pool.test_scale_set_target import hosts

FAILED = failed("verify", 101, "test_gpu")


def _roll(machines: Fleet) -> Plan:
    """Return the plan of a roll of all instances."""
    rolls = Roll(max_unavailable="50%", deadline="2026-01-02T00:00:00Z")
    policy = Policy(mode="roll", roll=rolls, budget="30%", waves=("100%",))
    target = read_target(Client(Direct(machines.arm)), hosts(machines), NEW)
    return make_plan(
        PlannedFrom(paths=("hosts.yml",), digest="d"), [], hosts(machines), policy, target=target
    )


def _ran(plan: Plan, machines: Fleet, outcomes: Mapping[str, Outcome | None]) -> Progress:
    """Return the state of a roll that gave hosts the new image; an outcome of None is one that it doesn't know."""
    records: list[Record] = [Opened(at=1, plan=plan.digest)]
    records += [Began(at=1, wave=number) for number in range(len(plan.waves))]
    machines.group.profile["storageProfile"]["imageReference"]["id"] = NEW
    for name, outcome in outcomes.items():
        machine = machines.machine(plan.host[name].instance)
        machine.version = machine.disk = NEW
        records.append(Intent(at=2, step="reimage", hosts=(name,)))
        if outcome is not None:
            records += [
                Result(at=3, host=name, step="reimage", attempt=1, outcome=OK, joined="yes"),
                Intent(at=3, step="verify", hosts=(name,)),
                Result(at=4, host=name, step="verify", attempt=1, outcome=outcome),
            ]
    return replay(plan, records)


def _back(
    progress: Progress, machines: Fleet, present: list[Host] | None = None, **options: object
) -> Rollback:
    inventory = Inventory(
        PlannedFrom(paths=("hosts.yml",), digest="e"), (), tuple(present or hosts(machines))
    )
    chosen = {"only_failed": False, **options}
    return plan_rollback(progress, inventory, Client(Direct(machines.arm)), **chosen)  # type: ignore[arg-type]


def test_who_got_the_new_version_goes_back() -> None:
    machines = fleet(6)
    before = _roll(machines)
    progress = _ran(before, machines, {"gpu-0": OK, "gpu-1": FAILED, "gpu-2": None})
    plan, omitted = _back(progress, machines)
    assert [host.name for host in plan.hosts] == ["gpu-0", "gpu-1", "gpu-2"] and not omitted
    assert parse(render(plan), "plan") == plan
    assert plan.target
    assert (plan.target.version, plan.target.build) == (OLD, BUILDS[OLD])
    assert plan.target.before == {machines.path: NEW}
    # The marks on nodes are taken over; those on scale sets aren't shared.
    assert plan.target.undoes == before.run == plan.run and plan.target.broken == ("gpu-1",)
    assert plan.holder == f"{before.run}-back-{plan.digest[:12]}" and before.holder == before.run
    # As many may be away or fail as in the roll, and nothing is taken back a third time.
    assert plan.policy.rolls and plan.policy.rolls.restore == "never"
    # No job is evicted for it.
    assert before.deadline and not plan.deadline
    assert (plan.max_unavailable, plan.budget) == (before.max_unavailable, before.budget) == (3, 1)
    assert [wave.name for wave in plan.waves] == ["wave 1"]
    assert set(plan.waves[0].verify) == set(plan.host)


def test_only_who_failed() -> None:
    machines = fleet(6)
    progress = _ran(_roll(machines), machines, {"gpu-0": OK, "gpu-1": FAILED, "gpu-2": FAILED})
    progress.hosts["gpu-2"].restored = True
    plan, omitted = _back(progress, machines, only_failed=True)
    assert [host.name for host in plan.hosts] == ["gpu-1"] and not omitted


def test_who_is_another_machine_or_has_another_version_is_left_out_and_named() -> None:
    machines = fleet(6)
    names = ("gpu-0", "gpu-1", "gpu-2", "gpu-3")
    progress = _ran(_roll(machines), machines, dict.fromkeys(names, OK))
    present = hosts(machines)
    machines.machine("1").version = OLD
    present[2] = present[2].model_copy(update={"vm_id": "another"})
    del present[3]
    plan, omitted = _back(progress, machines, present)
    assert [host.name for host in plan.hosts] == ["gpu-0"]
    assert set(omitted) == {"gpu-1", "gpu-2", "gpu-3"} and omitted["gpu-1"] == "it has another version"


def test_the_case_of_ids_does_not_matter() -> None:
    machines = fleet(6)
    progress = _ran(_roll(machines), machines, {"gpu-0": OK})
    present = [
        host.model_copy(update={"scale_set_id": host.scale_set_id.upper()}) for host in hosts(machines)
    ]
    plan, omitted = _back(progress, machines, present, to=OLD.upper())
    assert [(host.name, host.scale_set_id) for host in plan.hosts] == [("gpu-0", machines.path)]
    assert not omitted


@pytest.mark.parametrize(
    ("properties", "reason"),
    [
        ({"publishingProfile": {"endOfLifeDate": "2020-01-01T00:00:00Z"}}, "past its end of life"),
        (
            {"replicationStatus": {"summary": [{"region": "East US", "state": "Completed"}]}},
            "isn't in westus3",
        ),
    ],
)
def test_a_previous_version_that_is_unfit_is_refused(properties: dict[str, object], reason: str) -> None:
    machines = fleet(2)
    progress = _ran(_roll(machines), machines, {"gpu-0": OK})
    machines.arm.resources[OLD.lower()].content["properties"].update(properties)
    with pytest.raises(DefinitionError, match=reason):
        _back(progress, machines)


def test_a_previous_version_that_was_deleted_is_refused() -> None:
    machines = fleet(2)
    progress = _ran(_roll(machines), machines, {"gpu-0": OK})
    del machines.arm.resources[OLD.lower()]
    with pytest.raises(DefinitionError, match=r"there is no version .*1\.7\.0"):
        _back(progress, machines)


def test_there_is_no_way_back() -> None:
    machines = fleet(2)
    before = _roll(machines)
    with pytest.raises(UsageError, match="no host needs a rollback"):
        _back(_ran(before, machines, {}), machines)
    # The way back from a rollback is a roll.
    progress = _ran(before, machines, {"gpu-0": OK})
    with pytest.raises(UsageError, match="is a rollback itself"):
        _back(replay(_back(progress, machines).plan, ()), machines)
    # A host that failed before it was touched has nothing to go back to.
    assert before.target
    same = before.model_copy(
        update={"target": before.target.model_copy(update={"before": {machines.path: NEW}})}
    )
    with pytest.raises(DefinitionError, match="what its hosts ran isn't known"):
        _back(_ran(same, machines, {"gpu-0": ended("timeout")}), machines)


def test_scale_sets_that_had_several_versions_go_back_one_plan_each() -> None:
    machines = fleet(2)
    before = _roll(machines)
    progress = _ran(before, machines, {"gpu-0": OK, "gpu-1": OK})
    with pytest.raises(UsageError, match=r"named .*1\.7\.0 before"):
        _back(progress, machines, to=f"{OLD}.0")
    assert len(_back(progress, machines, to=OLD).plan.hosts) == 2


def test_scale_sets_may_have_spelled_a_version_differently() -> None:
    machines = fleet(2)
    plan = _roll(machines)
    assert plan.target
    other = f"{machines.path}-b"
    first, second = hosts(machines)
    second = second.model_copy(update={"scale_set_id": other})
    target = plan.target.model_copy(update={"before": {machines.path: OLD, other: OLD.upper()}})
    for to in ("", OLD, OLD.upper()):
        version, sets = _way_back(target, [first, second], to)
        assert version.lower() == OLD.lower() and sets == [machines.path, other]
    # One that named the new version already has nothing to go back to.
    target = plan.target.model_copy(update={"before": {machines.path: NEW.upper()}})
    with pytest.raises(DefinitionError, match="didn't name another version"):
        _way_back(target, [first], "")


def test_a_driver_that_was_killed_has_to_be_ended_first() -> None:
    machines = fleet(2)
    before = _roll(machines)
    progress = _ran(before, machines, {"gpu-0": OK})
    machines.group.content["tags"] = {HOLD_TAG: f"{before.run} until 2026-11-26T00:00:00+00:00"}
    with pytest.raises(ImageBuilderError, match="was killed, and holds") as caught:
        _back(progress, machines)
    assert f"image-builder pool abort --run {before.run} --to {NEW}" in (caught.value.hint or "")
