"""Paths on a node, and the engines. One place for both node and bake."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

Engine = Literal["docker", "containerd"]
ENGINES: tuple[Engine, ...] = ("docker", "containerd")

# What a bake puts into the image.
LIST = Path("/opt/preloaded_docker_images.json")
ARCHIVE = Path("/opt/preloaded_docker_images.tar")
MANIFEST = Path("/opt/preload/store.json")
REHEARSAL = Path("/opt/preload/rehearsal.json")
STORE_FILE = Path("/opt/preload/store.erofs")
# Where the preload store is mounted: outside of any data root, whose engine unmounts what is below it.
MOUNT_POINT = Path("/var/lib/preload")
LAYERS = "layers"


def layer_path(diff_id: str, mount_point: Path = MOUNT_POINT) -> Path:
    """Return where the store has a layer's files. ``diff_id`` begins with ``sha256:``."""
    return mount_point / LAYERS / diff_id.removeprefix("sha256:")
