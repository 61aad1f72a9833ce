"""The version that a roll brings its hosts to, and all reasons against it, found before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from image_builder.errors import DefinitionError, ImageBuilderError, Problem, PublishError
from image_builder.gallery import statement as statements
from image_builder.pool.plan.model import Host, Target
from image_builder.pool.scale_set.client import Client
from image_builder.pool.scale_set.model import Version
from image_builder.pool.scale_set.refusals import refusals, retirement
from image_builder.text import short_list


def read_target(
    client: Client,
    hosts: Iterable[Host],
    version: str,
    *,
    more: Iterable[str] = (),
    prove: Callable[[Version], str] = lambda _: "",
    force_ephemeral: bool = False,
    warn: Callable[[str], object] = lambda _: None,
) -> Target:
    """Return the target of a roll, as Azure has it now: for the scale sets of these hosts, and ``more`` of them.

    ``prove`` returns a version's signed statement, or raises. ``warn`` is called with concerns that don't prevent it.

    Raises DefinitionError with every reason against it, FetchError if Azure can't be read.
    """
    hosts = list(hosts)
    problems: list[Problem] = []
    for variable in ("scale_set_id", "instance", "vm_id"):
        if without := sorted(host.name for host in hosts if not getattr(host, variable)):
            reason = f"isn't known of {short_list(without)}: a roll needs an inventory of `pool snapshot`"
            problems.append(Problem("", variable, reason))
    target = client.version(version)
    if target is None:
        problems.append(Problem("", "--to", f"there is no version {version}"))
    statement = ""
    if target:
        try:
            statement = prove(target)
        except ImageBuilderError as error:
            problems.append(Problem("", "--to", error.message))
    before, now = dict[str, str](), datetime.now(UTC)
    for path in sorted({*more, *(host.scale_set_id for host in hosts if host.scale_set_id)}):
        scale_set = client.scale_set(path)
        before[path] = scale_set.image
        # Without it no request's result can be told, which the first canary would find out.
        if unknown := [instance.id for instance in client.instances(path) if not instance.is_known]:
            reason = f"Azure doesn't say which version these instances run: {short_list(unknown)}"
            problems.append(Problem(path, "--to", reason))
        if target:
            present = client.version(scale_set.image) if scale_set.is_pinned else None
            wrong = refusals(scale_set, present, target, now, force_ephemeral=force_ephemeral)
            problems += [Problem(path, "--to", reason) for reason in wrong]
            for reason in retirement(present, now) if present else ():
                warn(f"{reason}; `pool rollback` to it will be refused")
            if present and not present.is_protected:
                warn(
                    f"{present.id} has no blockDeletionBeforeEndOfLife: if it is deleted there is no way back"
                )
    if problems or target is None:
        raise DefinitionError(problems, hint="nothing was changed")
    return Target(version=target.id, build=target.build, before=before, statement=statement)


def spelled_as_planned(hosts: Sequence[Host], target: Target) -> tuple[Host, ...]:
    """Return hosts with the ids of their scale sets as a plan spells them: Resource Manager ignores their case."""
    spellings = {path.lower(): path for path in target.before} | {path: path for path in target.before}

    def spelled(host: Host) -> Host:
        path = host.scale_set_id
        return host.model_copy(
            update={"scale_set_id": spellings.get(path) or spellings.get(path.lower(), path)}
        )

    return tuple(map(spelled, hosts))


def require_planned_sets(hosts: Sequence[Host], target: Target) -> None:
    """Raise DefinitionError for hosts of scale sets that a plan doesn't have."""
    if others := [host.name for host in hosts if host.scale_set_id not in target.before]:
        reason = f"the scale sets of these hosts aren't in the plan: {short_list(others)}"
        cure = "leave them out of the inventory until this roll is over, then make another plan"
        raise DefinitionError([Problem("", "pool_scale_set_id", f"{reason}; {cure}")])


def require_proof(version: Version, envelope: bytes, key: Path) -> None:
    """Raise PublishError unless a key (PEM) signed a statement about a version: its bytes, its build, both verdicts."""
    statements.require_same(statements.verified(envelope, key), version.sha256, version.build)
    if version.unverified:
        raise PublishError(f"version {version.name} was published unverified: {version.unverified}")


def changes(client: Client, target: Target, key: Path | None) -> list[str]:
    """Return the reasons against a planned target, as Azure has it now; raises FetchError."""
    version = client.version(target.version)
    if version is None:
        return [f"there is no version {target.version} any more"]
    problems = []
    if version.build != target.build:
        problems.append(f"version {version.name} is of build {version.build or '(none)'}, not {target.build}")
    if version.withdrawn:
        problems.append(f"version {version.name} was withdrawn: {version.withdrawn}")
    if key:
        try:
            require_proof(version, target.statement.encode(), key)
        except PublishError as error:
            problems.append(error.message)
    return problems
