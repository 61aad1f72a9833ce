"""The fixtures of a run that tests the checks of a running machine: each must pass, then fail on the broken machine.

For each of its breakages a check runs twice: on the machine as it is, and on the broken one. This reveals a check that
fails because of another check's breakage, and a breakage that changes nothing. A breakage is repaired, if a repair is
recorded, before the next check runs. Checks that also run on a sealed tree are left out: they are seen to fail there.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from breakages import Breakage, read, run
from suite import Facts, list_tree
from targets import TARGET, open_target
from testinfra.host import Host
from tree import Tree

SOUND, BROKEN = "sound", "broken"
_BREAKAGES = pytest.StashKey[Mapping[str, Sequence[Breakage]]]()


def pytest_configure(config: pytest.Config) -> None:
    """Read the breakages that ``--mutations`` names: a user's file, or a module whose ``ordered`` returns our own."""
    name = str(config.option.mutations)
    if name.endswith(".yml"):
        config.stash[_BREAKAGES] = read(Path(name))
    else:
        ours = importlib.import_module(name).ordered()
        config.stash[_BREAKAGES] = {check: [Breakage(b.command, b.mend)] for check, b in ours.items()}


@pytest.hookimpl(
    trylast=True
)  # the state comes last in a check's name, whatever else the check is parametrized by
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a check on the sound machine, then on the broken one, for each breakage."""
    numbers = range(len(metafunc.config.stash[_BREAKAGES].get(metafunc.function.__name__, ())))
    attempts = [(number, state) for number in numbers for state in (SOUND, BROKEN)]
    names = [f"{number}-{state}" for number, state in attempts]
    metafunc.parametrize("attempt", attempts, ids=names, indirect=True)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the checks that have a breakage and run only on a machine, in the breakages' order."""
    turns = {check: turn for turn, check in enumerate(config.stash[_BREAKAGES].keys())}
    kept = [item for item in items if _check(item) in turns and not item.get_closest_marker("offline")]
    if left_out := [item for item in items if item not in kept]:
        config.hook.pytest_deselected(items=left_out)
    items[:] = sorted(kept, key=lambda item: turns[_check(item)])


def _check(item: pytest.Item) -> str:
    return item.name.partition("[")[0]


@pytest.fixture(scope="session")
def machine(pytestconfig: pytest.Config) -> Host:
    """The connection that all checks share."""
    return open_target(pytestconfig.stash[TARGET])


@pytest.fixture
def attempt(request: pytest.FixtureRequest) -> tuple[int, str]:
    """The number of the breakage, and the machine's state: sound or broken."""
    number, state = request.param
    return number, state


@pytest.fixture
def host(machine: Host, attempt: tuple[int, str], request: pytest.FixtureRequest) -> Iterator[Host]:
    """The machine, without its cached answers; in the broken state, broken before the check and repaired after it."""
    number, state = attempt
    breakage = request.config.stash[_BREAKAGES][request.function.__name__][number]
    if state == BROKEN:
        run(machine, breakage.command)
    yield Host(machine.backend)
    if state == BROKEN and breakage.mend:
        run(machine, breakage.mend)


@pytest.fixture
def tree(host: Host, facts: Facts) -> Tree:
    """Everything on the root filesystem."""
    return list_tree(host, facts, booted=True)
