"""The fixtures of a run that tests the checks themselves: each gets a target of its own, damaged by a mutation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from suite import Facts
from targets import TARGET, enter
from testinfra.host import Host
from tree import Tree

from image_builder.system.sandbox import open_root
from tests.suite.offline import MUTATIONS


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a check once for each of its mutations."""
    number = len(MUTATIONS.get(metafunc.function.__name__, ()))
    metafunc.parametrize("mutation", range(max(number, 1)), indirect=True)


@pytest.fixture
def mutation(request: pytest.FixtureRequest) -> int:
    """The number of the mutation to apply."""
    number: int = request.param
    return number


@pytest.fixture
def host(request: pytest.FixtureRequest, facts: Facts, mutation: int) -> Iterator[Host]:
    """A throw-away root, damaged as the check's mutation says."""
    target, check = request.config.stash[TARGET], request.function.__name__
    lowers = [Path(path) for path in target.path.split(":")]
    with open_root(lowers, Path(target.work, f"{check}.{mutation}")) as root:
        MUTATIONS[check][mutation](root.path, facts.variables)
        yield enter(root.path)


@pytest.fixture
def tree(host: Host) -> Tree:
    """Everything on its root filesystem."""
    return Tree.read(host)
