"""The images that this node was baked with (archive's list, store's manifest), and the state of an engine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from image_builder.node import child
from image_builder.node.errors import ABSENT_STATUS, NodeError, ProgramError
from image_builder.node.store import Image, parse_image, read_manifest

FORMAT = 1
# Modes of images that the seed provides to the engine; images with the mode `archive` are loaded.
_SEEDED = frozenset({"reference", "copy"})
# How long an engine may take to answer (seconds): it may have just been started, on a disk that is busy.
PATIENCE = 600.0

_A = TypeVar("_A")
_B = TypeVar("_B")


@dataclass(frozen=True)
class Archive:
    """The archive's path, its size in bytes, and its digest."""

    path: Path
    size: int
    sha256: str


@dataclass(frozen=True)
class Preload:
    """The list: the images, and the archive that contains them (None if the node image was baked without one)."""

    engine: str
    archive: Archive | None
    images: tuple[Image, ...]


@dataclass(frozen=True)
class Store:
    """What the seed provides: each reference, and whether it is required; each layer's size in bytes by diff id."""

    seeded: Mapping[str, bool] = field(default_factory=dict)
    layers: Mapping[str, int] = field(default_factory=dict)


def read_list(path: Path, pause: str = "") -> Preload:
    """Read the list of images; the one named ``pause`` is always pinned.

    Without an archive, all of containerd's images are pinned: its seed can't restore images that the kubelet has
    deleted, while Docker's can.

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
    """Read what the seed should have provided; nothing if the node image was baked without a store.

    If the manifest can't be read, there is at least a store: then every image is expected from the seed, whose own
    section says what is wrong.
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
    """An engine's state, with each fault by reference.

    ``faults``: an image is missing or wrong; loading the archive would fix it. ``misnamed``: a name is missing, and
    ``unpinned``: a label or guard that protects it is missing (or surplus, then by its own name); ``Engine.name`` would
    fix both. ``digestless``: an image can't be referred to by its digest, and nothing here would fix that.
    """

    faults: Mapping[str, str] = field(default_factory=dict)
    misnamed: Mapping[str, str] = field(default_factory=dict)
    unpinned: Mapping[str, str] = field(default_factory=dict)
    digestless: Mapping[str, str] = field(default_factory=dict)


class Engine(Protocol):
    def look(self, images: Sequence[Image]) -> EngineState:
        """Return the state of all images. Raises ProgramError."""

    def name(self, images: Sequence[Image], lacks: Mapping[str, str]) -> dict[str, str]:
        """Add what ``lacks`` says is missing, for images without faults; return why that failed, by the same keys.

        Raises ProgramError if the engine doesn't answer.
        """

    def forget(self, images: Sequence[Image]) -> None:
        """Remove the engine's records of images whose layers are lost, so that it loads them again.

        Raises ProgramError.
        """

    def load(self, archive: Path) -> list[str]:
        """Return the command that loads the archive."""


def attempt_each(commands: Iterable[tuple[str, Sequence[str]]]) -> dict[str, str]:
    """Run each command, whatever the others do; return the failures, by the commands' keys.

    Raises ProgramError for one that doesn't end or can't be started: neither would the others.
    """
    failures = {}
    for key, command in commands:
        try:
            child.run(command, timeout=PATIENCE)
        except ProgramError as error:
            if error.status in (child.LATE, ABSENT_STATUS):
                raise
            failures[key] = error.tail or error.message
    return failures


def together(first: Callable[[], _A], second: Callable[[], _B]) -> tuple[_A, _B]:
    """Make two calls in parallel: each runs a program, and the kubelet waits. Raises an error of ``first`` first."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(second)
        return first(), answer.result()
