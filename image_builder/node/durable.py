"""The former name of ``files``, for imports that have not moved yet."""

from __future__ import annotations

from image_builder.node.files import exchange, rename_new, sync_directory, syncfs, write, write_json

__all__ = ["exchange", "rename_new", "sync_directory", "syncfs", "write", "write_json"]
