"""The arguments of `pool snapshot`."""

from __future__ import annotations

import pytest

from image_builder.errors import UsageError
from image_builder.pool.plan.snapshot import parse

ID = "/subscriptions/8d10da13-8125-4ba9-a717-bf7490507b3d/resourceGroups/g/providers/Microsoft.Compute/"
ID += "virtualMachineScaleSets/gpu-a"


@pytest.mark.parametrize("pool", ["all", "ungrouped", "images", "pools"])
def test_a_group_that_is_there_already_is_no_pool(pool: str) -> None:
    """Ansible can't read an inventory with a group inside itself: the next plan would have no hosts at all."""
    assert parse(f"h100={ID}").inventory_group == "h100_gpu_a"
    with pytest.raises(UsageError, match=f"no pool can be called `{pool}`"):
        parse(f"{pool}={ID}")
