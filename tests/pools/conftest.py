"""A pool of real hosts, one for each thing that can be wrong with one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.builds import Workplace
from tests.pools.fleet import Fault, Fleet, fleet

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
    """Fourteen hosts: 0 and those from 11 on are sound, the others as FAULTS says. All have certificates."""
    with fleet(minimal, tmp_path_factory.mktemp("pool"), 14, faults=FAULTS, signed=True) as made:
        yield made
