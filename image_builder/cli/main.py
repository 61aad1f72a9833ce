"""The command line: the only parser. Results go to standard output, everything for people to standard error.

A command's dependencies are imported when it runs, so that ``--help`` stays fast.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Annotated, get_args

import typer

from image_builder import __version__, text
from image_builder.cli import (
    build,
    ci,
    collections,
    command,
    doctor,
    failure,
    gate,
    init,
    lab,
    machine,
    pool,
    publish,
    store,
)
from image_builder.cli.command import AsJson, StoreDir, register
from image_builder.errors import UsageError
from image_builder.settings import DEFAULT_STORE, LAUNCHER


def _exit_code_table() -> str:
    rows = [(str(code), name, meaning) for code, name, meaning in failure.exit_codes()]
    return "Exit codes:\n\n\b\n" + text.columns(rows)


app = typer.Typer(
    name="image-builder",
    help="Bake Kubernetes worker images: bootable disks from an Ansible definition, verified before publication."
    "\n\nExample:\n\n\b\n  image-builder build worker\n  image-builder boot worker --verify",
    epilog=_exit_code_table(),
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _main(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="print the version and exit")] = False,
    install_deps: Annotated[  # noqa: ARG001  # handled by the launcher; listed here for --help
        bool, typer.Option("--install-deps", help="first install the Debian packages that the command needs")
    ] = False,
    annotations: Annotated[
        str | None,
        typer.Option(
            "--annotations",
            metavar="SERVICE",
            envvar="IMAGE_BUILDER_ANNOTATIONS",
            help="also annotate errors for a CI service, at file and line: github or azure",
            autocompletion=command.completion(lambda _: get_args(ci.Service)),
        ),
    ] = None,
) -> None:
    if annotations not in (None, "", *get_args(ci.Service)):
        raise typer.BadParameter(f"{annotations}: must be {' or '.join(get_args(ci.Service))}")
    command.invoked = context.invoked_subcommand or ""
    failure.service = annotations or None  # type: ignore[assignment]  # one of them, as was checked
    if version:
        print(__version__)
        raise typer.Exit


# The project's own checks: a group without a name, so that they come last among the commands.
_checks = typer.Typer()


@register(_checks, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def test(
    context: typer.Context,
    fast: Annotated[
        bool, typer.Option("--fast", help="lint, types and unit tests only; needs no root")
    ] = False,
    slow: Annotated[
        bool,
        typer.Option("--slow", help="only the tests that take too long for every commit; up to 90 minutes"),
    ] = False,
    store: StoreDir = DEFAULT_STORE,
    as_json: AsJson = False,
) -> int:
    """Run this project's own checks: lint, types and unit tests, then tests that need root or boot machines.

    Further arguments are passed to pytest.

    Example:

        image-builder test --fast -k lock
    """
    if fast and slow:
        raise UsageError("--fast and --slow can't be used together")
    # Next to this package in a checkout; never installed.
    checks: ModuleType = importlib.import_module("tests.selftest.command")
    status: int = checks.run(context.args, fast=fast, slow=slow, store=store.absolute(), as_json=as_json)
    return status


for _group in (init.app, collections.app, doctor.app, build.app, machine.app):
    app.add_typer(_group)
if LAUNCHER.exists():
    app.add_typer(_checks)
for _name, _commands in {"lab": lab, "gate": gate, "pool": pool, "publish": publish, "store": store}.items():
    app.add_typer(_commands.app, name=_name)


def main() -> None:
    """Run the command line and exit."""
    app(prog_name="image-builder")
