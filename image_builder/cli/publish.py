"""``image-builder publish``: publish a build to an Azure Compute Gallery."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
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
    Mirror,
    Output,
    StoreDir,
    VaultIds,
    extensions,
    host_settings,
    read_inventory,
    register,
    show,
)
from image_builder.errors import DefinitionError, Problem, UsageError
from image_builder.settings import DEFAULT_STORE
from image_builder.text import columns, human_bytes, human_seconds

if TYPE_CHECKING:
    from image_builder.gallery.artefact import Artefact
    from image_builder.gallery.azure import Service
    from image_builder.gallery.disks import UploadDisk, UploadImage
    from image_builder.gallery.packages import Behind
    from image_builder.gallery.plan import Plan, Target
    from image_builder.gallery.versions import Version

app = typer.Typer(
    help="Publish an image to an Azure Compute Gallery, as a version that stays out of `latest` until you promote it."
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
Because = Annotated[str, typer.Option("--because", metavar="REASON", help="the reason, kept in a tag")]


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
    """Show every request that `publish run` would send, and its bytes. Changes nothing.

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
        str,
        typer.Option(
            "--sign-key",
            metavar="KEY",
            help="sign a statement about the build: a private key's file (PEM), or the URI of a key of a KMS or an HSM "
            "(the inventory's image_gallery.sign_key)",
        ),
    ] = "",
    public_key: Annotated[
        Path | None,
        typer.Option("--public-key", metavar="FILE", help="public key (PEM) of a KMS's or an HSM's key"),
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="discard what was uploaded, and start over")
    ] = False,
    replace_failed: Annotated[
        bool, typer.Option("--replace-failed", help="first delete the version if it failed in every region")
    ] = False,
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> int:
    """Publish a build. A rerun resumes an interrupted run, and does nothing if everything is published.

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
        with open_journal(path, _say_who) as journal, _service(target, endpoint) as service:
            if key := sign_key or target.settings.sign_key:
                public = public_key or target.public_key
                envelope = statements.sign(statements.statement(artefact), key, public)
                files.write(statement_of(path), envelope)
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
    proof: Annotated[
        Path | None,
        typer.Option("--proof", metavar="REPORT", help="the report of a rollout of it: `pool report --json`"),
    ] = None,
    because: Because = "",
    inventory: Inventories = None,
    vault: VaultIds = None,
    public_key: Annotated[
        Path | None,
        typer.Option(
            "--public-key",
            metavar="FILE",
            help="require the statement that this key (PEM) has signed (the inventory's image_gallery.public_key)",
        ),
    ] = None,
    output: Output = Path("output"),
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> int:
    """Add a version to `latest`. Refuses versions that are foreign, unverified, partially replicated or expired.

    It needs the report of a finished rollout of its build, in which every host is ok and the suite verified some of
    them; or, without one, a reason.

    Example:

        image-builder publish promote worker 2026.1125.0 --proof report.json
    """
    from image_builder.gallery import proof as proofs
    from image_builder.gallery import survey, versions

    if bool(proof) == bool(because):
        raise UsageError("give exactly one of --proof and --because")
    target = _target(image, inventory, vault)
    with _service(target, endpoint) as service:
        survey.require_rights(service, target, "promote")
        current = versions.find(service, target, version)
        if key := public_key or target.public_key:
            _require_statement(target, output, current, key)
        if proof:
            because = proofs.require(proof, current)
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
    """Remove a version from `latest`, and end its life now. Doesn't touch machines that run it.

    Example:

        image-builder publish withdraw worker 2026.1125.0 --because "its driver loses GPUs"
    """
    from image_builder.gallery import survey, versions

    target = _target(image, inventory, vault)
    with _service(target, endpoint) as service:
        survey.require_rights(service, target, "withdraw")
        versions.withdraw(service, target, version, because, datetime.now(UTC))
    show({"version": target.version(version), "in_latest": False}, f"{version} is withdrawn", as_json=as_json)
    return 0


Subscriptions = Annotated[
    list[str] | None,
    typer.Option(
        "--subscription",
        metavar="ID",
        help="search this subscription for machines; repeatable  [default: the gallery's]",
    ),
]


@register(app)
def prune(
    image: Image,
    inventory: Inventories = None,
    vault: VaultIds = None,
    subscription: Subscriptions = None,
    delete: Annotated[
        bool, typer.Option("--delete", help="delete what is unused instead of only showing it")
    ] = False,
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> int:
    """Show which versions and uploads are unused, and why the others are kept; --delete deletes the unused.

    A version is unused if `publish` made it, it isn't the newest, isn't in `latest`, is past its end of life, and no
    scale set or machine of the subscriptions uses it. An upload disk is unused if it is older than a day, no machine
    has it, and no version is still being copied from it; its managed image is deleted with it. If anything can't be
    read, nothing is deleted.

    Example:

        image-builder publish prune worker --subscription 8d10da13-8125-4ba9-a717-bf7490507b3d
    """
    from image_builder.gallery import disks, survey, uses, versions
    from image_builder.gallery import prune as pruning

    target = _target(image, inventory, vault)
    with _service(target, endpoint) as service:
        lacking = survey.lacking_rights(service, target, "prune --delete" if delete else "prune")
        known_uses = uses.read(service, target, subscription or [target.settings.subscription], lacking)
        current, images = versions.read(service, target), disks.read_images(service, target)
        uploads = disks.read(service, target)
        now = datetime.now(UTC)
        verdicts = pruning.judge(current, known_uses, now)
        disk_verdicts = pruning.judge_disks(uploads, current, now)
        image_verdicts = pruning.judge_images(images, disk_verdicts, current)
        left: list[UploadDisk | UploadImage] = [*images, *uploads]
        left_verdicts = [*image_verdicts, *disk_verdicts]
        if delete:
            for verdict in filter(lambda v: v.is_unused, verdicts):
                versions.delete(service, target, verdict.name)
            for upload, verdict in zip(left, left_verdicts, strict=True):
                if verdict.is_unused:
                    disks.delete(service, upload)
    gone = "deleted" if delete else "unused"
    rows = [
        (v.kind, v.name, gone if v.is_unused else "kept", "; ".join(v.reasons))
        for v in (*verdicts, *left_verdicts)
    ]
    result = {
        "deleted": delete,
        "versions": [verdict.as_json() for verdict in verdicts],
        "disks": [verdict.as_json() for verdict in disk_verdicts],
        "images": [verdict.as_json() for verdict in image_verdicts],
    }
    show(result, columns([("", "name", "", "because"), *rows]), as_json=as_json)
    return 0


@register(app, isolated=lambda **options: options["packages"] and os.geteuid() == 0)
def age(
    image: Image,
    inventory: Inventories = None,
    vault: VaultIds = None,
    subscription: Subscriptions = None,
    days: Annotated[int, typer.Option("--days", metavar="N", help="the oldest age allowed")] = 90,
    packages: Annotated[
        bool,
        typer.Option("--packages", help="also compare packages with the current repositories"),
    ] = False,
    output: Output = Path("output"),
    store: StoreDir = DEFAULT_STORE,
    mirror: Mirror = None,
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> int:
    """Show how old the versions are that machines run; exit status 1 if one is too old or past its end of life.

    With --packages, the status is also 1 if a version's packages have newer versions in the image's repositories: the
    command reads its build's lock from the output directory, resolves today's packages, and changes nothing.

    Example:

        image-builder publish age worker --days 60 --packages
    """
    from image_builder.gallery import age as ages
    from image_builder.gallery import survey, uses, versions

    target = _target(image, inventory, vault)
    with _service(target, endpoint) as service:
        lacking = survey.lacking_rights(service, target, "age")
        known_uses = uses.read(service, target, subscription or [target.settings.subscription], lacking)
        current = versions.read(service, target)
    compare = {"behind": _comparison(image, inventory, vault, output, store, mirror)} if packages else {}
    table = ages.ages(current, known_uses, datetime.now(UTC), days, **compare)
    rows = [("scale set or machine", "version", "machines", "days", "")]
    rows += [(a.owner, a.version, str(a.machines), str(a.days), a.problem) for a in table]
    result = {"definition": target.definition, "ages": [a.as_json() for a in table]}
    show(result, columns(rows), as_json=as_json)
    return 1 if any(a.problem for a in table) else 0


def _comparison(
    image: str, inventory: list[Path] | None, vault: Any, output: Path, store: Path, mirror: str | None
) -> Callable[[Version], Behind]:
    """Return a function that compares a version's packages with today's, which are resolved as `lock` does it."""
    from image_builder.bake.lock.resolve import resolve_lock
    from image_builder.bake.plan.resolve import requirements
    from image_builder.gallery import packages
    from image_builder.system import host

    host.check_writable(store)
    definition = read_inventory(inventory, vault).define(image)
    settings = host_settings(store, mirror=mirror, vault=vault)
    with render.monitor(f"publish age {image}") as monitor:
        today = resolve_lock(definition, requirements(definition, extensions()), settings, monitor)
    groups = ("base", *definition.layers)
    return lambda version: packages.behind(output.absolute() / image, version, today, groups)


def _say_who(processes: list[int]) -> None:
    who = f"process {processes[0]}" if processes else "another process"
    print(f"waiting for {who}, which publishes this build", file=sys.stderr)


def _require_statement(target: Target, output: Path, version: Version, key: Path) -> None:
    """Raise PublishError unless there is a statement about the version's build and bytes, signed by the key."""
    from image_builder.gallery import statement as statements
    from image_builder.gallery.journal import journal_of, statement_of

    settings = target.settings
    journal = journal_of(output.absolute(), settings.gallery, settings.definition, version.build)
    envelope = statements.read(statement_of(journal))
    statements.require_same(statements.verified(envelope, key), version.sha256, version.build)


def _target(image: str, inventory: list[Path] | None, vault: Any) -> Target:
    from image_builder.gallery.plan import Target

    definition = read_inventory(inventory, vault).define(image)
    if definition.gallery is None:
        raise DefinitionError(
            [Problem("", "image_gallery", "is missing: it says where to publish")],
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
    lines = [f"the upload takes at least {human_seconds(estimate['seconds'])}: such a disk isn't faster"]
    if "month" in estimate:
        lines.append(
            f"replicas cost {estimate['month']:.2f} a month, copying them {estimate['once']:.2f} once"
        )
    return "\n".join([columns(rows), *lines, plan.target.version(plan.version)])
