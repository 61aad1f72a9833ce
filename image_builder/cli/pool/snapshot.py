"""``pool snapshot``: the hosts that Azure says there are, as a static inventory."""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from image_builder.cli.command import register, show
from image_builder.cli.options import AsJson
from image_builder.cli.pool.plan import writing
from image_builder.text import columns

if TYPE_CHECKING:
    from image_builder.pool.plan.snapshot import Taken


app = typer.Typer()


@register(app, name="snapshot")
def snapshot(
    scale_sets: Annotated[
        list[str],
        typer.Argument(metavar="POOL=SCALE_SET_ID...", help="the scale sets of each pool, by Azure's ids"),
    ],
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="the inventory's file, such as 00-nodes.yml")
    ],
    allow_fewer: Annotated[
        bool, typer.Option("--allow-fewer", help="take the hosts that are there where some are missing")
    ] = False,
    endpoint: Annotated[
        str | None,
        typer.Option(
            "--endpoint",
            metavar="URL",
            help="Azure Resource Manager  [default: that of AZURE_SDK_CLOUD_CONF]",
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Write the hosts of scale sets as a static inventory: all of them, or the file stays as it was.

    Signs in as Azure's own tools do: by environment variables, a managed identity, or `az login`.

    Example:

        image-builder pool snapshot h100_west=/subscriptions/…/virtualMachineScaleSets/gpu-a --out hosts/00-nodes.yml
    """
    from image_builder.node import durable
    from image_builder.pool.plan import snapshot as snapshots
    from image_builder.pool.plan.azure import Reader

    asked = list(dict.fromkeys(map(snapshots.wanted, scale_sets)))
    at = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    with Reader(endpoint=endpoint, say=_say) as reader:
        taken = [snapshots.take(one, reader.read(one)) for one in asked]
    snapshots.check(taken, fewer=allow_fewer)
    with writing(out):
        durable.write(out, snapshots.document(taken, at))
    result: dict[str, Any] = {
        "inventory": os.fspath(out),
        "taken": at,
        "hosts": sum(len(one.machines) for one in taken),
        "scale_sets": [_told(one) for one in taken],
        "requests": reader.traffic.requests,
        "throttled": reader.traffic.throttled,
        "left": reader.traffic.left,
    }
    show(result, _text(result), as_json=as_json)
    return 0


def _say(told: str) -> None:
    sys.stderr.write(f"{told}\n")


def _told(one: Taken) -> dict[str, Any]:
    running = sum(machine.variables.get("pool_power_state") == "running" for machine in one.machines)
    return {
        "pool": one.wanted.pool,
        "scale_set": one.wanted.name,
        "hosts": len(one.machines),
        "expected": one.expected,
        "running": running,
        "missing": list(one.missing),
    }


def _text(result: dict[str, Any]) -> str:
    rows = [("pool", "scale set", "hosts", "expected", "running")]
    rows += [
        (s["pool"], s["scale_set"], str(s["hosts"]), str(s["expected"] or "-"), str(s["running"]))
        for s in result["scale_sets"]
    ]
    missing = [f"{s['scale_set']}: {what}" for s in result["scale_sets"] for what in s["missing"]]
    total = f"{result['hosts']} hosts, {result['requests']} requests, taken {result['taken']}"
    return "\n".join([columns(rows), *missing, total, result["inventory"]])
