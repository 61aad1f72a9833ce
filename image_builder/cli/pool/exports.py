"""The commands that write files for other programs: ``pool snapshot``, ``render``, ``template`` and ``slice``."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from image_builder.cli.command import AsJson, VaultIds, register, show
from image_builder.cli.pool.plan import (
    USER_HELP,
    Inventory,
    PlanFile,
    complete_groups,
    complete_hosts,
    writing,
)
from image_builder.errors import UsageError
from image_builder.text import columns, did_you_mean, stamp

if TYPE_CHECKING:
    from image_builder.pool.plan.plan import Plan
    from image_builder.pool.plan.snapshot import Snapshot
    from image_builder.pool.plan.waves import Wave

app = typer.Typer()


@register(app, name="render")
def render(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="HOST|GROUP...", help="hosts and groups of the inventory", autocompletion=complete_hosts
        ),
    ],
    inventory: Inventory,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="where to write HOST.json")],
    vault: VaultIds = None,
    as_json: AsJson = False,
) -> int:
    """Write each host's node configuration, to be its user data. Refuses secrets.

    Example:

        image-builder pool render -i inventories/azure_vmss vmss_h100_a --out h100
    """
    from image_builder.pool.plan.render import render as render_hosts
    from image_builder.pool.plan.render import write

    rendered = render_hosts(inventory, names, vault or ())
    with writing(out):
        write(rendered, out)
    sizes = {configuration.host: configuration.user_data_bytes for configuration in rendered}
    count = len({configuration.text for configuration in rendered})
    result = {"directory": os.fspath(out), "hosts": sizes, "configurations": count}
    rows = [("host", "user data"), *((name, f"{size} B") for name, size in sizes.items())]
    hosts = f"{len(sizes)} host{'s' if len(sizes) != 1 else ''}"
    total = f"{hosts}, {f'{count} different configurations' if count != 1 else '1 configuration'}, in {out}"
    show(result, f"{columns(rows)}\n{total}", as_json=as_json)
    return 0


@register(app)
def template(
    pool: Annotated[
        str,
        typer.Argument(metavar="POOL", help="a group of the inventory", autocompletion=complete_groups),
    ],
    inventory: Inventory,
    version: Annotated[
        str, typer.Option("--version", metavar="VERSION", help="the image's version in its gallery, exactly")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="where to write the template")],
    vault: VaultIds = None,
    as_json: AsJson = False,
) -> int:
    """Write a pool's scale sets as a template of Azure Resource Manager. Doesn't contact Azure.

    Example:

        image-builder pool template vmss_h100_a -i inventories/azure_vmss --version 2026.1125.0 --out h100.template.json
    """
    from image_builder.cli.command import read_inventory
    from image_builder.gallery.plan import Target
    from image_builder.node import files
    from image_builder.pool.plan import template as templates

    if not re.fullmatch(r"[0-9]+(\.[0-9]+){2}", version):
        hint = "image-builder publish status IMAGE lists them; a scale set never follows `latest`"
        raise UsageError(f"not a version: {version}", hint=hint)
    model = templates.read_model(inventory, pool, vault or ())
    image = read_inventory(inventory, vault).define(model.image)
    templates.require_fit(model, image)
    assert image.gallery
    reference = Target(image.gallery).version(version)
    document = templates.template(model, image, reference)
    with writing(out):
        files.write(out, f"{json.dumps(document, indent=1)}\n".encode())
    capacities = templates.capacities(model)
    result = {"template": os.fspath(out), "version": reference, "scale_sets": capacities}
    rows = [("scale set", "machines"), *((name, str(count)) for name, count in capacities.items())]
    show(result, f"{columns(rows)}\n{out}", as_json=as_json)
    return 0


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
    user: Annotated[str, typer.Option("--user", metavar="NAME", help=USER_HELP)] = "",
    node_configs: Annotated[
        Path | None,
        typer.Option(
            "--node-configs", metavar="DIR", help="HOST.json for hosts without a configuration by user data"
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Write the slices of a wave for ansible-runner, for any engine to run. They contain no key.

    This counts no failures and gates no waves: `pool run` of the same plan does that afterwards, and skips the join on
    hosts that have joined.

    Example:

        image-builder pool slice h100.plan.json --wave canaries --user admin --known-hosts hosts.keys --out slices
    """
    from image_builder.pool.plan import plan as plans
    from image_builder.pool.reach.hostkeys import Pinned
    from image_builder.pool.reach.reach import Access
    from image_builder.pool.run.driver import Work
    from image_builder.pool.steps.ansible import Slice, read_configurations, write_portable

    rollout_plan = plans.load(plan)
    chosen = _wave(rollout_plan, wave)
    if not known_hosts.is_file():
        raise UsageError(f"no such file: {known_hosts}")
    configurations = read_configurations(node_configs, chosen.hosts) if node_configs else {}
    # The key isn't read: the engine that runs the slice supplies it.
    access = Access(Pinned(known_hosts.absolute()), user, Path("-"))
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
    waves = {wave.name: wave for wave in plan.waves}
    if name not in waves:
        raise UsageError(f"no wave `{name}` in this plan{did_you_mean(name, list(waves))}")
    return waves[name]


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
    """Write the hosts of scale sets as a static inventory. All or nothing: on any error the file is left unchanged.

    Signs in as Azure's own tools do: with environment variables, a managed identity, or `az login`.

    Example:

        image-builder pool snapshot h100_west=/subscriptions/…/virtualMachineScaleSets/gpu-a --out hosts/00-nodes.yml
    """
    from image_builder.node import files
    from image_builder.pool.plan import snapshot as snapshots
    from image_builder.pool.plan.azure import Reader

    scale_set_ids = list(dict.fromkeys(map(snapshots.parse, scale_sets)))
    at = stamp(time.time())
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
