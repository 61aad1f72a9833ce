"""More hosts than can be worked on at once: they wait, and their deadlines don't run in the meantime."""

from __future__ import annotations

import pytest

from image_builder.pool.plan.policy import Deadlines, Policy
from image_builder.pool.run.records import Intent
from tests.support.pools.simulated.rollouts import Faults, World, make, simulate

# A probe takes 0.3 s in the simulation, a verification 8 s: in one round either is done, in two it isn't.
ONE_ROUND = Deadlines(probe=0.5, bootstrap=900, verify=10)
POLICY = Policy(
    waves=("100%",), max_unavailable="100%", soak_seconds=(0.0,), deadlines=ONE_ROUND, verify="100%"
)


@pytest.mark.parametrize("places", [1, 4, 10**6])
def test_who_waits_for_room_is_not_late(places: int) -> None:
    world = World(make(100, POLICY), Faults(), places=places)
    most = 0

    def check() -> None:
        nonlocal most
        most = max(most, world.at_work["probe"], world.at_work["verify"])

    world.check = check
    progress, _, records = simulate(world.plan, world.faults, world=world)
    assert progress.finished
    assert [s.outcome.signature for s in progress.hosts.values() if s.outcome] == ["ok"] * 100
    assert most == min(places, 99)  # the wave after the canary
    tries = {step: sum(s.tries[step] for s in progress.hosts.values()) for step in ("probe", "verify")}
    assert tries == {"probe": 100, "verify": 100}
    # A slice waits for those of its hosts that are yet to be probed: otherwise each would cost an Ansible process.
    slices = [r for r in records if isinstance(r, Intent) and r.step == "bootstrap"]
    assert len(slices) == sum(len(wave.slices) for wave in world.plan.waves)
