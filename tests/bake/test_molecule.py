"""Molecule scenarios of roles, on the trees of a real image: converge, idempotence, check mode, its own tests.

Each takes half a minute or more, so one is run by default; ``IMAGE_BUILDER_MOLECULE`` names others, by commas:
``nvidia``, on trees of the GPU image and with a stand-in for the container toolkit
(``tests/support/images/toolkits.py``), and those that need no package beyond the small image's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from image_builder.bake.lock import repository
from image_builder.bake.lock.model import Lock
from image_builder.bake.store import Store
from tests.support.images import toolkits, variants
from tests.support.images.builds import Workplace

pytestmark = [pytest.mark.root, pytest.mark.nightly]

ROLES = os.environ.get("IMAGE_BUILDER_MOLECULE", "network_accounting").split(",")


def paths(trees: Iterable[Path]) -> str:
    return ":".join(map(os.fspath, trees))


@pytest.fixture
def surroundings(request: pytest.FixtureRequest, role: str, tmp_path: Path) -> Iterator[dict[str, str]]:
    """What a scenario is told of where it runs: the trees, and the packages where it installs some."""
    if role != "nvidia":
        yield {"IMAGE_BUILDER_TREES": paths(request.getfixturevalue("minimal").trees("system"))}
        return
    built: Workplace = request.getfixturevalue("worker_gpu")
    store = Store(built.store)
    inputs = tmp_path / "tree/inputs"
    shutil.copytree(built.object("module_build") / "product", inputs / "module_build")
    locked = Lock.load(built.lock).group("gpu")
    with store.staging() as staging:
        (cache := staging / "debs").mkdir()
        packages = [*locked.packages, *variants.build_packages(toolkits.DECLARATION.packages, cache)]
        for package in locked.packages:
            os.link(built.store / "debs" / package.sha256, cache / package.sha256)
        repository.write_repository(packages, locked.suite, cache, staging / "repo")
        yield {
            "IMAGE_BUILDER_TREES": paths([tmp_path / "tree", *built.trees("container_runtime")]),
            "IMAGE_BUILDER_REPO": os.fspath(staging / "repo"),
        }


@pytest.mark.parametrize("role", ROLES)
def test_scenario(role: str, surroundings: dict[str, str], repo_root: Path) -> None:
    done = subprocess.run(
        [sys.executable, repo_root / ".config/molecule/run", role, "test"],
        env={**os.environ, **surroundings},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert "idempotence" in done.stdout
    assert "passed" in done.stdout
