"""What the role tells promotion: ``preload.json``, its ``promote`` object."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from image_builder.node import layout, settings, status
from image_builder.node.errors import NodeError

HEALTHZ = "http://127.0.0.1:10248/healthz"
# Of a small OS disk's 200 MB/s this reads less than a tenth, the store being compressed: the rest is for containers.
BYTES_PER_SECOND = 32 << 20


@dataclass(frozen=True)
class Settings(layout.Preload):
    """``bytes_per_second`` 0 is as fast as it goes; ``reserve_percent`` of the filesystem stays free.

    ``wait_seconds`` bounds the wait for the kubelet's ``healthz`` (empty: don't wait), ``settle_seconds`` follow it.
    """

    enabled: bool = True
    bytes_per_second: int = BYTES_PER_SECOND
    workers: int = 2
    reserve_percent: float = 15
    settle_seconds: float = 30
    wait_seconds: float = 900
    healthz: str = HEALTHZ

    @property
    def staging(self) -> Path:
        """Return where copies lie until they are whole. Nothing else uses it."""
        return self.state / "staging" / "promote"


@dataclass(frozen=True)
class Places:
    """Where things lie outside the local disk; a test has its own."""

    manifest: Path = layout.MANIFEST
    rehearsal: Path = layout.REHEARSAL
    store: Path = layout.MOUNT_POINT
    status: Path = status.DIRECTORY
    settings: Path = settings.DIRECTORY


def load(places: Places) -> Settings:
    """Return the settings. Raises NodeError (``settings``)."""
    preload = layout.preload_settings(places.settings)
    raw = settings.load("preload", places.settings)
    try:
        return _parse(preload, raw.get("promote", {}), str(raw.get("kubelet_healthz", HEALTHZ)))
    except (AttributeError, TypeError, ValueError) as error:
        raise NodeError("settings", f"{places.settings}/preload.json: promote: {error}") from error


def _parse(preload: layout.Preload, raw: Any, healthz: str) -> Settings:
    if not isinstance(raw, dict):
        raise TypeError("not an object")
    found = Settings(
        **vars(preload),
        enabled=bool(raw.get("enabled", True)),
        bytes_per_second=int(raw.get("bytes_per_second", BYTES_PER_SECOND)),
        workers=int(raw.get("workers", 2)),
        reserve_percent=float(raw.get("reserve_percent", 15)),
        settle_seconds=float(raw.get("settle_seconds", 30)),
        wait_seconds=float(raw.get("wait_seconds", 900)),
        healthz=healthz,
    )
    if not 1 <= found.workers <= 64:
        raise ValueError("workers is not between 1 and 64")
    if found.bytes_per_second < 0 or found.settle_seconds < 0 or found.wait_seconds < 0:
        raise ValueError("a rate or a time is below 0")
    if not 0 <= found.reserve_percent < 100:
        raise ValueError("reserve_percent is not between 0 and 100")
    return found
