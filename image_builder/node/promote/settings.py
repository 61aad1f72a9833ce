"""The promotion's settings: the object ``promote`` of ``preload.json``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from image_builder.node import layout, preload_settings, status
from image_builder.node.decode import DecodeError, at_least, decode, shown, within
from image_builder.node.errors import NodeError
from image_builder.node.preload_settings import Preload

# Of a small OS disk's 200 MB/s this reads less than a tenth, the store being compressed: the rest is for containers.
BYTES_PER_SECOND = 32 << 20


@dataclass(frozen=True)
class Promotion:
    """``bytes_per_second`` 0 is as fast as it goes; ``reserve_percent`` of the filesystem stays free.

    ``wait_seconds`` bounds the wait for the kubelet's ``healthz``, ``settle_seconds`` follow it.
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
    """Those of the preload and of the promotion. ``kubelet_healthz`` empty: the kubelet isn't waited for."""

    preload: Preload
    promotion: Promotion

    @property
    def staging(self) -> Path:
        """Return where copies lie until they are whole. Nothing else uses it."""
        return self.preload.state / "staging" / "promote"


@dataclass(frozen=True)
class Places(status.Places):
    """And what a bake put into the image: the store's description, the rehearsal's, and where the store is mounted."""

    manifest: Path = layout.MANIFEST
    rehearsal: Path = layout.REHEARSAL
    store: Path = layout.MOUNT_POINT


def load(places: Places) -> Settings:
    """Return the settings. Raises NodeError (``settings``)."""
    preload = preload_settings.load(places.etc)
    try:
        return Settings(preload, decode(Promotion, preload.promote, "promote"))
    except DecodeError as error:
        raise NodeError("settings", f"preload.json: {error}") from error
