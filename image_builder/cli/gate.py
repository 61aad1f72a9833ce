"""``image-builder gate``: the controller, and the gate's manual commands."""

from __future__ import annotations

import getpass
import json
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from image_builder.cli.command import AsJson, Endpoint, Kubeconfig, connect, register, show
from image_builder.errors import ImageBuilderError, UsageError
from image_builder.node.errors import NodeError
from image_builder.node.status import PREFLIGHT_LABEL
from image_builder.system.signals import waking
from image_builder.text import columns, printable, stamp

if TYPE_CHECKING:
    from image_builder.cluster.gate.controller import Settings
    from image_builder.cluster.gate.impact import Impact
    from image_builder.node.net.kube import Client

app = typer.Typer(
    help="Admit nodes whose preflight passed, and no others.\n\nExample:\n\n\b\n  image-builder gate status",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_AGENT = "image-builder-gate"
Taint = Annotated[str, typer.Option("--taint", metavar="KEY", help="the taint's key")]
PoolLabel = Annotated[str, typer.Option(metavar="KEY", help="the label that names a node's pool")]


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a pod may run as a uid that has no name
        return f"uid {os.getuid()}"


def _now() -> str:
    return stamp(time.time())


@contextmanager
def _answered() -> Iterator[None]:
    """Raise ImageBuilderError if the API server can't be reached, or refuses."""
    try:
        yield
    except NodeError as error:
        raise ImageBuilderError(
            error.message, hint="--kubeconfig FILE names another API server or another user"
        ) from error


@register(app)
def run(
    kubeconfig: Kubeconfig = None,
    taint: Taint = PREFLIGHT_LABEL,
    rate: Annotated[float, typer.Option(min=0.1, help="maximum number of nodes changed per second")] = 50.0,
    namespace: Annotated[str, typer.Option(help="namespace of the leader's lease")] = "kube-system",
    retest_share: Annotated[
        float,
        typer.Option(min=0, max=1, help="largest share of the fleet out for re-tests; 0: no re-tests"),
    ] = 0.02,
    approve: Annotated[
        bool,
        typer.Option("--approve", help="approve certificates of nodes that join with the token broker"),
    ] = False,
    breaker_share: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="share of a pool beyond which a code's failures within an hour hold repairs for it; 1: never",
        ),
    ] = 0.05,
    pool_label: PoolLabel = "pool",
    health: Annotated[
        Path | None,
        typer.Option("--health", metavar="FILE", help="policy for nodes that go bad at work, as YAML"),
    ] = None,
    advise: Annotated[
        bool, typer.Option("--advise", help="change nothing; report what would be admitted, gated and held")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, one object per line")] = False,
) -> int:
    """Run the controller: remove the taint from nodes whose boot passed, and put it back after a reboot.

    Several may run; one of them acts. Exits on SIGTERM.

    Example:

        image-builder gate run --kubeconfig gate.conf
    """
    from image_builder.cluster.gate import breaker
    from image_builder.cluster.gate.controller import Settings
    from image_builder.cluster.gate.model import Rules
    from image_builder.cluster.gate.policy import Policy
    from image_builder.cluster.gate.retest import Limits
    from image_builder.drain.lease import Settings as LeaseSettings
    from image_builder.strict_yaml import load

    policy = load(health, Policy, "health") if health else Policy()
    settings = Settings(
        Rules(taint=taint, pool=pool_label, health=policy),
        rate,
        lease=LeaseSettings(namespace=namespace),
        limits=Limits(share=retest_share),
        breaker=breaker.Limits(share=breaker_share),
        advises=advise,
    )
    _run(settings, lambda: connect(kubeconfig, _AGENT), approves=approve, as_json=as_json)
    return 0


def _tell(text: str, *, as_json: bool) -> None:
    """Write one line of the controller's log, from any thread; nodes' own words may be part of it."""
    stream = sys.stdout if as_json else sys.stderr
    line = json.dumps({"at": _now(), "said": text}) if as_json else printable(text)
    # ``print`` writes text and newline separately, between which another thread may write.
    stream.write(f"{line}\n")
    stream.flush()


def _run(settings: Settings, connection: Callable[[], Client], *, approves: bool, as_json: bool) -> None:
    """Run the controller until SIGTERM or SIGINT. Raises ImageBuilderError as ``_answered`` does."""
    from image_builder.cluster.gate.approver import Approver
    from image_builder.cluster.gate.controller import Controller

    tell = partial(_tell, as_json=as_json)
    over = threading.Event()
    with _answered(), waking(over.set, signal.SIGTERM, signal.SIGINT):
        # Two replicas may have the same host name and, each in its own namespace, the same process id.
        identity = f"{os.uname().nodename}_{uuid.uuid4()}"

        def knows_nodes() -> bool:
            return controller.informer.synced.is_set()

        # The controller's watch shows the approver all nodes.
        approver = Approver(connection, lambda: controller.election.leads, knows_nodes, tell)
        controller = Controller(connection, identity, settings, tell, approver.see if approves else None)
        controller.run(over, *([approver.run] if approves else []))


