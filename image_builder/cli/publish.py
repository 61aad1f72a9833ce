"""``image-builder publish``: take a build to an Azure Compute Gallery."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from image_builder.cli import render
from image_builder.cli.command import (
    AsJson,
    Endpoint,
    Image,
    Inventories,
    Output,
    VaultIds,
    read_inventory,
    register,
    show,
)
from image_builder.errors import DefinitionError, Problem, PublishError, UsageError
from image_builder.text import columns, human_bytes, human_seconds

if TYPE_CHECKING:
    from image_builder.gallery.artefact import Artefact
    from image_builder.gallery.azure import Service
    from image_builder.gallery.plan import Plan, Target
    from image_builder.gallery.versions import Version

app = typer.Typer(
    help="Publish an image to an Azure Compute Gallery, as a version that nobody gets by accident."
    "\n\nExample:\n\n\b\n  image-builder publish plan worker\n  image-builder publish run worker",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Build = Annotated[
    str, typer.Option("--build", metavar="ID", help="the first 12 digits of a build's id, or `latest`")
]
Unverified = Annotated[
    str,
    typer.Option(
        "--unverified", metavar="REASON", help="publish without passed checks; the reason is in the tags"
    ),
]
Name = Annotated[str, typer.Argument(metavar="VERSION", help="a version of the image's definition")]
Because = Annotated[str, typer.Option("--because", metavar="REASON", help="why; it is kept in a tag")]


@register(app)
def plan(
    image: Image,
    inventory: Inventories = None,
    vault: VaultIds = None,
    build: Build = "latest",
    output: Output = Path("output"),
    unverified: Unverified = "",
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> int:
    """Show every request that `publish run` would send, and its bytes. Nothing is changed.

    Example:

        image-builder publish plan worker --json
    """
    from image_builder.gallery import run as publishing
    from image_builder.gallery.journal import read_journal

    target = _target(image, inventory, vault)
    with render.monitor(f"publish plan {image}"):
        artefact = _artefact(output, image, build, unverified=bool(unverified))
        with _service(target, endpoint) as service:
            records = read_journal(_journal(output, target, artefact))
            made_plan = publishing.plan(service, target, artefact, records, unverified)
    show(made_plan.as_json(), _text(made_plan), as_json=as_json)
    return 0


@register(app)
def run(
    image: Image,
    inventory: Inventories = None,
    vault: VaultIds = None,
    build: Build = "latest",
    output: Output = Path("output"),
    unverified: Unverified = "",
    sign_key: Annotated[
        Path | None,
        typer.Option(
            "--sign-key", metavar="FILE", help="private key (PEM) to sign a statement about the build with"
        ),
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="throw away what was uploaded, and start over")
    ] = False,
    replace_failed: Annotated[
        bool, typer.Option("--replace-failed", help="first delete the version if it failed in every region")
    ] = False,
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> int:
    """Publish a build. The same command again goes on where a run was killed, and ends at once when all is there.

    Example:

        image-builder publish run worker
    """
    from image_builder.gallery import run as publishing
    from image_builder.gallery import statement as statements
    from image_builder.gallery.journal import open_journal, statement_of
    from image_builder.node import files

    target = _target(image, inventory, vault)
    with render.monitor(f"publish {image}") as monitor:
        artefact = _artefact(output, image, build, unverified=bool(unverified))
        path = _journal(output, target, artefact)
        with open_journal(path) as journal, _service(target, endpoint) as service:
            if sign_key:
                files.write(statement_of(path), statements.sign(statements.statement(artefact), sign_key))
            records = () if restart else journal.records
            made_plan = publishing.plan(service, target, artefact, records, unverified)
            work = publishing.Run(made_plan, service, journal, monitor, restart, replace_failed)
            result = work.perform()
    show(result, f"{result['version']}\nit isn't in `latest`", as_json=as_json)
    return 0


@register(app)
def status(
    image: Image,
    inventory: Inventories = None,
    vault: VaultIds = None,
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> int:
    """Show the versions of an image's definition: build, age, end of life, and each region's state.

    Example:

        image-builder publish status worker
    """
    from image_builder.gallery import versions

    target = _target(image, inventory, vault)
    with _service(target, endpoint) as service:
        found_versions = versions.read(service, target)
    rows = [("version", "build", "in latest", "published", "end of life", "regions")]
    rows += [
        (
            v.name,
            v.build or "-",
            "yes" if v.in_latest else "no",
            v.published[:10],
            v.end_of_life[:10],
            ", ".join(f"{name} {state}" for name, state in v.regions.items()),
        )
        for v in found_versions
    ]
    result = {"definition": target.definition, "versions": [v.as_json() for v in found_versions]}
    show(result, columns(rows), as_json=as_json)
    return 0


@register(app)
def promote(
    image: Image,
    version: Name,
    because: Because,
    inventory: Inventories = None,
    vault: VaultIds = None,
    public_key: Annotated[
        Path | None,
        typer.Option(
            "--public-key", metavar="FILE", help="require the statement that this key (PEM) has signed"
        ),
    ] = None,
    output: Output = Path("output"),
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> int:
    """Take a version into `latest`. Refused for one that isn't ours, verified, whole, or within its life.

    Example:

        image-builder publish promote worker 2026.1125.0 --because "rolled out to the canaries"
    """
    from image_builder.gallery import versions

    target = _target(image, inventory, vault)
    with _service(target, endpoint) as service:
        if public_key:
            _require_statement(target, output, versions.find(service, target, version), public_key)
        versions.promote(service, target, version, because, datetime.now(UTC))
    show({"version": target.version(version), "in_latest": True}, f"{version} is in latest", as_json=as_json)
    return 0


@register(app)
def withdraw(
    image: Image,
    version: Name,
    because: Because,
    inventory: Inventories = None,
    vault: VaultIds = None,
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> int:
    """Take a version out of `latest`, and end its life now. Machines that run it are not touched.

    Example:

        image-builder publish withdraw worker 2026.1125.0 --because "its driver loses GPUs"
    """
    from image_builder.gallery import versions

    target = _target(image, inventory, vault)
    with _service(target, endpoint) as service:
        versions.withdraw(service, target, version, because, datetime.now(UTC))
    show({"version": target.version(version), "in_latest": False}, f"{version} is withdrawn", as_json=as_json)
    return 0


Subscriptions = Annotated[
    list[str] | None,
    typer.Option(
        "--subscription",
        metavar="ID",
        help="where machines are looked for; repeatable  [default: the gallery's]",
    ),
]


@register(app)
def prune(
    image: Image,
    inventory: Inventories = None,
    vault: VaultIds = None,
    subscription: Subscriptions = None,
    delete: Annotated[
        bool, typer.Option("--delete", help="delete what is unused; else it is only shown")
    ] = False,
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> int:
    """Show which versions are proven unused, and what keeps the others; with --delete, delete the unused ones.

    Unused is a version of ours, not the newest, not in `latest`, past its end of life, that no scale set and no machine
    of the subscriptions uses. If any of them can't be read, nothing is deleted.

    Example:

        image-builder publish prune worker --subscription 8d10da13-8125-4ba9-a717-bf7490507b3d
    """
    from image_builder.gallery import prune as pruning
    from image_builder.gallery import uses, versions

    target = _target(image, inventory, vault)
    with _service(target, endpoint) as service:
        current = versions.read(service, target)
        known_uses = uses.read(service, target, subscription or [target.settings.subscription])
        verdicts = pruning.judge(current, known_uses, datetime.now(UTC))
        for verdict in verdicts:
            if delete and verdict.is_unused:
                versions.delete(service, target, verdict.version.name)
    gone = "deleted" if delete else "unused"
    rows = [(v.version.name, gone if v.is_unused else "kept", "; ".join(v.reasons)) for v in verdicts]
    result = {"deleted": delete, "versions": [verdict.as_json() for verdict in verdicts]}
    show(result, columns([("version", "", "because"), *rows]), as_json=as_json)
    return 0


@register(app)
def age(
    image: Image,
    inventory: Inventories = None,
    vault: VaultIds = None,
    subscription: Subscriptions = None,
    days: Annotated[int, typer.Option("--days", metavar="N", help="the age that is too old")] = 90,
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> int:
    """Show how old the versions are that machines run; exit status 1 for one too old or past its end of life.

    Example:

        image-builder publish age worker --days 60
    """
    from image_builder.gallery import age as ages
    from image_builder.gallery import uses, versions

    target = _target(image, inventory, vault)
    with _service(target, endpoint) as service:
        current = versions.read(service, target)
        known_uses = uses.read(service, target, subscription or [target.settings.subscription])
    table = ages.ages(current, known_uses, datetime.now(UTC), days)
    rows = [("scale set or machine", "version", "machines", "days", "")]
    rows += [(a.owner, a.version, str(a.machines), str(a.days), a.problem) for a in table]
    result = {"definition": target.definition, "ages": [a.as_json() for a in table]}
    show(result, columns(rows), as_json=as_json)
    return 1 if any(a.problem for a in table) else 0


def _require_statement(target: Target, output: Path, version: Version, key: Path) -> None:
    """Raise PublishError unless a statement about the version's build and bytes is there, signed by the key."""
    from image_builder.gallery import statement as statements
    from image_builder.gallery.journal import journal_of, statement_of

    settings = target.settings
    journal = journal_of(output.absolute(), settings.gallery, settings.definition, version.build)
    try:
        envelope = statement_of(journal).read_bytes()
    except OSError as error:
        hint = "it was written where the version was published, with --sign-key"
        raise PublishError(
            f"no signed statement: {statement_of(journal)}: {error.strerror}", hint=hint
        ) from error
    statements.require_same(statements.verified(envelope, key), version.sha256, version.build)


