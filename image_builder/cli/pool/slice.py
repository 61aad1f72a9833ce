"""``pool slice``: the slices of a wave as private data directories, for an engine other than ``pool run``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from image_builder.cli.command import register, show
from image_builder.cli.options import AsJson
from image_builder.cli.pool.plan import PlanFile, writing
from image_builder.errors import UsageError

if TYPE_CHECKING:
    from image_builder.pool.plan.plan import Plan
    from image_builder.pool.plan.waves import Wave


app = typer.Typer()


@register(app, name="slice")
def slice_(
    plan: PlanFile,
    wave: Annotated[str, typer.Option("--wave", metavar="NAME", help="a wave of the plan")],
    known_hosts: Annotated[
        Path, typer.Option("--known-hosts", metavar="FILE", help="the host keys, by VM id or name")
    ],
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="where to make a directory for each slice: 0, 1, …")
    ],
    user: Annotated[str, typer.Option("--user", metavar="NAME", help="log in to the hosts as NAME")] = "root",
    node_configs: Annotated[
        Path | None,
        typer.Option(
            "--node-configs", metavar="DIR", help="HOST.json for hosts without a configuration by user data"
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Write the slices of a wave for ansible-runner, for any engine to run. They contain no key.

    Failures are not counted and waves not gated then: `pool run` of the same plan does that afterwards, and does not
    tell hosts to join that have joined.

    Example:

        image-builder pool slice h100.plan.json --wave canaries --user admin --known-hosts hosts.keys --out slices
    """
    from image_builder.pool.plan import plan as plans
    from image_builder.pool.reach.hostkeys import Pinned
    from image_builder.pool.reach.reach import Access
    from image_builder.pool.run.driver import Work
    from image_builder.pool.steps import node_configs as configs
    from image_builder.pool.steps.ansible import Slice, write_portable

    rollout_plan = plans.load(plan)
    chosen = _wave(rollout_plan, wave)
    if not known_hosts.is_file():
        raise UsageError(f"no such file: {known_hosts}")
    configurations = configs.read(node_configs, chosen.hosts) if node_configs else {}
    # The key isn't read: whoever runs the slice brings it.
    access = Access(user, Path("-"), Pinned(known_hosts.absolute()))
    with writing(out):
        out.mkdir(parents=True)
    first = 0
    for number, names in enumerate(chosen.slices):
        rate = rollout_plan.policy.join_rate
        work = tuple(Work(rollout_plan.host[name], 1, (first + n) / rate) for n, name in enumerate(names))
        own = {name: configurations[name] for name in names if name in configurations}
        write_portable(Slice(work, access, rollout_plan.policy.deadlines.bootstrap, own), out / str(number))
        first += len(names)
    result = {"directory": os.fspath(out), "slices": len(chosen.slices), "hosts": len(chosen.hosts)}
    show(result, f"{result['hosts']} hosts in {result['slices']} slices, in {out}", as_json=as_json)
    return 0


def _wave(plan: Plan, name: str) -> Wave:
    from image_builder.text import did_you_mean

    waves = {wave.name: wave for wave in plan.waves}
    if name not in waves:
        raise UsageError(f"no wave `{name}` in this plan{did_you_mean(name, list(waves))}")
    return waves[name]
