"""Arguments and options shared by several commands: each has one name, one help text and one meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from image_builder.settings import REPO_ROOT


def _complete_images(incomplete: str) -> list[str]:
    """Complete names of images, of the default inventory; nothing when that can't be read."""
    try:
        from image_builder.definition import load_inventory

        return [i for i in load_inventory([REPO_ROOT / "inventories/lab"]).images if i.startswith(incomplete)]
    except Exception:  # a completion can't show an error: the command itself will
        return []


Image = Annotated[
    str, typer.Argument(metavar="IMAGE", help="an image in the inventory", autocompletion=_complete_images)
]
Inventories = Annotated[
    list[Path] | None,
    typer.Option(
        "-i",
        "--inventory",
        metavar="PATH",
        help="an inventory, as in Ansible; repeatable  [default: inventories/lab]",
    ),
]
VaultFile = Annotated[
    Path | None,
    typer.Option(
        "--vault-password-file",
        metavar="FILE",
        envvar="ANSIBLE_VAULT_PASSWORD_FILE",
        help="the file with the password for vaulted values",
    ),
]
Kubeconfig = Annotated[
    Path | None,
    typer.Option(
        "--kubeconfig",
        metavar="FILE",
        envvar="KUBECONFIG",
        help="API server and credentials to use  [default: this pod's service account]",
    ),
]
StoreDir = Annotated[
    Path,
    typer.Option(
        "--store", metavar="DIR", envvar="IMAGE_BUILDER_STORE", help="directory for stages and downloads"
    ),
]
Mirror = Annotated[
    str | None,
    typer.Option(
        "--mirror",
        metavar="URL",
        envvar="IMAGE_BUILDER_MIRROR",
        help="Debian mirror to use  [default: image_base.mirror, else the host's own]",
    ),
]
Output = Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="directory for the artifacts")]
Locked = Annotated[
    Path | None,
    typer.Option(
        "--locked", metavar="FILE", help="use exactly the packages in this lock  [default: the last lock]"
    ),
]
Facts = Annotated[
    Path | None,
    typer.Option(
        "--facts", metavar="FILE", help="expected facts of the image  [default: the facts.json next to it]"
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="print the result as one JSON object")]
