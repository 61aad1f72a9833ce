"""A pool of real hosts, one for each thing that can be wrong with a host; and rollouts over a module's own pool."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.images.builds import Workplace
from tests.support.pools.fleet import Fault, Fleet, fleet
from tests.support.pools.rollouts import Rollout, make

FAULTS: dict[int, Fault] = {
    1: "dead",
    2: "refused",
    3: "slow banner",
    4: "other key",
    5: "auth",
    6: "sudo asks",
    7: "sudo hangs",
    8: "sudo refuses",
    9: "disk full",
    10: "slow",
}


@pytest.fixture(scope="module")
def pool(minimal: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Start fourteen hosts: 0 and those from 11 on are sound, the others are as in FAULTS. All have certificates."""
    with fleet(minimal, tmp_path_factory.mktemp("pool"), 14, faults=FAULTS, signed=True) as hosts:
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
