"""The container engines that can pull images, and the interface that the stages need from each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from image_builder.bake.lock.model import LockedImage
from image_builder.bake.pull import containerd_engine, docker_engine
from image_builder.bake.pull.network import NOTHING_SPECIAL, Endpoints, Network
from image_builder.bake.pull.puller import Engine
from image_builder.system.sandbox import Root


class RunningEngine(Engine, Protocol):
    """A running daemon. Methods may be called from several threads and raise PullError."""

    @property
    def binary(self) -> str:
        """Return the path of the daemon's program in its root."""

    def version(self) -> str:
        """Return the daemon's version."""

    def has(self, image: LockedImage, /) -> bool:
        """Return whether the image is present with the locked digests."""

    def mark(self, image: LockedImage, /, *, pin: bool) -> None:
        """Label an image as the kubelet does; the kubelet's garbage collection leaves a pinned one alone."""

    def keep_only(self, images: Sequence[LockedImage], /) -> list[str]:
        """Remove all references to other images; return those removed."""

    def try_out(self, image: LockedImage, /) -> float | None:
        """Start and stop a container; return the seconds until it ran, None for an image without a command."""

    def unpacked_bytes(self, image: LockedImage, /) -> int:
        """Return the size of an image's files in bytes."""

    def layer_folders(self, image: LockedImage, /) -> list[str]:
        """Return the directories of an image's layers, the lowest first, relative to the data root."""

    def save(
        self, images: Sequence[LockedImage], target: Path, progress: Callable[[int], None], /
    ) -> tuple[int, str]:
        """Write the images to an archive; return its size and SHA-256. ``progress`` gets the bytes so far."""


class EngineModule(Protocol):
    """The functions that run one engine and handle its data."""

    DATA_ROOT: str

    def running(
        self,
        root: Root,
        *,
        downloads: int,
        endpoints: Endpoints,
        log: Path,
        network: Network = NOTHING_SPECIAL,
    ) -> AbstractContextManager[RunningEngine]:
        """Run the engine in ``root``, which has a network and a data root, until the block ends."""

    def strip(self, data_root: Path, /) -> None:
        """Reduce a stopped daemon's data root to what belongs to its images."""

    def copy(self, source: Path, target: Path, /) -> None:
        """Copy the data root of an earlier bake for a new one."""


ENGINES: Mapping[str, EngineModule] = {"docker": docker_engine, "containerd": containerd_engine}
