"""The inventories of this repository, each read once by a process that tests: an image takes a second and more."""

from __future__ import annotations

from functools import cache

from image_builder.definition import Inventory, load_inventory, problems
from image_builder.settings import REPO_ROOT

_reading_problems = problems.reading_problems


def shipped(name: str) -> Inventory:
    """Return `lab` or `azure_vmss`. What a test without `unread_layers` gets was read whole."""
    return _load(name, problems.reading_problems is _reading_problems)


@cache
def _load(name: str, _: bool) -> Inventory:
    return load_inventory([REPO_ROOT / "inventories" / name])
