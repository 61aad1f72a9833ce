"""The former name of ``files.lock``, for imports that have not moved yet."""

from __future__ import annotations

from image_builder.node.files import lock as held

__all__ = ["held"]
