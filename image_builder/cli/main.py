"""The command line: the only parser. Results on standard output, everything for people on standard error.

What a command needs is imported when it runs, so that ``--help`` stays quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from image_builder import __version__, text
from image_builder.cli import build, failure, gate, lab, machine, pool, selftest, store

if TYPE_CHECKING:
    pass


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
    version: Annotated[bool, typer.Option("--version", help="print the version and exit")] = False,
    install_deps: Annotated[  # noqa: ARG001  # handled by the launcher; listed here for --help
        bool, typer.Option("--install-deps", help="first install the Debian packages that the command needs")
    ] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


for _commands in (build, machine, selftest):
    app.add_typer(_commands.app)
for _name, _commands in {"lab": lab, "gate": gate, "pool": pool, "store": store}.items():
    app.add_typer(_commands.app, name=_name)


def main() -> None:
    """Run the command line; exits."""
    app(prog_name="image-builder")
