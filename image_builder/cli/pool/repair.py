"""``pool repair``: reboot or reimage, through Azure, the nodes for which the gate requests that."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from image_builder.cli.command import AsJson, Endpoint, Kubeconfig, VaultIds, connect, register, show
from image_builder.cli.pool.plan import Inventory, complete_groups
from image_builder.errors import EXIT_INTERRUPTED, PoolError, UsageError
from image_builder.system.signals import waking
from image_builder.text import columns

if TYPE_CHECKING:
    from image_builder.drain.policy import Policy
    from image_builder.pool.plan.inventory import Fleet
    from image_builder.pool.repair import Case, Outcome

app = typer.Typer()
_AGENT = "image-builder-repair"


@register(app)
def repair(
    pools: Annotated[
        list[str],
        typer.Argument(metavar="POOL...", help="groups of the inventory", autocompletion=complete_groups),
    ],
    inventory: Inventory,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="show pending repairs, and send nothing")
    ] = False,
    again: Annotated[
        list[str] | None,
        typer.Option(
            "--again",
            metavar="NODE",
            help="resend this node's request, whatever became of the last one; repeatable",
        ),
    ] = None,
    at_once: Annotated[
        int, typer.Option("--at-once", min=1, max=32, metavar="N", help="maximum concurrent repairs")
    ] = 4,
    policy: Annotated[
        Path | None,
        typer.Option("--policy", metavar="FILE", help="a drain policy: which pods don't count"),
    ] = None,
    kubeconfig: Kubeconfig = None,
    endpoint: Endpoint = None,
    vault: VaultIds = None,
    as_json: AsJson = False,
) -> int:
    """Reboot or reimage the nodes that the gate has drained for that, once each, and wait until they have booted.

    Does nothing unless the gate asks for it. The exit status is 16 if a node was skipped or refused, or didn't come
    back. No request is ever sent twice, whatever became of it or of this command, unless you say so with --again.

    Example:

        image-builder pool repair -i hosts gpu --kubeconfig repair.conf
    """
    from image_builder.pool.plan.inventory import read_fleet
    from image_builder.pool.repair import OPEN, Repairs, outcome_of
    from image_builder.pool.scale_set.client import open_client

    fleet, names, pods = read_fleet(inventory, pools, vault or ()), again or [], _pods(policy)
    cases = _waiting(kubeconfig, fleet)
    if unsent := {*names} - {case.node for case in cases if case.state in ("sent", "back")}:
        raise UsageError(f"--again: nothing was sent for {', '.join(sorted(unsent))}", hint="--dry-run")
    over = threading.Event()
    due = [] if dry_run else [case for case in cases if case.is_due or case.node in names]
    outcomes = [outcome_of(case) for case in cases if case not in due]
    if due:
        with (
            open_client(fleet.hosts, endpoint, rights="docs/how-to/bad-nodes.md") as client,
            waking(over.set, signal.SIGTERM, signal.SIGINT),
        ):
            repairs = Repairs(lambda: connect(kubeconfig, _AGENT), client, names, pods, over=over)
            outcomes += repairs.run(due, at_once)
    _show(fleet.warnings, outcomes, as_json=as_json)
    if over.is_set():
        return EXIT_INTERRUPTED
    return PoolError.exit_code if any(outcome.state in OPEN for outcome in outcomes) else 0


def _pods(file: Path | None) -> Policy:
    from image_builder.drain.policy import Policy
    from image_builder.strict_yaml import load

    return load(file, Policy, "policy") if file else Policy()


def _waiting(kubeconfig: Path | None, fleet: Fleet) -> list[Case]:
    from image_builder.node.errors import NodeError
    from image_builder.pool.repair import waiting

    try:
        with connect(kubeconfig, _AGENT) as client:
            return waiting(client, fleet.hosts)
    except NodeError as error:
        hint = "the rights that it needs are in deploy/repair.yml; --kubeconfig FILE"
        raise PoolError(error.message, hint=hint) from error


def _show(warnings: Sequence[str], outcomes: Sequence[Outcome], *, as_json: bool) -> None:
    nodes = [
        {
            "node": outcome.case.node,
            "remedy": outcome.case.record.remedy,
            "state": outcome.state,
            "reason": outcome.reason,
            "finding": f"{outcome.case.record.condition} {outcome.case.record.reason}",
            "physical_host": outcome.case.physical_host,
            "provider_id": outcome.case.provider_id,
        }
        for outcome in sorted(outcomes, key=lambda outcome: outcome.case.node)
    ]
    shown = ("node", "remedy", "state", "physical_host", "reason")
    rows = [tuple(node[name] for name in shown) for node in nodes]
    text = (
        columns([("node", "remedy", "state", "physical host", "reason"), *rows])
        if rows
        else "no pending repairs"
    )
    for node in nodes:
        if node["state"] == "hand-over":
            text += f"\n{node['node']}: {node['provider_id']}"
    sys.stderr.writelines(f"{line}\n" for line in warnings)
    show({"nodes": nodes}, text, as_json=as_json)
