"""``node-agent check``: read settings as the commands that use them do, and report every problem.

The builder calls ``problems`` with what the roles are going to write; a bake runs the command on what they wrote.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from image_builder.node import settings
from image_builder.node.decode import DecodeError
from image_builder.node.errors import NodeError

# By the names of the files in /etc/node-agent: the modules that read them.
_MODULES = {
    "disk": "disk.settings",
    "gpu": "gpu.rules.checks",
    "health": "health.settings",
    "health-endpoint": "health.application",
    "join": "join.settings",
    "preflight": "preflight.settings",
    "preload": "preload_settings",
}


def problems(name: str, document: Mapping[str, Any]) -> list[str]:
    """Return what the agent refuses in a document, each problem as a sentence that begins with a path in it.

    Nothing is refused in a document that no command reads as a whole.
    """
    if name not in _MODULES:
        return []
    try:
        importlib.import_module(f"image_builder.node.{_MODULES[name]}").parse(document)
    except NodeError as error:
        cause = error.__cause__
        return cause.problems if isinstance(cause, DecodeError) else [error.message]
    return []


def run(name: str | None = None, file: Path | None = None, directory: Path = settings.DIRECTORY) -> int:
    """Check all settings of the node, or one document in any file; print the problems. Return 1 if there are any."""
    files = {name: file} if name and file else {each: directory / f"{each}.json" for each in _MODULES}
    lines = [
        f"{stem}.json: {each}\n"
        for stem, path in files.items()
        if path.exists()
        for each in _problems_of(stem, path)
    ]
    sys.stdout.writelines(lines)
    return 1 if lines else 0


def _problems_of(name: str, file: Path) -> list[str]:
    try:
        return problems(name, settings.read(file))
    except NodeError as error:
        return [error.message]