@register(app)
def admit(
    node: Annotated[str, typer.Argument(metavar="NODE", help="the node's name; or --code")] = "",
    reason: Annotated[
        str, typer.Option("--reason", help="the reason, kept in the node's annotation; required")
    ] = "",
    code: Annotated[
        str,
        typer.Option("--code", metavar="CODE", help="instead of NODE: all nodes that fail with this code"),
    ] = "",
    pool: Annotated[
        str | None, typer.Option(metavar="POOL", help="with --code: only nodes of this pool")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="with --code: at most N nodes  [default: all]")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="change nothing; show which nodes would be admitted")
    ] = False,
    who: Annotated[str, typer.Option("--by", help="the person who admits it  [default: this user]")] = "",
    kubeconfig: Kubeconfig = None,
    taint: Taint = PREFLIGHT_LABEL,
    pool_label: PoolLabel = "pool",
    as_json: AsJson = False,
) -> int:
    """Admit nodes by hand for their current boot, whatever their preflight result. Works without the controller.

    With --code, all nodes of a pool that are out for one reason, such as a wrong test: exit status 1 if one of them
    can't be admitted.

    Example:

        image-builder gate admit gpu-17 --reason "INC-1234: controller down" --kubeconfig admin.conf
        image-builder gate admit --code gpu.ecc --pool h100 --limit 20 --dry-run --kubeconfig admin.conf
    """
    from image_builder.cluster.gate.admit import admit as let_in
    from image_builder.cluster.gate.admit import admit_each, failing, why
    from image_builder.cluster.gate.model import Rules, node_from

    if bool(node) == bool(code):
        raise UsageError("name either a NODE or a --code")
    if node and (pool is not None or limit is not None):
        raise UsageError("--pool and --limit need --code")
    if not reason and not dry_run:
        raise UsageError("--reason is required: it is kept in the node's annotation")
    rules = Rules(taint=taint, pool=pool_label)
    with _answered(), connect(kubeconfig, _AGENT) as client:
        matches = failing(client, rules, code, pool) if code else [node_from(client.node(node), rules)]
        before, problems = matches[:limit], dict[str, str]()
        if not dry_run:
            author = who or _user()
            if code:
                before, problems = admit_each(client, before, rules, code, who=author, reason=reason)
            else:
                before = [let_in(client, node, rules, who=author, reason=reason)]
    admitted = [{"node": each.name, "boot_id": each.boot_id, "was": why(each)} for each in before]
    state = "would be admitted" if dry_run else "is admitted until it reboots"
    lines = [f"{line['node']} {state}; previous state: {printable(line['was'])}" for line in admitted]
    lines += [f"{name} is not admitted: {printable(problem)}" for name, problem in problems.items()]
    if left := len(matches) - len(admitted) - len(problems):
        lines.append(f"{left} more nodes are out because of {code}")
    result = {"nodes": admitted, "problems": problems, "left": left} if code else admitted[0]
    show(result, "\n".join(lines), as_json=as_json)
    return 1 if problems else 0


@register(app)
def release(
    code: Annotated[str, typer.Argument(metavar="CODE", help="the held code, as `gate status` shows it")],
    reason: Annotated[str, typer.Option("--reason", help="why the nodes are at fault after all")],
    pool: Annotated[str | None, typer.Option(help="the pool, if the code is held for several")] = None,
    who: Annotated[str, typer.Option("--by", help="the person who releases it  [default: this user]")] = "",
    kubeconfig: Kubeconfig = None,
    as_json: AsJson = False,
) -> int:
    """Release a held code: allow its failed nodes to reboot or be replaced even though many fail alike.

    Example:

        image-builder gate release gpu.lost --reason "INC-1234: a rack lost its power" --kubeconfig admin.conf
    """
    from image_builder.cluster.gate import breaker

    with _answered(), connect(kubeconfig, _AGENT) as client:
        held = breaker.release(client, code, pool, who=who or _user(), reason=reason)
    show(
        {"code": code, "pool": held.pool, "failed": held.failed, "of": held.of},
        f"{held.name} is released until no node fails with it; reason for the hold: {held.words}",
        as_json=as_json,
    )
    return 0


