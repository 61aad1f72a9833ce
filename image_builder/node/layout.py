"""Where things lie on a node, and what the agent is told of the preload. One place for both node and bake."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from image_builder.node import settings

# What a bake puts into the image.
MANIFEST = Path("/opt/preload/store.json")
REHEARSAL = Path("/opt/preload/rehearsal.json")
STORE_FILE = Path("/opt/preload/store.erofs")
# Where the preload store is mounted: outside of any data root, whose engine unmounts what is below it.
MOUNT_POINT = Path("/var/lib/preload")
LAYERS = "layers"


@dataclass(frozen=True)
class Preload:
    """``preload.json``: the node's engine, its data root, and the local disk's mount point.

    ``verity`` False declares that the kernel can't check the store (dm-verity).
    """

    engine: str
    data_root: Path
    mount_point: Path
    verity: bool
    raw: Mapping[str, Any]

    @property
    def state(self) -> Path:
        """Return the directory on the local disk that is the agent's own."""
        return self.mount_point / ".node"

    @property
    def marker(self) -> Path:
        """Return the file that says what the data root was seeded from; written last."""
        return self.state / "seed" / f"{self.engine}.json"


def preload_settings(directory: Path = settings.DIRECTORY) -> Preload:
    """Return the preload's settings. Raises NodeError (``settings``)."""
    raw = settings.load("preload", directory)
    engine = str(raw.get("engine", "docker"))
    mount_point = Path(raw.get("mount_point", "/mnt/local"))
    return Preload(
        engine=engine,
        data_root=Path(raw.get("data_root", mount_point / engine)),
        mount_point=mount_point,
        verity=raw.get("verity", "require") != "off",
        raw=raw,
    )


def layer_path(diff_id: str, mount_point: Path = MOUNT_POINT) -> Path:
    """Return where the store has a layer's files. ``diff_id`` begins with ``sha256:``."""
    return mount_point / LAYERS / diff_id.removeprefix("sha256:")
