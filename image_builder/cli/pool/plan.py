"""The commands for pools: plan a rollout, and look at one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from image_builder.cli.command import AsJson, Endpoint, VaultIds, completion, connect, register, show
from image_builder.errors import ImageBuilderError, PoolError, UsageError
from image_builder.settings import Settings
from image_builder.text import columns, human_seconds

if TYPE_CHECKING:
    from image_builder.pool.plan.inventory import Fleet
    from image_builder.pool.plan.model import Host, Target
    from image_builder.pool.plan.plan import Plan
    from image_builder.pool.plan.policy import Policy
    from image_builder.pool.run.records import Record
    from image_builder.pool.run.state import Progress
    from image_builder.pool.scale_set.model import Version
    from image_builder.pool.show.calls import Call

app = typer.Typer()

# A report that fits a terminal's history, whatever the size of the fleet.
_MOST_LINES = 200
Inventory = Annotated[
    list[Path],
    typer.Option(
        "-i", "--inventory", metavar="PATH", help="an inventory, as in Ansible; repeatable, required"
    ),
]
USER_HELP = "log in to the hosts as NAME  [default: ansible_user, else root]"
PublicKey = Annotated[
    Path | None,
    typer.Option(
        "--public-key", metavar="FILE", help="roll only: the key (PEM) that signed the version's statement"
    ),
]
Statement = Annotated[
    Path | None,
    typer.Option(
        "--statement",
        metavar="FILE",
        help="the version's statement  [default: where `publish run` wrote it, below output]",
    ),
]
Unproven = Annotated[
    str,
    typer.Option(
        "--unproven", metavar="REASON", help="roll without a statement; the report shows the reason"
    ),
]
ToVersion = Annotated[
    str | None,
    typer.Option(
        "--to", metavar="VERSION", help="roll running hosts to this gallery image version, by its id"
    ),
]
Deadline = Annotated[
    str,
    typer.Option(
        "--deadline",
        metavar="TIME",
        help="roll only: evict jobs after this time even if their owners didn't allow it",
    ),
]
ClusterOfRoll = Annotated[
    Path | None,
    typer.Option("--kubeconfig", metavar="FILE", help="roll only: also check the rights in this cluster"),
]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="the file that `pool plan` wrote")]


def _names(options: Mapping[str, Any], *kinds: str) -> list[str]:
    from image_builder.pool.plan.source import opened

    paths = [path.absolute() for path in options["inventory"]]
    with opened(paths, options["vault"] or ()) as source:
        return [name for kind in kinds for name in getattr(source.manager, kind)]


complete_groups = completion(lambda options: _names(options, "groups"))
complete_hosts = completion(lambda options: _names(options, "groups", "hosts"))


@register(app)
def plan(
    pools: Annotated[
        list[str],
        typer.Argument(metavar="POOL...", help="groups of the inventory", autocompletion=complete_groups),
    ],
    inventory: Inventory,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="where to write the plan")],
    policy: Annotated[
        Path | None,
        typer.Option("--policy", metavar="FILE", help="sizes of waves, rates, budgets, deadlines, as YAML"),
    ] = None,
    to: ToVersion = None,
    public_key: PublicKey = None,
    statement: Statement = None,
    unproven: Unproven = "",
    deadline: Deadline = "",
    calls: Annotated[
        bool,
        typer.Option(
            "--calls", help="roll only: show each request that the run sends to Azure and the cluster"
        ),
    ] = False,
    kubeconfig: ClusterOfRoll = None,
    endpoint: Endpoint = None,
    vault: VaultIds = None,
    as_json: AsJson = False,
) -> int:
    """Plan which hosts come up, or get another image, in which wave, and what stops the run. Touches no host.

    Example:

        image-builder pool plan -i inventories/azure_vmss pools --out pools.plan.json
    """
    from image_builder.pool.plan.inventory import read_fleet
    from image_builder.pool.plan.plan import Faults, make_plan, save
    from image_builder.pool.show.calls import rows as call_rows

    _check_version(to, {"--calls": calls, "--deadline": deadline, "--kubeconfig": kubeconfig})
    faults = Faults()
    chosen = faults.collect("--policy", lambda: _policy(policy))
    if chosen is None:
        faults.collect("inventory", lambda: read_fleet(inventory, pools, vault or ()))
        raise faults.all()
    fleet = read_fleet(inventory, pools, vault or ())
    chosen = _rolling(chosen, deadline) if to else chosen
    warnings = dict[str, None]()
    proof = Proof(public_key, statement, unproven)
    target = _target(fleet.hosts, to, chosen, endpoint, proof, kubeconfig, warnings.setdefault)
    rollout_plan = make_plan(fleet.inventory, fleet.pools, fleet.hosts, chosen, target=target)
    keep_begun(out, rollout_plan)
    stuck = _never_empty(rollout_plan, kubeconfig) if target and kubeconfig else {}
    if stuck:
        warnings.setdefault(_stuck_text(rollout_plan, stuck))
    with writing(out):
        save(rollout_plan, out)
    result = summary(out, rollout_plan, fleet) | {"warnings": list(warnings), "never_empty": stuck}
    lines = [*fleet.warnings, *warnings, plan_text(out, rollout_plan)]
    if calls:
        listed = _calls(rollout_plan, endpoint)
        result["calls"] = [call.as_json() for call in listed]
        lines.append(columns(call_rows(listed)))
    show(result, "\n".join(lines), as_json=as_json)
    return 0


def _never_empty(rollout_plan: Plan, kubeconfig: Path) -> dict[str, str]:
    """Return the hosts that the roll can't empty, and why not. Raises PoolError if the cluster doesn't answer."""
    from image_builder.node.errors import NodeError
    from image_builder.pool.evictions import never_empty

    try:
        with connect(kubeconfig, "image-builder") as client:
            return never_empty(client, rollout_plan, time.time())
    except NodeError as error:
        raise PoolError(error.message, hint="the rights that it needs are in deploy/roll.yml") from error


def _stuck_text(rollout_plan: Plan, stuck: Mapping[str, str]) -> str:
    from image_builder.text import short_list

    mode = rollout_plan.policy.rolls.drain.mode if rollout_plan.policy.rolls else ""
    host, pod = next(iter(stuck.items()))
    remedy = (
        "" if mode == "evict" else "; mode `evict` evicts those without devices that a controller recreates"
    )
    return (
        f"{len(stuck)} of {len(rollout_plan.hosts)} hosts have pods that never end, and are skipped unless somebody"
        f" deletes those ({short_list(list(stuck))}; on {host}: {pod}){remedy}"
    )


def _check_version(to: str | None, of_rolls: Mapping[str, object]) -> None:
    """Raise UsageError if an option that is only for rolls is given without a version to roll to."""
    if to is None and (given := [option for option, value in of_rolls.items() if value]):
        raise UsageError(f"{given[0]} is for a roll", hint="give its version with --to")


def _rolling(policy: Policy, deadline: str) -> Policy:
    """Return the policy of a roll. Raises UsageError if the deadline isn't a valid time."""
    from pydantic import ValidationError

    from image_builder.pool.plan.policy import Roll

    policy = policy.model_copy(update={"mode": "roll"})
    if not deadline:
        return policy
    try:
        roll = Roll.model_validate({**dict(policy.rolls or Roll()), "deadline": deadline})
    except ValidationError as error:
        raise UsageError(
            f"--deadline {deadline}: must be a time with its zone, such as 2026-11-27T08:00:00Z"
        ) from error
    return policy.model_copy(update={"roll": roll})


