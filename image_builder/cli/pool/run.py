"""The commands that touch hosts: bring a planned rollout up, take it up again, stop it, verify what is there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from image_builder.cli.command import register, show
from image_builder.cli.options import AsJson, VaultFile
from image_builder.cli.pool import plan as plan_commands
from image_builder.cli.pool.plan import Inventory, PlanFile
from image_builder.errors import EXIT_INTERRUPTED, PoolError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from image_builder.pool.reach.hostkeys import HostKeys
    from image_builder.pool.rollout import Options, Ready

# The same group of commands.
app = typer.Typer()

User = Annotated[str, typer.Option("--user", metavar="NAME", help="who logs in on the hosts")]
Key = Annotated[
    Path | None, typer.Option("--key", metavar="FILE", help="the private key that hosts let in; required")
]
HostCa = Annotated[
    Path | None,
    typer.Option(
        "--host-ca", metavar="FILE", help="hosts show certificates of these authorities (known_hosts)"
    ),
]
KnownHosts = Annotated[
    Path | None, typer.Option("--known-hosts", metavar="FILE", help="hosts show these keys, by VM id or name")
]
TrustFirstUse = Annotated[
    Path | None,
    typer.Option(
        "--trust-first-use", metavar="FILE", help="take the first key of each host, and keep it in this file"
    ),
]
Kubeconfig = Annotated[
    Path | None,
    typer.Option(
        "--kubeconfig", metavar="FILE", help="the control plane that the waves wait for  [default: none]"
    ),
]
NodeConfigs = Annotated[
    Path | None,
    typer.Option(
        "--node-configs", metavar="DIR", help="HOST.json for hosts that have no configuration by user data"
    ),
]
HostFacts = Annotated[
    list[str] | None,
    typer.Option(
        "--facts",
        metavar="[IMAGE=]FILE",
        help="facts.json of a build: what hosts of its image, or of IMAGE, must be; repeatable",
    ),
]
Reports = Annotated[
    Path | None,
    typer.Option("--reports", metavar="DIR", help="reports of hosts that fail  [default: PLAN.reports]"),
]


@register(app)
def run(
    plan: PlanFile,
    inventory: Inventory,
    user: User = "root",
    key: Key = None,
    host_ca: HostCa = None,
    known_hosts: KnownHosts = None,
    trust_first_use: TrustFirstUse = None,
    facts: HostFacts = None,
    node_configs: NodeConfigs = None,
    kubeconfig: Kubeconfig = None,
    reports: Reports = None,
    vault_password_file: VaultFile = None,
    as_json: AsJson = False,
) -> int:
    """Bring the hosts of a plan up, wave after wave. Refused where the plan doesn't fit the inventory any more.

    SIGINT or SIGTERM stop it: nothing is started any more, what is in work ends; a second one ends it at once.

    Example:

        image-builder pool run h100.plan.json -i inventories/azure_vmss --user admin --key id_pool \\
            --known-hosts hosts.keys --facts output/worker/latest/facts.json
    """
    options = _options(
        plan,
        Login(user, key, host_ca, known_hosts, trust_first_use),
        reports,
        inventories=tuple(inventory),
        facts=tuple(facts or ()),
        node_configs=node_configs,
        kubeconfig=kubeconfig,
        vault_password_file=vault_password_file,
    )
    return _drive(options, as_json=as_json)


@register(app)
def resume(
    plan: PlanFile,
    inventory: Annotated[
        list[Path] | None,
        typer.Option("-i", "--inventory", metavar="PATH", help="repeatable  [default: the plan's]"),
    ] = None,
    retry: Annotated[bool, typer.Option("--retry", help="give failed hosts another chance")] = False,
    user: User = "root",
    key: Key = None,
    host_ca: HostCa = None,
    known_hosts: KnownHosts = None,
    trust_first_use: TrustFirstUse = None,
    facts: HostFacts = None,
    node_configs: NodeConfigs = None,
    kubeconfig: Kubeconfig = None,
    reports: Reports = None,
    vault_password_file: VaultFile = None,
    as_json: AsJson = False,
) -> int:
    """Take a run up that was stopped or killed. Vanished hosts are dropped, new ones come after the planned ones.

    Example:

        image-builder pool resume h100.plan.json --user admin --key id_pool --known-hosts hosts.keys \\
            --facts output/worker/latest/facts.json
    """
    options = _options(
        plan,
        Login(user, key, host_ca, known_hosts, trust_first_use),
        reports,
        inventories=tuple(inventory or ()),
        is_resumed=True,
        retry=retry,
        facts=tuple(facts or ()),
        node_configs=node_configs,
        kubeconfig=kubeconfig,
        vault_password_file=vault_password_file,
    )
    return _drive(options, as_json=as_json)


@register(app)
def abort(
    plan: PlanFile,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="until what is in work has ended")] = True,
    as_json: AsJson = False,
) -> int:
    """Stop a plan's run: it starts nothing any more, and lets what is in work end. Resume takes it up again.

    Example:

        image-builder pool abort h100.plan.json
    """
    from image_builder.pool.run.abort import ask_to_stop, wait_until_over
    from image_builder.pool.run.journal import journal_of
    from image_builder.pool.show.report import text

    progress, _, told = plan_commands.read_run(plan)
    # It stops already: another signal would end what is in work at once.
    if not (progress.stopped and told["state"] == "running"):
        ask_to_stop(journal_of(plan))
    if wait:
        wait_until_over(journal_of(plan))
    told = plan_commands.read_run(plan)[2]
    left = sorted(name for name, r in told["results"].items() if r["state"] in _IN_WORK)
    result = {"state": told["state"], "reason": told["reason"], "counts": told["counts"], "in_work": left}
    show(result, text(told), as_json=as_json)
    return 0


_IN_WORK = ("probing", "joining", "joined", "verifying")


@register(app)
def verify(
    plan: Annotated[Path | None, typer.Argument(metavar="[PLAN]", help="all hosts of this plan")] = None,
    inventory: Annotated[
        list[Path] | None,
        typer.Option(
            "-i", "--inventory", metavar="PATH", help="an inventory, in place of a plan; repeatable"
        ),
    ] = None,
    pool: Annotated[
        list[str] | None, typer.Option("--pool", metavar="GROUP", help="with -i: its hosts; repeatable")
    ] = None,
    user: User = "root",
    key: Key = None,
    host_ca: HostCa = None,
    known_hosts: KnownHosts = None,
    trust_first_use: TrustFirstUse = None,
    facts: HostFacts = None,
    reports: Annotated[
        Path, typer.Option("--reports", metavar="DIR", help="reports of hosts that fail")
    ] = Path("output/verify"),
    vault_password_file: VaultFile = None,
    as_json: AsJson = False,
) -> int:
    """Run the checks on hosts that are up. Nothing on them is changed, and no journal is written.

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
    options = _options(
        plan or Path(),
        Login(user, key, host_ca, known_hosts, trust_first_use),
        reports,
        inventories=tuple(inventory or ()),
        pools=tuple(pool or ()),
        facts=tuple(facts or ()),
        vault_password_file=vault_password_file,
    )
    ready = rollout.prepare_verification(options, given=plan)
    _warn(ready)
    return _show(
        *rollout.verify(ready, LiveTable), f"what each of them failed is in {reports}", as_json=as_json
    )


