"""``pool render``: the node configurations of a pool's first boot."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from image_builder.cli.command import register, show
from image_builder.cli.options import AsJson, VaultFile
from image_builder.cli.pool.plan import Inventory, writing
from image_builder.text import columns

app = typer.Typer()


@register(app, name="render")
def render(
    names: Annotated[
        list[str], typer.Argument(metavar="HOST|GROUP...", help="hosts and groups of the inventory")
    ],
    inventory: Inventory,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="where to write HOST.json")],
    vault_password_file: VaultFile = None,
    as_json: AsJson = False,
) -> int:
    """Write the node configuration of each host, to be its user data. Secrets are refused.

    Example:

        image-builder pool render -i inventories/azure_vmss vmss_h100_a --out h100
    """
    from image_builder.pool.plan.render import render as render_hosts
    from image_builder.pool.plan.render import write

    rendered = render_hosts(inventory, names, vault_password_file)
    with writing(out):
        write(rendered, out)
    sizes = {configuration.host: configuration.user_data_bytes for configuration in rendered}
    result = {
        "directory": os.fspath(out),
        "hosts": sizes,
        "configurations": len({configuration.text for configuration in rendered}),
    }
    rows = [("host", "user data"), *((name, f"{size} B") for name, size in sizes.items())]
    total = f"{len(rendered)} hosts, {result['configurations']} different configurations, in {out}"
    show(result, f"{columns(rows)}\n{total}", as_json=as_json)
    return 0
