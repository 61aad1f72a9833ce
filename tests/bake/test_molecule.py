"""Molecule scenarios of roles, on the trees of a real image: converge, idempotence, check mode, the role's own tests.

Each takes half a minute or more, so every commit runs one; all others are slow. The scenario of `nvidia` has the
trees of the GPU image and a stand-in for the container toolkit (tests/support/images/toolkits.py), that of
`container_runtime` Debian's engines, and all others the small image and the packages of today's worker.
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
from image_builder.cli import init
from tests.support.images import programs, toolkits, variants
from tests.support.images.builds import REPO, Workplace, offered_packages
from tests.support.images.fixtures import WHOLE

pytestmark = pytest.mark.root

EVERY_COMMIT = "network_accounting"
# The image whose packages a scenario gets in addition to those of its trees.
PACKAGES = {EVERY_COMMIT: "minimal", "container_runtime": "worker"}
ROLES = [
    pytest.param(path.name, marks=[] if path.name == EVERY_COMMIT else pytest.mark.slow)
    for path in sorted((REPO / "roles").iterdir())
    if path.is_dir()
]


def paths(trees: Iterable[Path]) -> str:
    return ":".join(map(os.fspath, trees))


@pytest.fixture
def surroundings(request: pytest.FixtureRequest, role: str, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Yield the variables that describe a scenario's environment: the trees, and the packages if it installs any."""
    if role != "nvidia":
        trees = [*request.getfixturevalue("minimal").trees("system")]
        if role == "kubelet":
            (folder := tmp_path / "tree/usr/bin").mkdir(parents=True)
            programs.unpack("kubernetes-1.36.2/kubelet", folder)
            trees.insert(0, tmp_path / "tree")
        with offered_packages(request.getfixturevalue(PACKAGES.get(role, WHOLE))) as offered:
            yield {"IMAGE_BUILDER_TREES": paths(trees), "IMAGE_BUILDER_REPO": os.fspath(offered)}
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
def test_scenario(role: str, surroundings: dict[str, str]) -> None:
    output = run(REPO / "roles" / role, surroundings)
    assert "passed" in output


@pytest.mark.slow
def test_scenario_of_a_users_role(minimal: Workplace, tmp_path: Path) -> None:
    """The scenario is as `image-builder init` writes it, in its own repository."""
    shutil.copytree(init.TEMPLATE, tmp_path / "images")
    run(tmp_path / "images/roles/site_banner", {"IMAGE_BUILDER_TREES": paths(minimal.trees("system"))})


def run(role: Path, surroundings: dict[str, str]) -> str:
    """Run a role's scenario to its end; return its output."""
    done = subprocess.run(
        [sys.executable, REPO / ".config/molecule/run", role, "test"],
        env={**os.environ, **surroundings},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert "idempotence" in done.stdout
    return done.stdout