class Login(NamedTuple):
    """How the command line says that hosts are reached."""

    user: str
    key: Path | None
    host_ca: Path | None
    known_hosts: Path | None
    trust_first_use: Path | None


def _options(plan: Path, login: Login, reports: Path | None, **more: Any) -> Options:
    """Return the options of a command; raises UsageError for a choice that is missing or double."""
    from image_builder.pool.reach.hostkeys import CertificateAuthority, FirstUse, Pinned
    from image_builder.pool.reach.reach import Access
    from image_builder.pool.rollout import Options

    kinds: tuple[Callable[[Path], HostKeys], ...] = (CertificateAuthority, Pinned, FirstUse)
    chosen = [kind(file.absolute()) for kind, file in zip(kinds, login[2:], strict=True) if file]
    if len(chosen) != 1:
        raise UsageError(
            "give exactly one of --host-ca, --known-hosts and --trust-first-use",
            hint="a host whose key nobody vouches for is not talked to",
        )
    if login.key is None:
        raise UsageError(
            "give the private key with --key", hint="no agent is asked, and no key is looked for"
        )
    reports = reports or plan.with_name(f"{plan.name}.reports")
    access = Access(login.user, login.key.absolute(), chosen[0])
    return Options(plan=plan, access=access, reports=reports.absolute(), **more)


def _drive(options: Options, *, as_json: bool) -> int:
    from image_builder.cli.pool.table import LiveTable
    from image_builder.pool import rollout

    ready = rollout.prepare(options)
    _warn(ready)
    told, number = rollout.drive(ready, LiveTable)
    return _show(told, number, _hint(told["counts"]), as_json=as_json)


def _warn(ready: Ready) -> None:
    for line in ready.warnings:
        sys.stderr.write(f"{line}\n")


def _show(told: dict[str, Any], signal_number: int, hint: str, *, as_json: bool) -> int:
    """Print a report; return the status of it: 0 where every host is fine."""
    import signal

    from image_builder.cli import failure
    from image_builder.pool.show.report import text

    show(told, text(told), as_json=as_json)
    bad = sum(count for name, count in told["counts"].items() if name != "ok")
    if signal_number:
        return EXIT_INTERRUPTED if signal_number == signal.SIGINT else 128 + signal_number
    if not bad:
        return 0
    error = PoolError(f"{told['state']}: {bad} of {told['hosts']} hosts are not up", hint=hint)
    sys.stderr.write(f"{failure.text(error)}\n")  # the result was printed already: it stays the only document
    return error.exit_code


def _hint(counts: Mapping[str, int]) -> str:
    """Return what to do after a run that left hosts behind: who failed is taken up again by ``--retry`` alone."""
    failed = any(counts.get(name, 0) for name in _FAILED)
    return "image-builder pool report PLAN, mend what failed, then pool resume PLAN" + (
        " --retry" if failed else ""
    )


_FAILED = ("refused", "timeout", "auth", "host key", "sudo", "dropped", "failed")