def _target(image: str, inventory: list[Path] | None, vault: Any) -> Target:
    from image_builder.gallery.plan import Target

    definition = read_inventory(inventory, vault).define(image)
    if definition.gallery is None:
        raise DefinitionError(
            [Problem("", "image_gallery", "is missing: it says where to publish to")],
            hint="docs/how-to/publish.md has an example",
        )
    return Target(definition.gallery)


def _artefact(output: Path, image: str, build: str, *, unverified: bool) -> Artefact:
    from image_builder.gallery import artefact

    folder = (output / image / build).resolve()
    if not folder.is_dir():
        raise UsageError(f"no such build: {folder}", hint=f"image-builder build {image}")
    return artefact.read(folder, output.absolute() / "boot" / folder.name, unverified=unverified)


def _journal(output: Path, target: Target, artefact: Artefact) -> Path:
    from image_builder.gallery.journal import journal_of

    settings = target.settings
    return journal_of(output.absolute(), settings.gallery, settings.definition, artefact.build)


def _service(target: Target, endpoint: str | None) -> Service:
    from image_builder.gallery.azure import Service

    return Service(
        target.settings.subscription,
        endpoint=endpoint,
        say=lambda message: print(message, file=sys.stderr),
    )


def _text(plan: Plan) -> str:
    from image_builder.gallery.plan import Pages

    rows = [("step", "requests", "bytes", "to")]
    for step in plan.steps:
        if isinstance(step, Pages):
            rows.append((step.step, str(len(step.ranges)), human_bytes(step.size), "Put Page"))
        else:
            rows.append((step.step, "1", "", f"{step.method} {step.path}"))
    estimate = plan.estimate()
    lines = [f"uploading takes {human_seconds(estimate['seconds'])} or more, by the speed of such a disk"]
    if "month" in estimate:
        lines.append(
            f"replicas cost {estimate['month']:.2f} a month, copying them {estimate['once']:.2f} once"
        )
    return "\n".join([columns(rows), *lines, plan.target.version(plan.version)])
