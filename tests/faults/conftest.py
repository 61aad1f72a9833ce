"""Copies of a store with a finished build of the small image, which a test may break."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.builds import IMAGE, Workplace


@pytest.fixture
def copy_of(minimal: Workplace) -> Iterator[Callable[[], Workplace]]:
    """Make stores beside the ordinary one (the same filesystem) that share its files by hard links."""
    made: list[Path] = []

    def make() -> Workplace:
        place = minimal.store.parent / f"{minimal.store.name}-test-{os.getpid()}-{len(made)}"
        made.append(place)
        store = place / "store"
        store.mkdir(parents=True)
        _copy(minimal.store, store)
        return Workplace(store, place / "output")

    yield make
    for place in made:
        subprocess.run(["rm", "-rf", "--one-file-system", place], check=True)


def _copy(source: Path, store: Path) -> None:
    """Hard-link the downloads and the stages of the small image; lock files and records are copied."""
    for name in ("objects", "staging", "debs", "files", "locks", "logs"):
        (store / name).mkdir()
    for folder in ("debs", "files"):
        subprocess.run(["cp", "-al", f"{source / folder}/.", store / folder], check=True)
    for name in (f"{IMAGE}.lock.json", f"{IMAGE}.builds"):
        shutil.copyfile(source / "locks" / name, store / "locks" / name)
    for stage_id in json.loads((source / "locks" / f"{IMAGE}.builds").read_text())[-1]:
        subprocess.run(["cp", "-al", source / "objects" / stage_id, store / "objects" / stage_id], check=True)


@pytest.fixture
def workplace(copy_of: Callable[[], Workplace]) -> Workplace:
    return copy_of()
