"""The interface of an engine, Docker or containerd."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from image_builder.node.store import Image

# Seconds that an engine may take for one answer: it may just have been started, on a disk that others use too.
PATIENCE = 600.0

_A = TypeVar("_A")
_B = TypeVar("_B")


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
