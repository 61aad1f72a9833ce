"""The inventories of this repository, each read once by a process that tests: an image takes a second and more."""

from __future__ import annotations

import re
import shutil
from functools import cache
from pathlib import Path

from image_builder.definition import Inventory, load_inventory, problems
from image_builder.settings import REPO_ROOT

_reading_problems = problems.reading_problems


def shipped(name: str) -> Inventory:
    """Return `lab` or `azure_vmss`. What a test without `unread_layers` gets was read whole."""
    return _load(name, problems.reading_problems is _reading_problems)


@cache
def _load(name: str, _: bool) -> Inventory:
    return load_inventory([REPO_ROOT / "inventories" / name])


def filled(name: str, folder: Path) -> Path:
    """Copy a repository's inventory into a folder, as if a user had put in values for all placeholders."""
    copy = folder / name
    shutil.copytree(REPO_ROOT / "inventories" / name, copy, dirs_exist_ok=True)
    for file in copy.rglob("*.yml"):
        text = file.read_text(encoding="utf-8").replace("0" * 64, "1" * 64)
        file.write_text(re.sub(r"\bREPLACE\b", "mine", text), encoding="utf-8")
    return copy
