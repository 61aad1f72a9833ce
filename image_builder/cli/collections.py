"""The command ``collections``: install what the repository's ``requirements.yml`` requires, as its lock pins it."""

from __future__ import annotations

from typing import Annotated

import typer

from image_builder.cli.command import AsJson, register, show
from image_builder.settings import Settings, project_root
from image_builder.text import columns

app = typer.Typer()


@register(app)
def collections(
    update: Annotated[
        bool, typer.Option("--update", help="lock the newest versions that requirements.yml allows")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Install this repository's Ansible collections, exactly as its collections.lock lists them.

    The first run creates the lock from requirements.yml; commit it. Servers and tokens come from your Ansible settings.

    Example:

        image-builder collections --update
    """
    from image_builder.bake.lock.collections import install

    lock, installed = install(project_root(), Settings().python, update=update)
    rows = [
        (c.name, c.version, "installed" if c.name in installed else "there already") for c in lock.collections
    ]
    result = {"collections": [{"name": n, "version": v, "installed": n in installed} for n, v, _ in rows]}
    show(result, columns(rows), as_json=as_json)
    return 0
