"""Where things lie on a node, and what the agent is told of the preload. One place for both node and bake."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from image_builder.node import settings
from image_builder.node.errors import NodeError

ENGINES = ("docker", "containerd")

# What a bake puts into the image.
LIST = Path("/opt/preloaded_docker_images.json")
ARCHIVE = Path("/opt/preloaded_docker_images.tar")
MANIFEST = Path("/opt/preload/store.json")
REHEARSAL = Path("/opt/preload/rehearsal.json")
STORE_FILE = Path("/opt/preload/store.erofs")
# Where the preload store is mounted: outside of any data root, whose engine unmounts what is below it.
MOUNT_POINT = Path("/var/lib/preload")
LAYERS = "layers"


@dataclass(frozen=True)
class Preload:
    """``preload.json``: the node's engine, its data root, and the local disk's mount point.

    ``verity`` False declares that the kernel can't check the store (dm-verity). ``pause`` is the sandbox image,
    empty for none. ``namespace`` is containerd's.
    """

    engine: str
    data_root: Path
    mount_point: Path
    verity: bool = True
    pause: str = ""
    namespace: str = "k8s.io"

    @property
    def state(self) -> Path:
        """Return the directory on the local disk that is the agent's own."""
        return self.mount_point / ".node"

    @property
    def marker(self) -> Path:
        """Return the file that says what the data root was seeded from; written last."""
        return self.state / "seed" / f"{self.engine}.json"


def preload_settings(directory: Path = settings.DIRECTORY) -> Preload:
    """Return the preload's settings, as the role image_preload wrote them. Raises NodeError (``settings``)."""
    raw = settings.load("preload", directory)
    for name in ("engine", "data_root", "mount_point"):
        if not isinstance(raw.get(name), str) or not raw[name]:
            raise NodeError("settings", f"{directory}/preload.json names no {name}")
    if raw["engine"] not in ENGINES:
        raise NodeError("settings", f"preload.json names the engine {raw['engine']!r}, not one of {ENGINES}")
    return Preload(
        engine=raw["engine"],
        data_root=Path(raw["data_root"]),
        mount_point=Path(raw["mount_point"]),
        verity=raw.get("verity", "require") != "off",
        pause=str(raw.get("pause", "")),
        namespace=str(raw.get("namespace", "k8s.io")),
    )


def layer_path(diff_id: str, mount_point: Path = MOUNT_POINT) -> Path:
    """Return where the store has a layer's files. ``diff_id`` begins with ``sha256:``."""
    return mount_point / LAYERS / diff_id.removeprefix("sha256:")
