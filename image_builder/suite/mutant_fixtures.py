"""The fixtures of a run that tests the checks themselves: each check gets its own target, damaged by a mutation.

The option ``--mutations`` says where the mutations are: a module with ``MUTATIONS``, or a user's file of commands.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from breakages import read, run
from suite import Facts
from targets import TARGET, enter
from testinfra.host import Host
from tree import Tree

from image_builder.system.sandbox import open_root

Mutation = Callable[[Path, dict[str, Any]], None]
"""Called with the mounted root and the image's variables."""

_MUTATIONS = pytest.StashKey[Mapping[str, Sequence[Mutation]]]()


def pytest_configure(config: pytest.Config) -> None:
    name = str(config.option.mutations)
    if name.endswith(".yml"):
        config.stash[_MUTATIONS] = {
            check: [by_command(breakage.command) for breakage in breakages]
            for check, breakages in read(Path(name)).items()
        }
    else:
        config.stash[_MUTATIONS] = importlib.import_module(name).MUTATIONS


def by_command(command: str) -> Mutation:
    """Return a mutation that runs a shell command."""

    def mutate(root: Path, _variables: dict[str, Any]) -> None:
        run(enter(root), command)

    return mutate


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a check once for each of its mutations."""
    number = len(metafunc.config.stash[_MUTATIONS].get(metafunc.function.__name__, ()))
    metafunc.parametrize("mutation", range(max(number, 1)), indirect=True)


@pytest.fixture
def mutation(request: pytest.FixtureRequest) -> int:
    """The number of the mutation to apply."""
    number: int = request.param
    return number


@pytest.fixture
def host(request: pytest.FixtureRequest, facts: Facts, mutation: int) -> Iterator[Host]:
    """A throwaway root, damaged by the check's mutation."""
    target, check = request.config.stash[TARGET], request.function.__name__
    lowers = [Path(path) for path in target.path.split(":")]
    with open_root(lowers, Path(target.work, f"{check}.{mutation}")) as root:
        request.config.stash[_MUTATIONS][check][mutation](root.path, facts.variables)
        yield enter(root.path)


@pytest.fixture
def tree(host: Host) -> Tree:
    """Everything on the root filesystem."""
    return Tree.read(host)
