"""``image-builder pool``: plan a rollout, run it, look at one, and what else that requires."""

from __future__ import annotations

import typer

from image_builder.cli.pool import broker, drain, exports, plan, repair, rollback, run

app = typer.Typer(
    help="Bring pools up from an image, in waves.\n\nExample:\n\n\b\n"
    "  image-builder pool plan -i inventories/azure_vmss vmss_h100_a --out h100.plan.json",
    no_args_is_help=True,
    rich_markup_mode=None,
)
for _commands in (plan, run, rollback, drain, repair, exports, broker):
    app.add_typer(_commands.app)
