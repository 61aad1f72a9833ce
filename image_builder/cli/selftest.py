"""``image-builder test``: this project's own checks, which are in the checkout beside its tests."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer

from image_builder.cli.command import register
from image_builder.cli.options import AsJson, StoreDir
from image_builder.errors import UsageError
from image_builder.settings import DEFAULT_STORE

if TYPE_CHECKING:
    pass

app = typer.Typer()


@register(app, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def test(
    context: typer.Context,
    fast: Annotated[
        bool, typer.Option("--fast", help="lint, types and unit tests only; needs no root")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="also run what takes too long for every commit: some hours")
    ] = False,
    store: StoreDir = DEFAULT_STORE,
    as_json: AsJson = False,
) -> int:
    """Run this project's own checks: lint, types and unit tests, then tests that need root or boot machines.

    Further arguments are passed to pytest.

    Example:

        image-builder test --fast -k lock
    """
    if fast and everything:
        raise UsageError("--fast and --all can't be used together")
    # Next to this package in a checkout; never installed.
    checks: ModuleType = importlib.import_module("tests.selftest")
    status: int = checks.run(
        context.args, fast=fast, store=store.absolute(), as_json=as_json, nightly=everything
    )
    return status