def _calls(rollout_plan: Plan, endpoint: str | None) -> list[Call]:
    """Return the requests of a roll's run. Raises FetchError."""
    from image_builder.pool.scale_set.client import open_client
    from image_builder.pool.show.calls import calls

    with open_client(rollout_plan.hosts, endpoint) as client:
        return calls(rollout_plan, client)


def summary(out: Path, rollout_plan: Plan, fleet: Fleet) -> dict[str, Any]:
    return {
        "plan": os.fspath(out),
        "digest": rollout_plan.digest,
        "inventory": rollout_plan.inventory.digest,
        "hosts": len(rollout_plan.hosts),
        "skipped": {state: list(names) for state, names in fleet.skipped.items()},
        "pools": {pool.name: pool.hosts for pool in rollout_plan.pools},
        "waves": [
            {
                "name": w.name,
                "hosts": len(w.hosts),
                "slices": len(w.slices),
                "verify": len(w.verify),
                "budget": w.budget,
            }
            for w in rollout_plan.waves
        ],
        "budget": rollout_plan.budget,
        "max_unavailable": rollout_plan.max_unavailable,
        "unproven": rollout_plan.target.unproven if rollout_plan.target else "",
        "deadline": rollout_plan.deadline,
        "run": rollout_plan.run if rollout_plan.target else "",
        "rights": _rights(rollout_plan),
    }


