"""``pool rollback``: plan the way back from a roll."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from image_builder.cli.command import AsJson, Endpoint, VaultIds, register, show
from image_builder.cli.pool import plan as plans
from image_builder.cli.pool.plan import PlanFile
from image_builder.errors import ImageBuilderError
from image_builder.text import columns

app = typer.Typer()


@register(app)
def rollback(
    plan: PlanFile,
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="where to write the plan of the rollback")
    ],
    failed: Annotated[
        bool,
        typer.Option(
            "--failed/--touched",
            help="only hosts that failed, or all that got the new version  [default: --touched]",
            show_default=False,
        ),
    ] = False,
    to: Annotated[
        str, typer.Option("--to", metavar="VERSION", help="the version, if scale sets had several")
    ] = "",
    inventory: Annotated[
        list[Path] | None,
        typer.Option("-i", "--inventory", metavar="PATH", help="repeatable  [default: the plan's]"),
    ] = None,
    endpoint: Endpoint = None,
    vault: VaultIds = None,
    as_json: AsJson = False,
) -> int:
    """Plan a rollback to the version that hosts had before a roll. Changes nothing: `pool run` does it.

    The rollback first resets the models of the roll's scale sets, then drains, reimages and verifies the hosts as in a
    roll.

    Example:

        image-builder pool rollback roll.json --out back.json
    """
    from image_builder.pool import rollback as rollbacks
    from image_builder.pool.plan.inventory import read_fleet
    from image_builder.pool.plan.plan import save
    from image_builder.pool.scale_set.client import open_client

    progress, _, report = plans.read_run(plan)
    if report["state"] == "running":
        raise ImageBuilderError("this roll is running", hint="image-builder pool abort PLAN, then again")
    before = progress.plan
    paths = inventory or [Path(path) for path in before.inventory.paths]
    fleet = read_fleet(paths, [pool.name for pool in before.pools], vault or ())
    with open_client(before.hosts, endpoint) as client:
        way_back = rollbacks.plan_rollback(progress, fleet, client, only_failed=failed, to=to)
    plans.keep_begun(out, way_back.plan)
    with plans.writing(out):
        save(way_back.plan, out)
    assert way_back.plan.target is not None
    result = plans.summary(out, way_back.plan, fleet)
    result |= {"to": way_back.plan.target.version, "omitted": way_back.omitted}
    lines = [f"to {way_back.plan.target.version}", plans.plan_text(out, way_back.plan)]
    if way_back.omitted:
        lines.insert(1, columns([("left out", "because"), *sorted(way_back.omitted.items())]))
    show(result, "\n".join([*fleet.warnings, *lines]), as_json=as_json)
    return 0
