"""The definition of an image: an Ansible inventory, checked as a whole, as frozen data.

inventory = load_inventory([Path("inventories/lab")])
inventory.problems()                    # all of them, as file:line, path, reason
worker = inventory.define("worker")
layer_needs(worker, "system").packages
"""

from __future__ import annotations

from image_builder.definition.engine import UnreadableError, configured_inventories
from image_builder.definition.evaluate import published_variables, resolved_variables
from image_builder.definition.inventory import Inventory, load_inventory, reread
from image_builder.definition.model import ImageBase, ImageDefinition, ImageDisk, ImagePull, PreloadedImage
from image_builder.definition.needs import Archive, LayerNeeds, Repository, layer_needs
from image_builder.definition.reading import PlaybookReading, layer_reading, seal_reading
from image_builder.definition.sentences import problem_in

__all__ = [
    "Archive",
    "ImageBase",
    "ImageDefinition",
    "ImageDisk",
    "ImagePull",
    "Inventory",
    "LayerNeeds",
    "PlaybookReading",
    "PreloadedImage",
    "Repository",
    "UnreadableError",
    "configured_inventories",
    "layer_needs",
    "layer_reading",
    "load_inventory",
    "problem_in",
    "published_variables",
    "reread",
    "resolved_variables",
    "seal_reading",
]
