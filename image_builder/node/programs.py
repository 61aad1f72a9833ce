"""The former name of ``child``, for imports that have not moved yet."""

from __future__ import annotations

from image_builder.node.child import ENVIRONMENT, Completed, run, tail

__all__ = ["ENVIRONMENT", "Completed", "run", "tail"]