def _rights(rollout_plan: Plan) -> dict[str, Any]:
    """Return the rights that the run of a roll needs, or nothing for any other plan."""
    from image_builder.pool import rights

    target, roll = rollout_plan.target, rollout_plan.policy.rolls
    if target is None or roll is None:
        return {}
    return {
        "azure": [right.as_json() for right in rights.of_target(target)],
        "cluster": [right.as_json() for right in rights.in_cluster(roll)],
    }


def _rights_text(rights: Mapping[str, Any]) -> str:
    from image_builder.text import short_list

    def place(scopes: Sequence[str]) -> str:
        groups: dict[str, list[str]] = {}
        for scope in scopes:
            groups.setdefault(scope.split("/")[4], []).append(scope.rpartition("/")[2])
        return "; ".join(f"{short_list(names)} in resource group {group}" for group, names in groups.items())

    azure = [(right["action"], place(right["scopes"])) for right in rights["azure"]]
    cluster = [
        (f"{right['verb']} {right['resource']}", right["group"], right["namespace"])
        for right in rights["cluster"]
    ]
    in_azure = columns([("rights in Azure", "on"), *azure])
    in_cluster = columns([("rights in the cluster", "API group", "namespace"), *cluster])
    return f"{in_azure}\n\n{in_cluster}"


class Proof(NamedTuple):
    """What the command line gives as proof that a version may be rolled, or as the reason without one."""

    public_key: Path | None
    statement: Path | None
    unproven: str


def _target(
    hosts: Sequence[Host],
    to: str | None,
    policy: Policy,
    endpoint: str | None,
    proof: Proof,
    kubeconfig: Path | None,
    warn: Callable[[str], object],
) -> Target | None:
    """Return what hosts are rolled to. Raises UsageError, or DefinitionError with everything that prevents it."""
    if to is None:
        if policy.mode == "roll":
            raise UsageError("a roll needs a target version", hint="give it with --to")
        return None
    if (proof.public_key is None) == (not proof.unproven):
        raise UsageError(
            "give exactly one of --public-key and --unproven",
            hint="a version is rolled with the statement that `publish run --sign-key` wrote",
        )
    from image_builder.pool.plan.plan import Faults
    from image_builder.pool.rights import in_azure, missing_in_azure, missing_in_cluster
    from image_builder.pool.scale_set.client import open_client
    from image_builder.pool.scale_set.target import read_target

    key, faults = proof.public_key, Faults()
    prove = partial(_statement, key=key, file=proof.statement) if key else lambda _: ""
    with open_client(hosts, endpoint) as client:
        sets = {host.scale_set_id for host in hosts if host.scale_set_id}
        faults.problems += missing_in_azure(client, in_azure(sets, [to]))
        if kubeconfig and policy.rolls:
            ask = partial(missing_in_cluster, kubeconfig, policy.rolls)
            faults.problems += faults.collect("--kubeconfig", ask) or ()
        is_forced = policy.rolls is not None and policy.rolls.force_ephemeral
        read = partial(read_target, client, hosts, to, prove=prove, force_ephemeral=is_forced, warn=warn)
        if faults.problems:
            # Everything else that prevents it is reported too, as far as it can be read.
            faults.collect("--to", read)
            raise faults.all()
        return read().model_copy(update={"unproven": proof.unproven})


def _statement(version: Version, key: Path, file: Path | None) -> str:
    """Return the statement that a key signed about a version. Raises PublishError if there is no valid one."""
    from image_builder.gallery import statement as statements
    from image_builder.gallery.journal import journal_of, statement_of
    from image_builder.pool.scale_set.target import require_proof

    definition = version.id.rpartition("/versions/")[0].split("/")
    gallery, image = definition[-3], definition[-1]
    envelope = statements.read(
        file or statement_of(journal_of(Settings().output, gallery, image, version.build))
    )
    require_proof(version, envelope, key)
    return envelope.decode()


def keep_begun(out: Path, new_plan: Plan) -> None:
    """Raise UsageError if another plan in this file has a run, which couldn't be resumed without that plan."""
    from image_builder.pool.run.journal import journal_of, read_journal
    from image_builder.pool.run.resume import past

    journal = journal_of(out)
    try:
        past(new_plan, read_journal(journal) if journal.exists() else [], str(journal))
    except ImageBuilderError as error:
        raise UsageError(
            f"{out} wasn't overwritten: its run has started ({error.message})",
            hint="write the new plan to another file",
        ) from error


def _policy(path: Path | None) -> Policy:
    """Return the policy in a file, or the default one. Raises DefinitionError with all problems."""
    from image_builder import strict_yaml as settings_file
    from image_builder.pool.plan.policy import Policy

    return settings_file.load(path, Policy, "policy") if path else Policy()


