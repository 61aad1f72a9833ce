"""``image-builder store``: garbage collection and integrity checks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from image_builder.cli.command import AsJson, StoreDir, register, show
from image_builder.errors import StoreError
from image_builder.settings import DEFAULT_STORE
from image_builder.text import columns, human_bytes

if TYPE_CHECKING:
    from image_builder.bake.store import Store

app = typer.Typer(
    help="Look after the store.\n\nExample:\n\n\b\n  image-builder store gc --keep 2",
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


def _existing_store(path: Path) -> Store:
    from image_builder.bake.store import Store

    if not (path / "objects").is_dir():
        raise StoreError(f"no store at {path}", hint="image-builder build creates one")
    return Store(path.absolute())
