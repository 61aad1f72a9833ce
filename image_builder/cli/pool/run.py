"""The commands that reach hosts: run a planned rollout, resume it, abort it, verify hosts that are up.

Their options are defined once, as dataclasses: ``expanded`` turns them into a command's parameters.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from image_builder.cli.command import (
    AsJson,
    Endpoint,
    Kubeconfig,
    VaultIds,
    connect,
    register,
    show,
)
from image_builder.cli.pool import plan as plan_commands
from image_builder.cli.pool.plan import USER_HELP, Inventory, PlanFile, PublicKey
from image_builder.errors import EXIT_INTERRUPTED, PoolError, UsageError
from image_builder.text import columns

if TYPE_CHECKING:
    from collections.abc import Mapping

    from image_builder.pool.plan.inventory import Fleet
    from image_builder.pool.reach.reach import Access
    from image_builder.pool.rollout import Options, Rollout

# These belong to the same group of commands, `pool`.
app = typer.Typer()


@dataclass(frozen=True)
class HostOptions:
    """Options for reaching hosts, and for what the hosts must match."""

    user: Annotated[str, typer.Option("--user", metavar="NAME", help=USER_HELP)] = ""
    key: Annotated[
        Path | None,
        typer.Option(
            "--key", metavar="FILE", help="private key for the hosts  [default: ansible_ssh_private_key_file]"
        ),
    ] = None
    host_ca: Annotated[
        Path | None,
        typer.Option(
            "--host-ca", metavar="FILE", help="accept host certificates of these authorities (known_hosts)"
        ),
    ] = None
    known_hosts: Annotated[
        Path | None,
        typer.Option("--known-hosts", metavar="FILE", help="accept these host keys, by VM id or name"),
    ] = None
    trust_first_use: Annotated[
        Path | None,
        typer.Option(
            "--trust-first-use", metavar="FILE", help="accept each host's first key and record it in FILE"
        ),
    ] = None
    facts: Annotated[
        list[str] | None,
        typer.Option(
            "--facts",
            metavar="[IMAGE=]FILE",
            help="facts.json of a build that hosts of its image, or of IMAGE, must match; repeatable",
        ),
    ] = None
    vault: VaultIds = None

    def request(self, plan: Path, reports: Path, **more: Any) -> Options:
        """Return the options of a rollout. Raises UsageError if the choice of host keys is missing or ambiguous."""
        from image_builder.pool.rollout import Options

        return Options(
            plan=plan,
            access=self._access(),
            reports=reports.absolute(),
            facts=tuple(self.facts or ()),
            vault=tuple(self.vault or ()),
            **more,
        )

    def _access(self) -> Access:
        from image_builder.pool.reach.hostkeys import CertificateAuthority, FirstUse, Pinned
        from image_builder.pool.reach.reach import Access

        choices = (
            (CertificateAuthority, self.host_ca),
            (Pinned, self.known_hosts),
            (FirstUse, self.trust_first_use),
        )
        host_keys = [kind(file.absolute()) for kind, file in choices if file]
        if len(host_keys) != 1:
            raise UsageError(
                "give exactly one of --host-ca, --known-hosts and --trust-first-use",
                hint="hosts whose key can't be verified are not contacted",
            )
        return Access(host_keys[0], self.user, self.key.absolute() if self.key else None)


@dataclass(frozen=True)
class RolloutOptions(HostOptions):
    """The further options of `run` and `resume`."""

    node_configs: Annotated[
        Path | None,
        typer.Option(
            "--node-configs", metavar="DIR", help="HOST.json for hosts without a configuration by user data"
        ),
    ] = None
    kubeconfig: Annotated[
        Path | None,
        typer.Option(
            "--kubeconfig",
            metavar="FILE",
            help="the control plane that gates the waves; required for a roll  [default: none]",
        ),
    ] = None
    endpoint: Endpoint = None
    public_key: PublicKey = None
    evict: Annotated[
        str,
        typer.Option(
            "--evict",
            metavar="RUN",
            help="roll with a deadline only: confirm that this run may evict the jobs that it lists",
        ),
    ] = ""
    reports: Annotated[
        Path | None,
        typer.Option("--reports", metavar="DIR", help="reports of failed hosts  [default: PLAN.reports]"),
    ] = None

    def rollout(self, plan: Path, inventories: list[Path] | None, **more: Any) -> Options:
        """Return the options of a rollout. Raises UsageError as ``request`` does."""
        return self.request(
            plan,
            self.reports or plan.with_name(f"{plan.name}.reports"),
            inventories=tuple(inventories or ()),
            node_configs=self.node_configs,
            kubeconfig=self.kubeconfig,
            azure=self.endpoint,
            public_key=self.public_key,
            evict=self.evict,
            **more,
        )


def expanded(function: Callable[..., int]) -> Callable[..., int]:
    """Return a command whose parameter ``hosts``, a dataclass, is replaced by one option for each of its fields."""
    hints = get_type_hints(function, include_extras=True)
    kind = hints.pop("hosts")
    fields = get_type_hints(kind, include_extras=True)
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "hosts":
            parameters += [
                inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default)
                for field in dataclasses.fields(kind)
            ]
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(function)
    def command(**values: Any) -> int:
        options = {field.name: values.pop(field.name) for field in dataclasses.fields(kind)}
        return function(**values, hosts=kind(**options))

    command.__annotations__ = {**hints, **fields}
    annotated = [
        parameter.replace(annotation=command.__annotations__[parameter.name]) for parameter in parameters
    ]
    command.__signature__ = inspect.Signature(annotated)  # type: ignore[attr-defined]
    return command


@register(app)
@expanded
def run(
    plan: PlanFile,
    inventory: Inventory,
    *,
    hosts: RolloutOptions,
    as_json: AsJson = False,
) -> int:
    """Bring up the hosts of a plan, wave by wave. Refuses a plan that no longer fits the inventory.

    SIGINT or SIGTERM stops the run: it starts nothing more, and running steps finish; a second signal ends it at once.

    Example:

        image-builder pool run h100.plan.json -i inventories/azure_vmss --user admin --key id_pool \\
            --known-hosts hosts.keys --facts output/worker/latest/facts.json
    """
    return _drive(hosts.rollout(plan, inventory), as_json=as_json)


@register(app)
@expanded
def resume(
    plan: PlanFile,
    inventory: Annotated[
        list[Path] | None,
        typer.Option("-i", "--inventory", metavar="PATH", help="repeatable  [default: the plan's]"),
    ] = None,
    retry: Annotated[bool, typer.Option("--retry", help="also retry hosts that failed")] = False,
    takeover: Annotated[
        bool,
        typer.Option(
            "--takeover",
            help="roll only: dismiss a process that hangs but still renews its Leases, and wait until it can't"
            " act any more",
        ),
    ] = False,
    *,
    hosts: RolloutOptions,
    as_json: AsJson = False,
) -> int:
    """Resume a run that was stopped or killed. Drops vanished hosts, and adds new ones after the planned ones.

    Example:

        image-builder pool resume h100.plan.json --user admin --key id_pool --known-hosts hosts.keys \\
            --facts output/worker/latest/facts.json
    """
    options = hosts.rollout(plan, inventory, is_resumed=True, retry=retry, takes_over=takeover)
    return _drive(options, as_json=as_json)


@register(app)
def abort(
    plan: Annotated[
        Path | None, typer.Argument(metavar="[PLAN]", help="the file that `pool plan` wrote")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="wait for running steps to finish")] = True,
    run: Annotated[
        str, typer.Option("--run", metavar="ID", help="instead of a plan: a roll whose journal is lost")
    ] = "",
    to: Annotated[
        str,
        typer.Option("--to", metavar="VERSION", help="with --run: the id of the version that it rolled to"),
    ] = "",
    before: Annotated[
        str,
        typer.Option(
            "--from", metavar="VERSION", help="with --run: the version from before, if it isn't older"
        ),
    ] = "",
    inventory: Annotated[
        list[Path] | None,
        typer.Option("-i", "--inventory", metavar="PATH", help="with --run: an inventory; repeatable"),
    ] = None,
    pool: Annotated[
        list[str] | None, typer.Option("--pool", metavar="GROUP", help="with --run: its hosts; repeatable")
    ] = None,
    lost: Annotated[
        bool,
        typer.Option("--lost", help="with --run: its driver is dead; don't wait for its claims to expire"),
    ] = False,
    kubeconfig: Kubeconfig = None,
    endpoint: Endpoint = None,
    vault: VaultIds = None,
    as_json: AsJson = False,
) -> int:
    """Stop a plan's run: it starts nothing more, and running steps finish. `pool resume` continues it.

    With --run it cleans up after a roll whose driver and journal are lost: uncordons hosts with the version from
    before, resumes services, releases scale sets. The exit status is 16 if a host stays cordoned.

    Example:

        image-builder pool abort h100.plan.json
    """
    if (plan is None) == (not run):
        raise UsageError("give a PLAN, or a roll with --run")
    if plan is None:
        if not to:
            raise UsageError("--run needs the version that it rolled to", hint="--to VERSION")
        fleet = _fleet_of(inventory, pool, vault)
        return _salvage(fleet, run, to, kubeconfig, endpoint, before=before, lost=lost, as_json=as_json)
    return _abort(plan, wait=wait, as_json=as_json)


def _fleet_of(inventory: list[Path] | None, pools: list[str] | None, vault: VaultIds) -> Fleet:
    from image_builder.pool.plan.inventory import read_fleet

    return read_fleet(inventory or [], pools or [], vault or ())


def _salvage(
    fleet: Fleet,
    run: str,
    version: str,
    kubeconfig: Path | None,
    endpoint: str | None,
    *,
    before: str,
    lost: bool,
    as_json: bool,
) -> int:
    from image_builder.drain.lease import Leases
    from image_builder.node.errors import NodeError
    from image_builder.pool.salvage import salvage
    from image_builder.pool.scale_set.client import open_client

    cluster = functools.partial(connect, kubeconfig, "image-builder-roll")
    try:
        with (
            cluster() as kube,
            open_client(fleet.hosts, endpoint) as manager,
            Leases(cluster, f"abort-{uuid.uuid4().hex[:12]}") as leases,
        ):
            done = salvage(
                kube, manager, fleet.hosts, run, version, before=before, leases=None if lost else leases
            )
    except NodeError as error:
        raise PoolError(error.message, hint="rerun the same command to resume; --kubeconfig FILE") from error
    rows = [("host", "", "")]
    rows += [(name, "freed", "") for name in done.freed]
    rows += [(name, "stays cordoned", reason) for name, reason in done.remaining.items()]
    lines = [columns(rows) if len(rows) > 1 else f"no host has marks of {run}"]
    lines += [f"{path} is released" for path in done.released]
    lines += done.unsure
    for path, versions in done.versions.items():
        running = ", ".join(f"{count} run {name}" for name, count in sorted(versions.items()))
        lines.append(f"{path}: its model names {done.models[path]}; {running}")
    show({"run": run, **done.as_json()}, "\n".join(lines), as_json=as_json)
    return PoolError.exit_code if done.remaining else 0


def _abort(plan: Path, *, wait: bool, as_json: bool) -> int:
    from image_builder.pool.run.abort import ask_to_stop, wait_until_over
    from image_builder.pool.run.journal import journal_of
    from image_builder.pool.run.state import IN_WORK
    from image_builder.pool.show.report import text

    progress, _, report = plan_commands.read_run(plan)
    # If it is already stopping, another signal would end running steps at once.
    if not (progress.stopped and report["state"] == "running"):
        ask_to_stop(journal_of(plan))
    if wait:
        wait_until_over(journal_of(plan))
    report = plan_commands.read_run(plan)[2]
    in_work = sorted(name for name, r in report["results"].items() if r["state"] in IN_WORK)
    result = {
        "state": report["state"],
        "reason": report["reason"],
        "counts": report["counts"],
        "in_work": in_work,
    }
    show(result, text(report), as_json=as_json)
    return 0


@register(app)
@expanded
def verify(
    plan: Annotated[Path | None, typer.Argument(metavar="[PLAN]", help="all hosts of this plan")] = None,
    inventory: Annotated[
        list[Path] | None,
        typer.Option("-i", "--inventory", metavar="PATH", help="an inventory, instead of a plan; repeatable"),
    ] = None,
    pool: Annotated[
        list[str] | None, typer.Option("--pool", metavar="GROUP", help="with -i: its hosts; repeatable")
    ] = None,
    *,
    hosts: HostOptions,
    reports: Annotated[
        Path, typer.Option("--reports", metavar="DIR", help="reports of hosts that fail")
    ] = Path("output/verify"),
    as_json: AsJson = False,
) -> int:
    """Run the checks on running hosts. Changes nothing on them and writes no journal.

    Example:

        image-builder pool verify h100.plan.json --user admin --key id_pool --known-hosts hosts.keys \\
            --facts output/worker/latest/facts.json
    """
    from image_builder.cli.pool.table import LiveTable
    from image_builder.pool import rollout

    if (plan is None) == (not inventory):
        raise UsageError("give a PLAN, or an inventory with -i and --pool")
    if plan and pool:
        raise UsageError("a PLAN has its pools: --pool is for an inventory", hint="-i INVENTORY --pool GROUP")
    options = hosts.request(
        plan or Path(), reports, inventories=tuple(inventory or ()), pools=tuple(pool or ())
    )
    prepared = rollout.prepare_verification(options, plan_file=plan)
    _warn(prepared)
    return _show(
        *rollout.verify(prepared, LiveTable), f"each failed host has a report in {reports}", as_json=as_json
    )


def _drive(options: Options, *, as_json: bool) -> int:
    from image_builder.cli.pool.table import LiveTable
    from image_builder.pool import rollout

    prepared = rollout.prepare(options)
    _warn(prepared)
    if prepared.plan.deadline:
        _show_jobs(prepared)
    report, number = rollout.drive(prepared, LiveTable)
    return _show(report, number, _hint(report), as_json=as_json)


def _show_jobs(prepared: Rollout) -> None:
    from image_builder.drain.jobs import table
    from image_builder.node.errors import NodeError
    from image_builder.pool import rollout

    try:
        jobs = rollout.jobs_to_evict(prepared)
    except NodeError as error:
        raise PoolError(
            error.message, hint="the jobs that it would evict are unknown: nothing was started"
        ) from error
    when = f"evicted after {prepared.plan.deadline}, unless they end earlier"
    text = table(jobs, time.time()) if jobs else "no job runs on its hosts now"
    sys.stderr.write(f"{when}:\n{text}\n")


def _warn(prepared: Rollout) -> None:
    for line in prepared.warnings:
        sys.stderr.write(f"{line}\n")


def _show(report: dict[str, Any], signal_number: int, hint: str, *, as_json: bool) -> int:
    """Print a report and return its exit status, which is 0 if every host is fine."""
    import signal

    from image_builder.cli import failure
    from image_builder.pool.show.report import PLAN_AGAIN, left_behind, text

    show(report, text(report), as_json=as_json)
    bad = left_behind(report)
    if signal_number:
        return EXIT_INTERRUPTED if signal_number == signal.SIGINT else 128 + signal_number
    outdated = len(report.get("outdated", ()))
    left = report.get("left") or report.get("unturned")
    if not bad and not outdated and not left:
        return 0
    error = PoolError(f"{report['state']}: {bad} of {report['hosts']} hosts are not up", hint=hint)
    if not bad and left:
        error = PoolError(f"{report['state']}: {left}", hint="image-builder pool resume PLAN")
    elif not bad:
        beside = "instances that are not in the plan have another version"
        error = PoolError(f"{report['state']}: {beside}: {outdated}", hint=PLAN_AGAIN)
    failure.report(error, on_stdout=not as_json)  # the result has already been printed
    return error.exit_code


def _hint(report: Mapping[str, Any]) -> str:
    """Return what to do after a run that left hosts behind: hosts that failed, or were skipped for another reason
    than a stop, are only retried with ``--retry``.
    """
    from image_builder.pool.run.rolling import STOPPED

    failed = any(report["counts"].get(name, 0) for name in _FAILED)
    skipped = any(detail != STOPPED for detail in report.get("skipped", {}).values())
    return "image-builder pool report PLAN, fix what failed, then pool resume PLAN" + (
        " --retry" if failed or skipped else ""
    )


_FAILED = ("refused", "timeout", "bastion", "auth", "host key", "sudo", "dropped", "failed")
