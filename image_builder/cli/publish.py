"""``image-builder publish``: take a build to an Azure Compute Gallery."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from image_builder.cli import render
from image_builder.cli.command import (
    AsJson,
    Image,
    Inventories,
    Output,
    VaultIds,
    read_inventory,
    register,
    show,
)
from image_builder.errors import DefinitionError, Problem, UsageError
from image_builder.text import columns, human_bytes

if TYPE_CHECKING:
    from image_builder.gallery.artefact import Artefact
    from image_builder.gallery.azure import Service
    from image_builder.gallery.plan import Plan, Target

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
Endpoint = Annotated[
    str | None,
    typer.Option(
        "--endpoint", metavar="URL", help="Azure Resource Manager  [default: that of AZURE_SDK_CLOUD_CONF]"
    ),
]


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
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> int:
    """Publish a build. The same command again goes on where a run was killed, and ends at once when all is there.

    Example:

        image-builder publish run worker
    """
    from image_builder.gallery import run as publishing
    from image_builder.gallery.journal import open_journal

    target = _target(image, inventory, vault)
    with render.monitor(f"publish {image}") as monitor:
        artefact = _artefact(output, image, build, unverified=bool(unverified))
        with (
            open_journal(_journal(output, target, artefact)) as journal,
            _service(target, endpoint) as service,
        ):
            made_plan = publishing.plan(service, target, artefact, journal.records, unverified)
            result = publishing.Run(made_plan, service, journal, monitor).perform()
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
    return f"{columns(rows)}\n{plan.target.version(plan.version)}"
