"""The image record of a bake: what a definition wants of a container image, with what it was locked to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Self

from image_builder.bake.lock.model import LockedImage
from image_builder.canonical import JSON

# What a node does with an image, and no engine: a change of it pulls nothing.
_OF_THE_NODE = frozenset({"mode", "required"})


class Image(LockedImage):
    """An image to preload. A pull knows no ``mode``: what nodes do with an image is the store's affair."""

    pin: bool
    required: bool = True
    mode: Literal["copy", "reference", "archive"] = "reference"

    @classmethod
    def listed(cls, options: Sequence[Mapping[str, JSON]]) -> list[Self]:
        """Return the images in a stage's options."""
        return [cls.model_validate(image) for image in options]

    def for_pull(self) -> dict[str, JSON]:
        """Return the image as the option of a pull."""
        return self.model_dump(mode="json", exclude=set(_OF_THE_NODE))

    def for_store(self) -> dict[str, JSON]:
        """Return the image as the option of the preload store."""
        return self.model_dump(mode="json")
