"""Real images of the lab inventory for the tests that need one, each built once a run.

They are built by the command itself in the ordinary store (``IMAGE_BUILDER_STORE``), so a second run finds
them there.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from image_builder.settings import DEFAULT_STORE
from tests.builds import Workplace


def _build(image: str, output: Path) -> Workplace:
    place = Workplace(Path(os.environ.get("IMAGE_BUILDER_STORE", DEFAULT_STORE)), output, image)
    done = place.build()
    assert done.status == 0, done.stderr
    return place


@pytest.fixture(scope="session")
def minimal(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """The small image."""
    return _build("minimal", tmp_path_factory.mktemp("minimal"))


@pytest.fixture(scope="session")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """The Kubernetes worker with Docker."""
    return _build("worker", tmp_path_factory.mktemp("worker"))


@pytest.fixture(scope="session")
def worker_containerd(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """The Kubernetes worker with containerd."""
    return _build("worker_containerd", tmp_path_factory.mktemp("worker_containerd"))


@pytest.fixture(scope="session")
def tools_tree(minimal: Workplace) -> Path:
    """The tools tree, as a root."""
    return minimal.object("tools") / "product" / "tree"
