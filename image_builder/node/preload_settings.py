"""The settings of seed, preload and promotion: ``preload.json``, as the role image_preload writes it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from image_builder.node import settings
from image_builder.node.decode import DecodeError, absolute, at_least, decode, shown, within
from image_builder.node.errors import NodeError
from image_builder.node.layout import Engine

# The store is compressed, so this reads less than a tenth of a small OS disk's 200 MB/s: the rest is for containers.
BYTES_PER_SECOND = 32 << 20


def _verity(value: Any, path: str) -> bool:
    return decode(Literal["require", "off"], value, path) == "require"  # type: ignore[arg-type]


@dataclass(frozen=True)
class Preload:
    """The node's engine, its data root, and the local disk's mount point.

    ``verity`` is ``require`` (True) or ``off`` (False), which declares that the kernel can't check the store with
    dm-verity. ``pause`` is the sandbox image, empty for none. ``namespace`` is containerd's. ``promote`` is decoded
    only by the promotion, so that a mistake in it doesn't cost a node its images.
    """

    engine: Engine
    data_root: Path
    mount_point: Path
    verity: bool = field(default=True, metadata={"read": _verity})
    pause: str = ""
    namespace: str = "k8s.io"
    promote: Mapping[str, Any] = field(default_factory=dict)
    kubelet_healthz: str = settings.HEALTHZ

    @property
    def state(self) -> Path:
        """Return the agent's own directory on the local disk."""
        return self.mount_point / ".node"

    @property
    def marker(self) -> Path:
        """Return the file that records what the data root was seeded from; it is written last."""
        return self.state / "seed" / f"{self.engine}.json"

    @property
    def trash(self) -> Path:
        """Return the directory where the seed sets things aside until a later boot has succeeded."""
        return self.state / "trash"

    def problems(self) -> Iterator[str]:
        """Yield the rules that these settings break."""
        for name in ("data_root", "mount_point"):
            yield from absolute(name, os.fspath(getattr(self, name)))


@dataclass(frozen=True)
class Promotion:
    """The promotion's limits. ``bytes_per_second`` 0 is unlimited; ``reserve_percent`` of the filesystem stays free.

    ``wait_seconds`` limits the wait for the kubelet's ``healthz``; the promotion then waits another ``settle_seconds``.
    """

    enabled: bool = True
    bytes_per_second: int = BYTES_PER_SECOND
    workers: int = 2
    reserve_percent: float = 15
    settle_seconds: float = 30
    wait_seconds: float = 900

    def problems(self) -> Iterator[str]:
        """Yield the rules that these settings break."""
        yield from within("workers", self.workers, 1, 64)
        for name in ("bytes_per_second", "settle_seconds", "wait_seconds"):
            yield from at_least(name, getattr(self, name), 0)
        if not 0 <= self.reserve_percent < 100:
            yield f"reserve_percent must be at least 0 and below 100, not {shown(self.reserve_percent)}"


@dataclass(frozen=True)
class Settings:
    """Settings of the preload and of the promotion. If ``kubelet_healthz`` is empty, nothing waits for the kubelet."""

    preload: Preload
    promotion: Promotion

    @property
    def staging(self) -> Path:
        """Return the directory that holds copies until they are complete. Nothing else uses it."""
        return self.preload.state / "staging" / "promote"


def load(directory: Path = settings.DIRECTORY) -> Preload:
    """Return the preload's settings as the role image_preload wrote them. Raises NodeError (``settings``)."""
    return settings.parse(Preload, settings.load("preload", directory), "preload")


def load_all(directory: Path = settings.DIRECTORY) -> Settings:
    """Return the settings of the preload and of the promotion. Raises NodeError (``settings``)."""
    return parse(settings.load("preload", directory))


def parse(document: Mapping[str, Any]) -> Settings:
    """Return the settings of the preload and of the promotion. Raises NodeError (``settings``)."""
    preload = settings.parse(Preload, document, "preload")
    try:
        return Settings(preload, decode(Promotion, preload.promote, "promote"))
    except DecodeError as error:
        raise NodeError("settings", f"preload.json: {error}") from error
