"""The real fleet of a roll, as far as no host is needed: which scale sets it holds, and what it finds in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from image_builder.drain.policy import Policy
from image_builder.pool.plan.model import Host
from image_builder.pool.scale_set.client import Client
from image_builder.pool.scale_set.roll import Patience
from image_builder.pool.scale_set.target import read_target
from image_builder.pool.scale_set.verdict import Node
from image_builder.pool.steps.drains import Key
from image_builder.pool.steps.fleet import Change, Setup
from image_builder.pool.steps.roll import RollFleet
from tests.support.arm.direct import Direct
from tests.support.arm.fleet import BUILDS, NEW, OLD, Fleet, fleet
from tests.unit.pool.test_fleet import setup
from tests.unit.pool.test_scale_set_target import hosts

__all__ = ["setup"]


class Empty:
    """A cluster without any Lease."""

    def find(self, _path: str) -> None:
        return None

    def request(self, _method: str, _path: str, _body: object = None) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


@contextmanager
def rolled(
    setup: Setup, machines: Fleet, folder: Path, *, force_ephemeral: bool = False
) -> Iterator[tuple[RollFleet, list[Host]]]:
    """Yield the fleet of a roll that has begun, with none of its hosts in work, and the hosts."""
    client, planned = Client(Direct(machines.arm)), hosts(machines)
    change = Change(
        target=read_target(client, planned, NEW, force_ephemeral=force_ephemeral),
        run="roll-1",
        holder="roll-1",
        kube=Empty,  # type: ignore[arg-type]  # all that a Lease asks of one
        azure=client,
        journal=folder / "requests.jsonl",
        policy=Policy(),
        force_ephemeral=force_ephemeral,
        patience=Patience(look=0.1, settle=0.1, minute=0.1),
        settle_seconds=0.0,
    )
    with RollFleet(setup, change, folder / "work") as state:
        yield state, planned


@pytest.mark.parametrize(("is_ephemeral", "force"), [(False, False), (False, True), (True, True)])
def test_only_ephemeral_disks_are_forced(
    setup: Setup, tmp_path: Path, *, is_ephemeral: bool, force: bool
) -> None:
    machines = fleet(1)
    if is_ephemeral:
        machines.group.profile["storageProfile"]["osDisk"]["diffDiskSettings"] = {"option": "Local"}
    with rolled(setup, machines, tmp_path, force_ephemeral=force) as (state, _):
        assert state._drive(machines.path).force_ephemeral is is_ephemeral


def test_instances_beside_the_plan_are_found_with_their_versions(setup: Setup, tmp_path: Path) -> None:
    """R24, R11: scaled out after the plan, before and after the model changed; and a machine that replaced another."""
    machines = fleet(2)
    with rolled(setup, machines, tmp_path) as (state, planned):
        assert state.unplanned(planned) == {}
        machines.scale_sets._scale(machines.group, 3)
        machines.group.profile["storageProfile"]["imageReference"]["id"] = NEW
        machines.scale_sets._scale(machines.group, 4)
        assert machines.scale_sets.repair(machines.path, "1")
        members = f"{machines.path}/virtualMachines"
        assert state.unplanned(planned) == {f"{members}/1": NEW, f"{members}/2": OLD, f"{members}/3": NEW}
        machines.arm.actions.remove("Microsoft.Compute/virtualMachineScaleSets/virtualMachines/read")
        assert state.unplanned(planned) == {machines.path: ""}


def test_a_restore_that_was_given_up_sends_nothing(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host is reported as still cordoned: nothing may happen to it afterwards."""
    machines = fleet(1)
    with rolled(setup, machines, tmp_path) as (state, (host,)):
        machine = machines.group.machines[host.instance]
        machine.version = machine.disk = NEW
        monkeypatch.setattr(state, "read", lambda _: Node(machine.boot_id, BUILDS[NEW]))
        key: Key = (host.name, "restore", 1)
        state.give_up(*key)
        outcome, _ = state._restore(host, key)
    assert (outcome.kind, machine.reimages, machine.version) == ("busy", 0, NEW)
