"""Data roots as a seed makes them: layers that are links, and the agent's own state; and images to seed them from."""

from __future__ import annotations

import os
from pathlib import Path

from image_builder.bake.lock.model import LockedImage
from tests.support.registries.pulls import Lab
from tests.support.stores.seeds import Node, runnable

# The directory of layers in each engine's data root, and the name of a layer's files in it.
LAYERS = {
    "docker": ("overlay2", "diff"),
    "containerd": ("io.containerd.snapshotter.v1.overlayfs/snapshots", "fs"),
}
NAMES = {"docker": "image/overlay2/repositories.json", "containerd": "io.containerd.metadata.v1.bolt/meta.db"}


def trees(lab: Lab) -> tuple[Path, Path, Path]:
    """Return three layers: some files; one that hides some of those and adds more; other files."""
    below, above, other = lab.folder("below"), lab.folder("above"), lab.folder("other")
    for name in ("etc/hidden", "etc/kept", "opaque/old"):
        (below / name).parent.mkdir(exist_ok=True)
        (below / name).write_text(f"{name}\n" * 1000)
    (above / "etc").mkdir()
    (above / "etc/.wh.hidden").touch()
    (above / "opaque").mkdir()
    (above / "opaque/.wh..wh..opq").touch()
    (above / "opaque/new").write_text("new\n")
    (above / "setuid").write_bytes(b"#!/bin/false\n")
    (above / "setuid").chmod(0o4755)
    (above / "setuid2").hardlink_to(above / "setuid")
    (above / "link").symlink_to("/etc/kept")
    (above / "big").write_bytes(b"text " * 400_000)
    (other / "other").write_text("other\n")
    return below, above, other


def two_images(lab: Lab) -> tuple[LockedImage, LockedImage]:
    """Push two images that share a layer, with a different one below it in each."""
    below, above, other = trees(lab)
    return runnable(lab, "one", below, above), runnable(lab, "two", other, below)


def layers_in(engine: str, data: Path) -> list[Path]:
    """Return each layer's files or link; a link has a target only inside the root."""
    folder, name = LAYERS[engine]
    places = [path / name for path in (data / folder).iterdir()] if (data / folder).is_dir() else []
    return [path for path in places if os.path.lexists(path)]


def links_in(here: Node) -> int:
    """Return how many layers of the data root are links."""
    return sum(path.is_symlink() for path in layers_in(here.lab.engine, here.data))


def state_of(here: Node) -> list[str]:
    """Return the agent's own state on the disk."""
    kept = here.disk / ".node"
    return sorted(os.fspath(path.relative_to(kept)) for path in kept.glob("*/*"))
