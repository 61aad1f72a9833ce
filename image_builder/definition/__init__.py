"""The definition of an image: an Ansible inventory, checked whole, as frozen data.

inventory = load_inventory([Path("inventories/lab")])
inventory.problems()              # everything that is wrong, as file:line, path, what
worker = inventory.define("worker")
layer_needs(worker, "system").packages
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from image_builder.definition.inventory import Inventory, load_inventory
from image_builder.definition.model import ImageBase, ImageDefinition, ImageDisk, ImagePull, PreloadedImage
from image_builder.definition.references import referenced_names

if TYPE_CHECKING:
    from image_builder.definition.evaluate import layer_sources, resolved_variables
    from image_builder.definition.needs import Archive, LayerNeeds, Repository, layer_needs

__all__ = [
    "Archive",
    "ImageBase",
    "ImageDefinition",
    "ImageDisk",
    "ImagePull",
    "Inventory",
    "LayerNeeds",
    "PreloadedImage",
    "Repository",
    "layer_needs",
    "layer_sources",
    "load_inventory",
    "referenced_names",
    "resolved_variables",
]


def __getattr__(name: str) -> Any:
    # These bring Ansible in, which takes a third of a second: not for `--help`.
    if name in __all__:
        from image_builder.definition import evaluate, needs

        return getattr(evaluate, name, None) or getattr(needs, name)
    raise AttributeError(name)