def plan_text(out: Path, rollout_plan: Plan) -> str:
    rows: list[tuple[str, ...]] = [("wave", "hosts", "slices", "verified", "may fail", "soak")]
    for w in rollout_plan.waves:
        counts = (len(w.hosts), len(w.slices), len(w.verify), w.budget)
        rows.append((w.name, *map(str, counts), human_seconds(w.soak_seconds)))
    total = (
        f"{len(rollout_plan.hosts)} hosts in {len(rollout_plan.waves)} waves; {rollout_plan.budget} may fail, "
        f"{rollout_plan.max_unavailable} may be unavailable at once; "
        f"joins at most {rollout_plan.policy.join_rate:g} hosts/s"
    )
    target = rollout_plan.target
    if rollout_plan.deadline:
        total += (
            f"\njobs that still run after {rollout_plan.deadline} are evicted, whatever their owners say: "
            f"`pool run` lists them, and requires --evict {rollout_plan.run}"
        )
    unproven = f"\n{target.version} is unproven: {target.unproven}" if target and target.unproven else ""
    rights = f"\n\n{_rights_text(_rights(rollout_plan))}\n" if target else ""
    return f"{columns(rows)}\n{total}{unproven}{rights}\n{out}"


@register(app)
def status(
    plan: PlanFile,
    kubeconfig: Annotated[
        Path | None,
        typer.Option(
            "--kubeconfig",
            metavar="FILE",
            help="the control plane: also show nodes that the gate took out for their health  [default: none]",
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Show the progress of a run; exit status 1 if it was stopped or interrupted.

    Example:

        image-builder pool status h100.plan.json
    """
    from image_builder.pool.show.report import text

    progress, _, result = read_run(plan)
    brief = {key: value for key, value in result.items() if key not in ("results", "slowest", "gates")}
    lines = [text(result)]
    if kubeconfig:
        brief["quarantined"] = quarantined = _quarantined(kubeconfig, progress.hosts.keys())
        lines += [f"{name}: {why}" for name, why in quarantined.items()]
    show(brief, "\n".join(lines), as_json=as_json)
    return 1 if result["state"] in ("stopped", "interrupted") else 0


def _quarantined(kubeconfig: Path, names: Collection[str]) -> dict[str, str]:
    from image_builder.node.errors import NodeError
    from image_builder.pool.steps.survey import quarantined_hosts

    try:
        with connect(kubeconfig, "image-builder-pool") as client:
            return quarantined_hosts(client, names)
    except NodeError as error:
        raise PoolError(error.message, hint="it needs the right to list nodes") from error


@register(app)
def report(
    plan: PlanFile,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="also write it as one HTML file")
    ] = None,
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="also write it as JUnit XML, for a CI")
    ] = None,
    list_all: Annotated[
        bool, typer.Option("--all", help="list every host, not only those that aren't ok")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Report which hosts of a run aren't ok, which failures are alike, and when each wave ran.

    Example:

        image-builder pool report h100.plan.json --html h100.html
    """
    from image_builder.pool.show.html import page
    from image_builder.pool.show.junit import junit as junit_document
    from image_builder.pool.show.report import rows, text

    progress, records, document = read_run(plan)
    if html:
        _write(html, page(progress, records, document).encode())
    if junit:
        _write(junit, junit_document(progress, document))
    lines = text(document)
    hosts = rows(document, None if list_all else _MOST_LINES - lines.count("\n") - 2)
    show(document, "\n".join(filter(None, (lines, columns(hosts)))), as_json=as_json)
    return 0


def _write(path: Path, data: bytes) -> None:
    """Replace a file in one step. Raises UsageError if the path can't be a file, OSError for other failures."""
    from image_builder.node import files

    with writing(path):
        files.write(path, data)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Run a block that writes to a path from the command line. Raises UsageError if it can't be written there."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, FileExistsError) as error:
        raise UsageError(f"can't write {path}: {error.strerror}") from error


def read_run(path: Path) -> tuple[Progress, list[Record], dict[str, Any]]:
    """Return the state, the records and the report of the run whose journal is next to a plan."""
    from image_builder.pool.plan import plan as plans
    from image_builder.pool.run.journal import in_use, journal_of, read_journal
    from image_builder.pool.run.resume import past
    from image_builder.pool.show.report import report as make_report

    rollout_plan = plans.load(path)
    journal = journal_of(path)
    records = read_journal(journal) if journal.exists() else []
    running = bool(records) and in_use(journal)
    progress = past(rollout_plan, records, str(journal))
    return progress, records, make_report(progress, records, running=running)
