"""``pool snapshot``: the hosts that Azure lists, as a static inventory."""

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
    from image_builder.pool.plan.snapshot import Snapshot


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
        bool, typer.Option("--allow-fewer", help="accept fewer hosts than a scale set's capacity")
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
    from image_builder.node import files
    from image_builder.pool.plan import snapshot as snapshots
    from image_builder.pool.plan.azure import Reader

    scale_set_ids = list(dict.fromkeys(map(snapshots.parse, scale_sets)))
    at = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    with Reader(endpoint=endpoint, say=_say) as reader:
        taken_sets = [
            snapshots.take(scale_set_id, reader.read(scale_set_id)) for scale_set_id in scale_set_ids
        ]
    snapshots.check(taken_sets, fewer=allow_fewer)
    with writing(out):
        files.write(out, snapshots.document(taken_sets, at))
    result: dict[str, Any] = {
        "inventory": os.fspath(out),
        "taken": at,
        "hosts": sum(len(scale_set.machines) for scale_set in taken_sets),
        "scale_sets": [_summary(scale_set) for scale_set in taken_sets],
        "requests": reader.traffic.requests,
        "throttled": reader.traffic.throttled,
        "left": reader.traffic.remaining,
    }
    show(result, _text(result), as_json=as_json)
    return 0


def _say(message: str) -> None:
    sys.stderr.write(f"{message}\n")


def _summary(scale_set: Snapshot) -> dict[str, Any]:
    running = sum(machine.variables.get("pool_power_state") == "running" for machine in scale_set.machines)
    return {
        "pool": scale_set.source.pool,
        "scale_set": scale_set.source.name,
        "hosts": len(scale_set.machines),
        "expected": scale_set.expected,
        "running": running,
        "missing": list(scale_set.missing),
    }


def _text(result: dict[str, Any]) -> str:
    rows = [("pool", "scale set", "hosts", "expected", "running")]
    rows += [
        (s["pool"], s["scale_set"], str(s["hosts"]), str(s["expected"] or "-"), str(s["running"]))
        for s in result["scale_sets"]
    ]
    missing = [f"{s['scale_set']}: {reason}" for s in result["scale_sets"] for reason in s["missing"]]
    total = f"{result['hosts']} hosts, {result['requests']} requests, taken {result['taken']}"
    return "\n".join([columns(rows), *missing, total, result["inventory"]])
