"""Real images of the lab inventory for the tests that need one, each built once a run.

They are built by the command itself in the ordinary store (``IMAGE_BUILDER_STORE``), so a second run finds
them there.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from image_builder.settings import DEFAULT_STORE
from tests.support.images import programs
from tests.support.images.builds import Workplace

# The fixture of the worker that every commit makes to its end: today's, or the one of Debian's archive where today's
# programs are absent. The others are for the night.
WHOLE = "worker_current" if programs.DIRECTORY else "whole_worker"


def whole_workers(*names: str) -> list[Any]:
    """Return fixtures of whole workers as parameters of a test, each with its marks."""
    return [
        pytest.param(
            name,
            marks=[
                pytest.mark.image(name),
                *([] if name == WHOLE else [pytest.mark.nightly]),
                *([] if name == "whole_worker" else [programs.needs_programs]),
            ],
        )
        for name in names
    ]


def _build(image: str, output: Path, *argv: str) -> Workplace:
    place = Workplace(Path(os.environ.get("IMAGE_BUILDER_STORE", DEFAULT_STORE)), output, image)
    done = place.build(*argv)
    assert done.status == 0, done.stderr
    stopped = tuple(stage["id"] for stage in done.result["stages"]) if argv else ()
    return dataclasses.replace(place, made=stopped)


@pytest.fixture(scope="session")
def minimal(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """The small image."""
    return _build("minimal", tmp_path_factory.mktemp("minimal"))


@pytest.fixture(scope="session")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """The Kubernetes worker with Docker as far as its layer `node`: it has all but a kubelet, which is compiled."""
    return _build("worker", tmp_path_factory.mktemp("worker"), "--stop-after", "node")


@pytest.fixture(scope="session")
def pulled_worker(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """The same worker as far as its images are pulled, which its layers don't wait for."""
    return _build("worker", tmp_path_factory.mktemp("pulled_worker"), "--stop-after", "preload")


@pytest.fixture(scope="session")
def whole_worker(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """The same worker to its end."""
    return _build("worker", tmp_path_factory.mktemp("whole_worker"))


@pytest.fixture(scope="session")
def worker_current(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """The worker of today, with containerd."""
    return _build("worker_current", tmp_path_factory.mktemp("worker_current"))


@pytest.fixture(scope="session")
def worker_current_docker(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """The worker of today, with Docker."""
    return _build("worker_current_docker", tmp_path_factory.mktemp("worker_current_docker"))


@pytest.fixture(scope="session")
def worker_gpu(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """Debian 12 with a GPU's driver."""
    return _build("worker_gpu", tmp_path_factory.mktemp("worker_gpu"))


@pytest.fixture(scope="session")
def tools_tree(minimal: Workplace) -> Path:
    """The tools tree, as a root."""
    return minimal.object("tools") / "product" / "tree"


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
    # Under the image's name: the first build there takes it over, of whatever inventory.
    (store / "locks" / f"{original.image}.builds").write_text(json.dumps([original.ids()]))
    shutil.copyfile(original.lock, store / "locks" / f"{original.image}.lock.json")
    for stage_id in original.ids():
        subprocess.run(["cp", "-al", source / "objects" / stage_id, store / "objects" / stage_id], check=True)
