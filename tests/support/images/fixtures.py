"""Real images of the lab inventory for the tests that need one, each built once per run.

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

# The fixture of the worker that is built completely for every commit: the current one, or the one from Debian's archive
# if the current programs are absent. Tests of the others are slow.
WHOLE = "worker_current" if programs.DIRECTORY else "whole_worker"


def whole_workers(*names: str) -> list[Any]:
    """Return the fixtures of complete workers as test parameters, each with its marks."""
    return [
        pytest.param(
            name,
            marks=[
                *([] if name == WHOLE else [pytest.mark.slow]),
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
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """The image without a kernel and a disk."""
    return _build("tiny", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def minimal(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """The small image."""
    return _build("minimal", tmp_path_factory.mktemp("minimal"))


@pytest.fixture(scope="session")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """The Kubernetes worker with Docker up to its layer `node`: everything but the kubelet, which must be compiled."""
    return _build("worker", tmp_path_factory.mktemp("worker"), "--stop-after", "node")


@pytest.fixture(scope="session")
def pulled_worker(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """The same worker up to the pull of its images, which its layers don't wait for."""
    return _build("worker", tmp_path_factory.mktemp("pulled_worker"), "--stop-after", "preload")


@pytest.fixture(scope="session")
def whole_worker(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """The same worker, built completely."""
    return _build("worker", tmp_path_factory.mktemp("whole_worker"))


@pytest.fixture(scope="session")
def worker_current(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """The current worker, with containerd."""
    return _build("worker_current", tmp_path_factory.mktemp("worker_current"))


@pytest.fixture(scope="session")
def worker_current_docker(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """The current worker, with Docker."""
    return _build("worker_current_docker", tmp_path_factory.mktemp("worker_current_docker"))


@pytest.fixture(scope="session")
def worker_gpu(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """Debian 12 with a GPU driver."""
    return _build("worker_gpu", tmp_path_factory.mktemp("worker_gpu"))


@pytest.fixture(scope="session")
def tools_tree(tiny: Workplace) -> Path:
    """The tools tree, as a root."""
    return tiny.object("tools") / "product" / "tree"


@pytest.fixture
def copies() -> Iterator[Callable[[Workplace], Workplace]]:
    """Yield a function that copies a store, on the same filesystem and sharing its files through hard links."""
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
    # Under the image's name: the first build there takes it over, whatever its inventory.
    (store / "locks" / f"{original.image}.builds").write_text(json.dumps([original.ids()]))
    shutil.copyfile(original.lock, store / "locks" / f"{original.image}.lock.json")
    for stage_id in original.ids():
        subprocess.run(["cp", "-al", source / "objects" / stage_id, store / "objects" / stage_id], check=True)
