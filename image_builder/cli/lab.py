"""``image-builder lab``: keep the lab's registry running. Builds start and stop one of their own."""

from __future__ import annotations

import os
import sys

import typer

from image_builder.cli import render
from image_builder.cli.command import (
    AsJson,
    Inventories,
    Mirror,
    StoreDir,
    extensions,
    host_settings,
    read_inventory,
    register,
    show,
)
from image_builder.errors import DefinitionError, Problem
from image_builder.settings import DEFAULT_STORE

app = typer.Typer(
    help="Keep the lab's registry running.\n\nExample:\n\n\b\n  image-builder lab up",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@register(app)
def up(
    inventory: Inventories = None,
    store: StoreDir = DEFAULT_STORE,
    mirror: Mirror = None,
    as_json: AsJson = False,
) -> int:
    """Make the lab's images if needed, and serve them until `lab down`.

    Example:

        image-builder lab up
    """
    from image_builder.lab import service as lab_service
    from image_builder.system import host

    host.check_host(store)
    argv = [
        sys.executable,
        "-P",
        "-m",
        "image_builder.cli",
        "lab",
        "serve",
        "--store",
        os.fspath(store.absolute()),
    ]
    for path in inventory or []:
        argv += ["--inventory", os.fspath(path.absolute())]
    if mirror:
        argv += ["--mirror", mirror]
    with render.monitor("lab up") as monitor:
        state = lab_service.start(argv, store.absolute(), monitor)
    text = (
        f"{state.host} serves {', '.join(state.images)}\n"
        f"  /etc/hosts: {state.address} {state.host}\n  its CA: {state.ca}"
    )
    show(state.as_json(), text, as_json=as_json)
    return 0


@register(app, hidden=True, isolated=True)
def serve(inventory: Inventories = None, store: StoreDir = DEFAULT_STORE, mirror: Mirror = None) -> int:
    """Serve in the foreground; what `lab up` starts."""
    from image_builder.lab import service as lab_service

    handed_in = extensions()
    lab_inventory = read_inventory(inventory)
    definitions = (lab_inventory.define(name) for name in lab_inventory.images)
    definition = next((d for d in definitions if handed_in.supplier.serves(d)), None)
    if definition is None:
        message = "no image in this inventory preloads anything from the lab's registry"
        raise DefinitionError([Problem(os.fspath(lab_inventory.paths[0]), "image_preload", message)])
    with render.monitor("lab serve") as monitor:
        lab_service.serve(definition, host_settings(store, mirror=mirror), monitor, handed_in)
    return 0


@register(app)
def down(as_json: AsJson = False) -> int:
    """Stop the registry that `lab up` started. Its images stay in the store.

    Example:

        image-builder lab down
    """
    from image_builder.lab import service as lab_service

    stopped = lab_service.stop()
    show({"stopped": stopped}, "stopped" if stopped else "not running", as_json=as_json)
    return 0


@register(app)
def status(as_json: AsJson = False) -> int:
    """Show whether the lab's registry is running and answers; exits with 1 if it isn't.

    Example:

        image-builder lab status
    """
    from image_builder.lab import service as lab_service

    state = lab_service.running()
    if state is None:
        show({"running": False}, "not running", as_json=as_json)
        return 1
    answers = state.answers()
    text = f"{state.host} at {state.address}, {'answers' if answers else 'does not answer'}"
    show({"running": True, "answers": answers, **state.as_json()}, text, as_json=as_json)
    return 0 if answers else 1
