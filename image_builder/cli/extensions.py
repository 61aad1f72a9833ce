"""What the command line hands in to every bake: the stage that verifies an image, and the lab's images."""

from __future__ import annotations

from image_builder.bake.stages.kind import Extensions
from image_builder.lab.stage import SUPPLIER
from image_builder.verify.stage import KIND

EXTENSIONS = Extensions(KIND, SUPPLIER)
