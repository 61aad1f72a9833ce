"""Paths on a node, and the engines: shared by the node and the bake."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

Engine = Literal["docker", "containerd"]
ENGINES: tuple[Engine, ...] = ("docker", "containerd")

# Files that a bake puts into the image.
LIST = Path("/opt/preloaded_docker_images.json")
ARCHIVE = Path("/opt/preloaded_docker_images.tar")
MANIFEST = Path("/opt/preload/store.json")
REHEARSAL = Path("/opt/preload/rehearsal.json")
STORE_FILE = Path("/opt/preload/store.erofs")
# Where the preload store is mounted: outside any data root, because an engine unmounts everything below its own.
MOUNT_POINT = Path("/var/lib/preload")
LAYERS = "layers"


def layer_path(diff_id: str, mount_point: Path = MOUNT_POINT) -> Path:
    """Return the directory with a layer's files in the store. ``diff_id`` begins with ``sha256:``."""
    return mount_point / LAYERS / diff_id.removeprefix("sha256:")


def diff_id_of(directory: str) -> str:
    """Return the diff id of a layer's directory in the store: ``<hex>``, or ``<hex>.<n>`` for a further one."""
    return f"sha256:{directory.partition('.')[0]}"
