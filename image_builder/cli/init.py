"""The command ``init``: create the user's own repository, with one image that can be built and verified at once."""

from __future__ import annotations

import os
import shlex
import shutil
import uuid
from pathlib import Path
from typing import Annotated

import typer

from image_builder.cli.command import AsJson, completion, register, show
from image_builder.errors import UsageError
from image_builder.settings import REPO_ROOT, REPOSITORY_ID

TEMPLATE = Path(__file__).parent / "project"
# A folder for each CI service, with the file that tells the service what to run.
PIPELINES = Path(__file__).parent / "project_ci"
SERVICES = sorted(path.name for path in PIPELINES.iterdir())
_NEXT = ("  image-builder build node", "  image-builder boot node --verify")

app = typer.Typer()


@register(app)
def init(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="a directory that is empty or doesn't exist")
    ],
    ci: Annotated[
        str,
        typer.Option(
            "--ci",
            metavar="SERVICE",
            help=f"add a pipeline for {', '.join(SERVICES)}",
            autocompletion=completion(lambda _: SERVICES),
        ),
    ] = "github",
    as_json: AsJson = False,
) -> int:
    """Start your own repository: an inventory with an image, a layer, a role, a check, and a CI pipeline.

    Example:

        image-builder init images && cd images && image-builder build node
    """
    if ci not in SERVICES:
        raise UsageError(f"--ci {ci}: must be one of {', '.join(SERVICES)}")
    target = directory.absolute()
    if target.resolve().is_relative_to(REPO_ROOT):
        raise UsageError(
            f"{target} is in image-builder's own checkout", hint="give a directory outside of it"
        )
    if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
        raise UsageError(f"{target} is not an empty directory")
    try:
        leftovers = shutil.ignore_patterns("__pycache__")  # pip compiles what it installs
        for template in (TEMPLATE, PIPELINES / ci):
            shutil.copytree(
                template, target, dirs_exist_ok=True, copy_function=shutil.copyfile, ignore=leftovers
            )
        (target / REPOSITORY_ID).write_text(f"{uuid.uuid4()}\n", encoding="utf-8")
    except shutil.Error as error:
        raise UsageError(f"can't write {target}: {error.args[0][0][2]}") from error
    except OSError as error:
        raise UsageError(f"can't write {target}: {error.strerror}") from error
    files = sorted(os.fspath(path.relative_to(target)) for path in target.rglob("*") if path.is_file())
    lines = [
        f"{target}:",
        *(f"  {name}" for name in files),
        "",
        "Next:",
        f"  cd {shlex.quote(os.fspath(directory))}",
        *_NEXT,
    ]
    show({"directory": target, "files": files}, "\n".join(lines), as_json=as_json)
    return 0
