"""The preload's settings, for seed, preload and promotion: ``preload.json``, as the role image_preload writes it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from image_builder.node import settings
from image_builder.node.decode import absolute, decode
from image_builder.node.layout import Engine

HEALTHZ = "http://127.0.0.1:10248/healthz"


def _verity(value: Any, path: str) -> bool:
    return decode(Literal["require", "off"], value, path) == "require"  # type: ignore[arg-type]


@dataclass(frozen=True)
class Preload:
    """The node's engine, its data root, and the local disk's mount point.

    ``verity`` (``require`` or ``off``) False declares that the kernel can't check the store (dm-verity). ``pause`` is
    the sandbox image, empty for none. ``namespace`` is containerd's. ``promote`` is decoded by the promotion: what is
    wrong with it keeps no image from a node.
    """

    engine: Engine
    data_root: Path
    mount_point: Path
    verity: bool = field(default=True, metadata={"read": _verity})
    pause: str = ""
    namespace: str = "k8s.io"
    promote: Mapping[str, Any] = field(default_factory=dict)
    kubelet_healthz: str = HEALTHZ

    @property
    def state(self) -> Path:
        """Return the directory on the local disk that is the agent's own."""
        return self.mount_point / ".node"

    @property
    def marker(self) -> Path:
        """Return the file that says what the data root was seeded from; written last."""
        return self.state / "seed" / f"{self.engine}.json"

    def problems(self) -> Iterator[str]:
        """Yield the rules that these settings break."""
        for name in ("data_root", "mount_point"):
            yield from absolute(name, os.fspath(getattr(self, name)))


def load(directory: Path = settings.DIRECTORY) -> Preload:
    """Return the preload's settings, as the role image_preload wrote them. Raises NodeError (``settings``)."""
    return settings.parse(Preload, settings.load("preload", directory), "preload")
