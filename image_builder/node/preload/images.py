"""What this node was baked with, by the archive's list and the store's description, and what an engine has of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from image_builder.node.errors import NodeError
from image_builder.node.store import Image, parse_image, read_manifest

FORMAT = 1
# Modes of an image that the seed gives to the engine; one of mode `archive` is loaded.
_SEEDED = frozenset({"reference", "copy"})
# Seconds that an engine may take for one answer: it may just have been started, on a disk that others use too.
PATIENCE = 600.0

_A = TypeVar("_A")
_B = TypeVar("_B")


@dataclass(frozen=True)
class Archive:
    """Where the archive is, its size in bytes, and its digest."""

    path: Path
    size: int
    sha256: str


@dataclass(frozen=True)
class Preload:
    """The list: the images, and the archive that holds them; None where the image was baked without one."""

    engine: str
    archive: Archive | None
    images: tuple[Image, ...]


@dataclass(frozen=True)
class Store:
    """What the seed gives: each reference, and whether it is required; each layer's bytes by its diff id."""

    seeded: Mapping[str, bool] = field(default_factory=dict)
    layers: Mapping[str, int] = field(default_factory=dict)


def read_list(path: Path, pause: str = "") -> Preload:
    """Read the list of images; the one called ``pause`` is pinned in any case.

    Without an archive all of containerd's are: its seed can't bring back what the kubelet deleted, Docker's can.

    Raises NodeError (``preload.list``).
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] != FORMAT:
            message = f"{path} has format {document['format']}, this program reads {FORMAT}"
            raise NodeError("preload.list", message)
        engine, record = str(document["engine"]), document["archive"]
        archive = None
        if record is not None:
            archive = Archive(Path(record["path"]), int(record["bytes"]), record["sha256"])
        all_pinned = engine == "containerd" and archive is None
        images = tuple(
            parse_image({**image, "pin": pin, "required": False, "mode": "archive"})
            for image in document["images"]
            for pin in (all_pinned or image["pin"] or image["ref"] == pause,)
        )
        return Preload(engine, archive, images)
    except OSError as error:
        raise NodeError("preload.list", f"{path}: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        message = f"{path} is not a list of preloaded images: {type(error).__name__}: {error}"
        raise NodeError("preload.list", message) from error


def read_store(path: Path, images: Iterable[Image]) -> Store:
    """Read what the seed should have given; nothing where the image was baked without a store.

    Of a description that can't be read is known that there is a store: every image is expected of the seed,
    whose own section says what is wrong.
    """
    if not os.path.lexists(path):
        return Store()
    try:
        manifest = read_manifest(path)
    except NodeError:
        return Store({image.ref: True for image in images})
    return Store({i.ref: i.required for i in manifest.images if i.mode in _SEEDED}, manifest.layers)


# -- engines ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineState:
    """What an engine has, each fault by reference.

    ``faults``: an image is missing or wrong, the archive would help. ``misnamed``: a name, label or guard is
    missing (or too many, then by its own name), ``Engine.name`` would help. ``digestless``: an image can't be
    had by its digest, and nothing here would help.
    """

    faults: Mapping[str, str] = field(default_factory=dict)
    misnamed: Mapping[str, str] = field(default_factory=dict)
    digestless: Mapping[str, str] = field(default_factory=dict)


class Engine(Protocol):
    def look(self, images: Sequence[Image]) -> EngineState:
        """Ask for all images. Raises ProgramError."""

    def name(self, images: Sequence[Image], misnamed: Mapping[str, str]) -> None:
        """Add what ``misnamed`` says is missing, for images without faults. Raises ProgramError."""

    def forget(self, images: Sequence[Image]) -> None:
        """Take out what the engine has on record of those whose layers are lost, so that it loads them again.

        Raises ProgramError.
        """

    def load(self, archive: Path) -> list[str]:
        """Return the command that loads the archive."""


def together(first: Callable[[], _A], second: Callable[[], _B]) -> tuple[_A, _B]:
    """Ask two questions at once: each is a program, and the kubelet waits. Raises what the first one raises first."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(second)
        return first(), answer.result()
