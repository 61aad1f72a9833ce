"""The fixtures of a run that tests the checks of a running machine: each check must pass, then fail once broken.

For each check that has a mutation of its own (``booted.py``) the machine is asked twice: as it is, and with
that mutation. So a check that is red for another one's mutation is seen, and a mutation that changes nothing as well.
What a mutation has broken is mended, where that is recorded, before the next check is asked.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from suite import Facts, list_tree
from targets import TARGET, open_target
from testinfra.host import Host
from tree import Tree

from tests.suite.booted import BOOTED, ordered

SOUND, BROKEN = "sound", "broken"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a check on the sound machine, then on the broken one."""
    metafunc.parametrize("state", (SOUND, BROKEN), indirect=True)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the checks that have such a mutation, in the mutations' order."""
    numbers = {check: number for number, check in enumerate(ordered())}
    kept = [item for item in items if _check(item) in numbers]
    if left_out := [item for item in items if item not in kept]:
        config.hook.pytest_deselected(items=left_out)
    items[:] = sorted(kept, key=lambda item: (numbers[_check(item)], item.name.endswith(f"[{BROKEN}]")))


def _check(item: pytest.Item) -> str:
    return item.name.partition("[")[0]


@pytest.fixture(scope="session")
def machine(pytestconfig: pytest.Config) -> Host:
    """The connection that all checks share."""
    return open_target(pytestconfig.stash[TARGET])


@pytest.fixture
def state(request: pytest.FixtureRequest) -> str:
    """What the machine is to be: sound or broken."""
    return str(request.param)


@pytest.fixture
def host(machine: Host, state: str, request: pytest.FixtureRequest) -> Iterator[Host]:
    """The machine, without what it has answered before; broken, and mended again, where that is the state."""
    fresh = Host(machine.backend)
    mutation = BOOTED[request.function.__name__]
    if state == BROKEN:
        _run(machine, mutation.command)
    yield fresh
    if state == BROKEN and mutation.mend:
        _run(machine, mutation.mend)


@pytest.fixture
def tree(host: Host, facts: Facts) -> Tree:
    """Everything on the root filesystem."""
    return list_tree(host, facts, booted=True)


def _run(machine: Host, command: str) -> None:
    """Run a command of a mutation; RuntimeError, which is no red check, where any part of it fails."""
    done = machine.run("sh -euc %s", command)
    if done.rc != 0:
        raise RuntimeError(f"{command}: ended with {done.rc}: {(done.stdout + done.stderr)[-500:]}")
