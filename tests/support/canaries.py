"""Searches for leaked secrets: in argument lists and environments of processes, and in files."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.registries.pulls import processes


@dataclass
class Sightings:
    """What was seen: ``programs`` that ran, and those with a secret in their ``arguments`` or ``environment``."""

    programs: set[str] = field(default_factory=set)
    arguments: set[str] = field(default_factory=set)
    environment: set[str] = field(default_factory=set)


@contextmanager
def watched_processes(words: Callable[[], Collection[str]]) -> Iterator[Sightings]:
    """Search all processes of this PID namespace for ``words()`` until the block ends."""
    seen, over = Sightings(), threading.Event()

    def look() -> None:
        while not over.wait(0.005):
            secrets = words()
            for process in processes():
                name = Path(process.words[0]).name
                seen.programs.add(name)
                if any(secret in " ".join(process.words) for secret in secrets):
                    seen.arguments.add(name)
                if any(secret in " ".join(process.environment) for secret in secrets):
                    seen.environment.add(name)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def files_with(folder: Path, words: Collection[str]) -> list[str]:
    """Return the files below ``folder`` that contain one of the words; filesystems mounted there are skipped."""
    found = []
    device = folder.stat().st_dev
    for place, names, files in os.walk(folder):
        names[:] = [name for name in names if Path(place, name).lstat().st_dev == device]
        for path in (Path(place, name) for name in files):
            if path.is_file() and not path.is_symlink():
                data = path.read_bytes()
                found += [os.fspath(path) for word in words if word.encode() in data]
    return found
