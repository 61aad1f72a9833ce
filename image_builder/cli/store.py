"""``image-builder store``: garbage collection, integrity checks, and exports for runners without a disk."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from image_builder.cli import render
from image_builder.cli.command import (
    AsJson,
    Inventories,
    StoreDir,
    complete_images,
    extensions,
    host_settings,
    inventory_paths,
    register,
    show,
)
from image_builder.errors import StoreError
from image_builder.settings import DEFAULT_STORE
from image_builder.text import columns, human_bytes

if TYPE_CHECKING:
    from image_builder.bake.export import Transfer
    from image_builder.bake.store import Store

app = typer.Typer(
    help="Maintain the store.\n\nExample:\n\n\b\n  image-builder store gc --keep 2",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@register(app)
def gc(
    keep: Annotated[
        int, typer.Option("--keep", metavar="N", min=0, help="keep the last N builds of each image")
    ],
    downloads: Annotated[
        bool,
        typer.Option("--downloads", help="also remove downloads that no image's latest lock contains"),
    ] = False,
    store: StoreDir = DEFAULT_STORE,
    as_json: AsJson = False,
) -> int:
    """Remove stages that the images' last builds don't need.

    Example:

        image-builder store gc --keep 2
    """

    def told() -> None:
        print("waiting for users of the store: builds, and the lab until `lab down`", file=sys.stderr)

    removed = _existing_store(store).gc(keep, told, downloads=downloads)
    files = f" and {len(removed.downloads)} downloads" if downloads else ""
    text = f"{len(removed.stages)} stages{files} removed, {human_bytes(removed.bytes)} freed"
    result = {"removed": removed.stages, "downloads": removed.downloads, "bytes": removed.bytes}
    show(result, text, as_json=as_json)
    return 0


@register(app)
def verify(store: StoreDir = DEFAULT_STORE, as_json: AsJson = False) -> int:
    """Hash everything in the store and report damage. Package control files are repaired.

    Example:

        image-builder store verify
    """
    kept = _existing_store(store)
    damages = kept.verify()
    rows = [(d.name, d.id[:12], d.difference + (", repaired" if d.repaired else "")) for d in damages]
    text = columns(rows) or f"{len(kept.ids())} stages, no damage"
    result = {
        "stages": len(kept.ids()),
        "damages": [
            {"id": d.id, "name": d.name, "what": d.difference, "repaired": d.repaired} for d in damages
        ],
    }
    show(result, text, as_json=as_json)
    if damages:
        print(f"error: {len({d.id for d in damages})} damaged objects in {store}", file=sys.stderr)
        if all(d.repaired for d in damages):
            print("hint: all of them were repaired; check the disk", file=sys.stderr)
        else:
            print("hint: remove the damaged objects and build again", file=sys.stderr)
        return StoreError.exit_code
    return 0


@register(app, isolated=True)
def export(
    images: Annotated[
        list[str],
        typer.Argument(metavar="IMAGE...", help="images that were built", autocompletion=complete_images),
    ],
    directory: Annotated[
        Path, typer.Option("--to", metavar="DIR", help="an existing export to update, or a new directory")
    ],
    everything: Annotated[
        bool, typer.Option("--all", help="all stages and downloads of the builds, compilers included")
    ] = False,
    inventory: Inventories = None,
    store: StoreDir = DEFAULT_STORE,
    as_json: AsJson = False,
) -> int:
    """Export what the images' next builds need, as files that any user can copy.

    Enough to rebuild unchanged images instantly, and a changed last layer. DIR is brought up to date: existing files
    aren't written again, and files no longer needed are removed.

    Example:

        image-builder store export --to /srv/cache worker
    """
    from image_builder.bake import export as exporting
    from image_builder.bake.plan.resolve import kinds
    from image_builder.bake.records import living_owner
    from image_builder.definition.model import record_names
    from image_builder.settings import project_root

    _existing_store(store)
    paths, project, settings = inventory_paths(inventory), project_root(), host_settings(store)
    names = [record_names(image, paths, project) for image in images]
    with render.monitor(f"export {' '.join(images)}") as monitor:
        for other in {living_owner(name, project, settings) for name, *_ in names} - {None}:
            monitor.note(f"{other} has the same id as this repository: the builds of both count")
        transfer = exporting.export(
            {name: former for name, *former in names},
            directory.absolute(),
            settings,
            kinds(extensions()),
            monitor,
            everything=everything,
        )
    return _show(transfer, f"{directory}: ", "written", as_json=as_json)


@register(app, name="import", isolated=True)
def import_(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="a directory that `store export` wrote")],
    store: StoreDir = DEFAULT_STORE,
    as_json: AsJson = False,
) -> int:
    """Bring the stages, downloads and locks of an export into the store.

    Every file is compared with its digest first. Files that the store already has stay unchanged. Import only from
    sources you trust with your images.

    Example:

        image-builder store import /srv/cache
    """
    from image_builder.bake import export as exporting
    from image_builder.bake.store import Store
    from image_builder.system import host

    host.check_host(store)
    with render.monitor(f"import {directory}") as monitor:
        transfer = exporting.take_over(directory.absolute(), Store(store.absolute()), monitor)
    return _show(transfer, "", "imported", as_json=as_json)


def _show(transfer: Transfer, place: str, action: str, *, as_json: bool) -> int:
    """Print what was copied between a store and an export."""
    text = (
        f"{place}{len(transfer.stages)} stages and {len(transfer.downloads)} downloads {action}, "
        f"{human_bytes(transfer.bytes)}; {transfer.present} stages already there"
    )
    show(dataclasses.asdict(transfer), text, as_json=as_json)
    return 0


def _existing_store(path: Path) -> Store:
    from image_builder.bake.store import Store

    if not (path / "objects").is_dir():
        raise StoreError(f"no store at {path}", hint="image-builder build creates one")
    return Store(path.absolute())