@register(app)
def forget(
    host: Annotated[str, typer.Argument(metavar="HOST", help="the physical host, as `gate status` names it")],
    kubeconfig: Kubeconfig = None,
    as_json: AsJson = False,
) -> int:
    """Forget a physical host that is remembered as bad, such as one that was repaired.

    Example:

        image-builder gate forget GGBB90904476 --kubeconfig admin.conf
    """
    from dataclasses import asdict

    from image_builder.drain import hosts

    with _answered(), connect(kubeconfig, _AGENT) as client:
        entry = hosts.forget(client, host)
    show(asdict(entry), f"forgotten: {printable(entry.words)}", as_json=as_json)
    return 0


@register(app)
def status(kubeconfig: Kubeconfig = None, taint: Taint = PREFLIGHT_LABEL, as_json: AsJson = False) -> int:
    """Show which nodes are in and which are out, and why; exit status 1 if one is not where it belongs.

    Example:

        image-builder gate status --kubeconfig admin.conf
    """
    from image_builder.cluster.gate.admit import overview
    from image_builder.cluster.gate.model import Rules

    with _answered(), connect(kubeconfig, _AGENT) as client:
        lines, left = overview(client, Rules(taint=taint))
    rows = [("node", "gate", "may work", "why")]
    rows += [(line["node"], line["gate"], line["may_work"], line["why"]) for line in lines]
    abandoned = [{"run": m.run, "scale_set": m.scale_set, "nodes": list(m.nodes)} for m in left]
    show(
        {"nodes": lines, "abandoned": abandoned},
        "\n".join([columns(rows), *(m.words for m in left)]),
        as_json=as_json,
    )
    return 0 if all((line["gate"] == "in") == (line["may_work"] == "yes") for line in lines) else 1


@register(app)
def report(
    nodes: Annotated[
        list[str] | None, typer.Argument(metavar="NODE", help="nodes; by default all bad ones")
    ] = None,
    category: Annotated[
        str,
        typer.Option(
            "--category", metavar="CATEGORY", help="Azure's impact category  [default: the finding's]"
        ),
    ] = "",
    sends: Annotated[
        bool,
        typer.Option("--send", help="send the reports: Azure may take these machines' hosts out of service"),
    ] = False,
    endpoint: Endpoint = None,
    kubeconfig: Kubeconfig = None,
    taint: Taint = PREFLIGHT_LABEL,
    as_json: AsJson = False,
) -> int:
    """Show the Guest Health reports for nodes with bad hardware; --send sends them to Azure.

    --json shows the complete requests. Exit status 1 if a node can't be reported.

    Example:

        image-builder gate report gpu-17 --json --kubeconfig admin.conf
    """
    from image_builder.cluster.gate.impact import impacts
    from image_builder.cluster.gate.model import Rules

    if sends and not nodes:
        raise UsageError("--send needs the nodes to report", hint="without --send, all bad nodes are shown")
    with _answered(), connect(kubeconfig, _AGENT) as client:
        reports, refusals = impacts(client, Rules(taint=taint), nodes or (), category, time.time())
    if sends:
        refusals |= _send(reports, endpoint)
    show(
        {
            "impacts": [{"node": i.node, "method": "PUT", "url": i.url, "body": i.body} for i in reports],
            "problems": [{"node": node, "problem": problem} for node, problem in refusals.items()],
        },
        columns(list(_impact_rows(reports, refusals, "sent" if sends else "not sent"))),
        as_json=as_json,
    )
    return 1 if refusals else 0


def _impact_rows(
    reports: Iterable[Impact], refusals: Mapping[str, str], state: str
) -> Iterator[tuple[str, ...]]:
    """Yield table rows of reports, each with its state or why it wasn't sent, and then of nodes without a report."""

    yield "node", "physical host", "category", "since", ""
    remaining = dict(refusals)
    for impact in reports:
        finding = impact.finding
        outcome = remaining.pop(impact.node, state)
        yield impact.node, impact.host, finding.category, stamp(finding.since), outcome
    for node, why in remaining.items():
        yield node, "", "", "", why


def _send(reports: Iterable[Impact], endpoint: str | None) -> dict[str, str]:
    """Send reports; return what went wrong, by node. Raises HostError."""
    from image_builder.cluster.gate.impact import send
    from image_builder.system.resource_manager import ResourceManager

    problems = {}
    for impact in reports:
        with ResourceManager(impact.subscription, endpoint=endpoint) as manager:
            problems[impact.node] = send(manager, impact)
    return {node: problem for node, problem in problems.items() if problem}
