"""Copies of a store with a finished build of the small image, which a test may break."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.builds import Workplace


@pytest.fixture
def copies() -> Iterator[Callable[[Workplace], Workplace]]:
    """Make stores beside the ordinary one (the same filesystem) that share its files by hard links."""
    made: list[Path] = []

    def copy(original: Workplace) -> Workplace:
        place = original.store.parent / f"{original.store.name}-test-{os.getpid()}-{len(made)}"
        made.append(place)
        (place / "store").mkdir(parents=True)
        _copy(original, place / "store")
        return Workplace(place / "store", place / "output", original.image)

    yield copy
    for place in made:
        subprocess.run(["rm", "-rf", "--one-file-system", place], check=True)


def _copy(original: Workplace, store: Path) -> None:
    """Hard-link the downloads and the stages of one image; lock files and records are copied."""
    source = original.store
    for name in ("objects", "staging", "debs", "files", "locks", "logs"):
        (store / name).mkdir()
    for folder in ("debs", "files"):
        subprocess.run(["cp", "-al", f"{source / folder}/.", store / folder], check=True)
    records = source / "locks" / f"{original.image}.builds"
    for path in (records, source / "locks" / f"{original.image}.lock.json"):
        shutil.copyfile(path, store / "locks" / path.name)
    for stage_id in json.loads(records.read_text())[-1]:
        subprocess.run(["cp", "-al", source / "objects" / stage_id, store / "objects" / stage_id], check=True)


@pytest.fixture
def workplace(copies: Callable[[Workplace], Workplace], minimal: Workplace) -> Workplace:
    """A copy of the small image's store."""
    return copies(minimal)
