"""One pool of real hosts for all tests of a process, with a host for each thing that can be wrong with one.

A module is in the hosts' network while it has ``pool``, and leaves each host as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ansible_runner
import pytest

from tests.support.images.builds import Workplace
from tests.support.pools.fleet import CLASSES, USER, Fault, Fleet, started
from tests.support.pools.rollouts import Rollout, fill, install, let_fail, make

# Hosts 0 to 5 are sound. Those with faults have the same numbers in each run; the last ones have no agent, one that
# fails, a full disk, and a slow shell.
SOUND = 6
FAULTS: dict[int, Fault] = dict(enumerate((f for f, kind in CLASSES.items() if kind != "ok"), SOUND))
AGENTLESS, BROKEN, FILLED, SLOW = range(SOUND + len(FAULTS), SOUND + len(FAULTS) + 4)
SITE_PACKAGES = Path(ansible_runner.__file__).parents[1]


def with_fault(fault: Fault) -> int:
    """Return the number of the host with a fault."""
    return next(number for number, each in FAULTS.items() if each == fault)


def not_quick(pool: Fleet, numbers: Iterable[int]) -> None:
    """Undo ``be_quick``: give hosts the stand-in again."""
    install(pool, numbers)
    for number in numbers:
        pool.run(number, "rm", "-f", "/usr/local/bin/cloud-init")


@pytest.fixture(scope="session")
def hosts(minimal: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Start the hosts, all of them with certificates, and the stand-in for the node agent where one is reached."""
    faults: dict[int, Fault] = {**FAULTS, SLOW: "slow"}
    folder = tmp_path_factory.mktemp("hosts")
    with started(minimal, folder, SLOW + 1, faults=faults, signed=True, site=SITE_PACKAGES) as pool:
        asking = (number for number, fault in FAULTS.items() if fault.startswith("sudo"))
        install(pool, (*range(SOUND), BROKEN, FILLED, *asking))
        let_fail(pool, BROKEN)
        fill(pool, FILLED)
        yield pool


@contextmanager
def lent(hosts: Fleet) -> Iterator[Fleet]:
    """Enter the hosts' network until the block ends; then end what still runs on them, and remove Ansible's traces."""
    with hosts.entered():
        yield hosts
    for number in range(len(hosts.hosts)):
        hosts.run(number, "sh", "-c", f"kill -9 -1; rm -rf /root/.ansible /home/{USER}/.ansible")


@pytest.fixture(scope="module")
def pool(hosts: Fleet) -> Iterator[Fleet]:
    """Lend the hosts as they are."""
    with lent(hosts):
        yield hosts


@pytest.fixture
def rollout(pool: Fleet, tmp_path: Path) -> Callable[..., Rollout]:
    """Return a function that plans a rollout of the numbered hosts, all of them sound unless ``sound`` says which."""

    def plan(
        *numbers: int,
        policy: Mapping[str, Any] | None = None,
        agent: str = "",
        sound: Iterable[int] | None = None,
    ) -> Rollout:
        sound = numbers if sound is None else sound
        return make(pool, tmp_path, numbers, policy=policy, agent=agent, sound=sound)

    return plan
