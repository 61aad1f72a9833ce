"""Instances in a roll's scale sets that aren't its hosts: named in its report, with what to do about old ones."""

from __future__ import annotations

from typing import Any

import pytest

from image_builder.cli.pool import run as commands
from image_builder.errors import PoolError
from image_builder.pool.plan.model import Target
from image_builder.pool.run.records import RECORD, Opened, Unplanned
from image_builder.pool.show import report as reports
from tests.support.pools.simulated.rolls import Fate, World, plan, roll

SET = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/virtualMachineScaleSets/gpu"


@pytest.mark.parametrize("fate", ["well", "checks"])
def test_instances_that_were_scaled_out_meanwhile_are_named(fate: Fate) -> None:
    """R24: in a finished run, and in one that stops by itself; only in the first is their version too old."""
    planned = plan(30)
    target = Target(version=f"{SET}/versions/1.8.0", build="b", before={})
    world = World(planned.model_copy(update={"target": target}))
    world.fates = dict.fromkeys(planned.host, fate)
    world.scaled_out = {
        f"{SET}/virtualMachines/7": target.version.upper(),
        f"{SET}/virtualMachines/8": f"{SET}/versions/1.7.0",
        f"{SET}-2": "",
    }
    progress, records = roll(world)
    assert progress.finished is (fate == "well")
    document = reports.report(progress, records)
    assert document["unplanned"] == world.scaled_out
    shown = reports.text(document)
    if fate == "well":
        assert document["outdated"] == [f"{SET}-2", f"{SET}/virtualMachines/8"]
        assert "  not in the plan: gpu/7 (1.8.0)\n" in shown
        assert "not of its version: gpu-2 (not known), gpu/8 (1.7.0); image-builder pool snapshot" in shown
    else:
        assert document["outdated"] == []
        assert "  not in the plan: gpu-2 (not known), gpu/7 (1.8.0), gpu/8 (1.7.0)" in shown
    # From another process, which no longer finds any.
    records.append(Opened(at=world.time, plan=planned.digest))
    assert reports.unplanned(records) == {}


@pytest.mark.parametrize(("version", "status"), [("new", 0), ("old", PoolError.exit_code)])
def test_only_another_version_is_no_success(
    capsys: pytest.CaptureFixture[str], version: str, status: int
) -> None:
    world = World(plan(4).model_copy(update={"target": Target(version="new", build="b", before={})}))
    world.scaled_out = {f"{SET}/virtualMachines/7": version}
    progress, records = roll(world)
    assert progress.finished
    assert [RECORD.validate_json(RECORD.dump_json(r)) for r in records if isinstance(r, Unplanned)] == [
        r for r in records if isinstance(r, Unplanned)
    ]
    document: dict[str, Any] = reports.report(progress, records)
    assert commands._show(document, 0, "", as_json=False) == status
    shown = capsys.readouterr()
    assert f"gpu/7 ({version})" in shown.out
    assert ("instances that are not in the plan have another version: 1" in shown.err) is bool(status)
    assert (reports.PLAN_AGAIN in shown.err) is bool(status)
