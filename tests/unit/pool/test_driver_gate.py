"""A control plane that doesn't answer: its last reading counts for a while, then it is red; nothing waits for it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from image_builder.pool.plan.policy import Deadlines, GateLimits, Policy
from image_builder.pool.rollout import Options, _setup
from image_builder.pool.run.driver import run
from image_builder.pool.run.gates import Reading
from image_builder.pool.run.progress import apply, begin
from image_builder.pool.run.records import Gated, Intent, Opened, Record, Result
from image_builder.pool.steps.control_plane import Unwatched
from image_builder.pool.steps.fleet import Fleet, Setup
from tests.support.pools.simulated.rollouts import START, Faults, World, make, simulate
from tests.unit.pool.test_fleet import setup

__all__ = ["setup"]

# Ten canaries, one every four seconds.
POLICY = Policy(
    canaries=10,
    slice_hosts=1,
    join_rate=0.25,
    max_unavailable="100%",
    budget="100%",
    wave_budget="100%",
    deadlines=Deadlines(bootstrap=10.0),
    gate=GateLimits(interval_seconds=5.0),
)


class Silent(World):
    """A fleet whose control plane answers once."""

    requests: Sequence[float] = ()

    def gate(self) -> Reading | None:  # type: ignore[override]
        self.requests = (*self.requests, self.time)
        return super().gate() if len(self.requests) == 1 else None


def test_a_gate_that_does_not_answer_holds_up_neither_starts_nor_deadlines() -> None:
    plan = make(20, POLICY)
    hung = plan.waves[0].hosts[0]
    world = Silent(plan, Faults(fates={hung: "hangs before"}))
    progress, records = begin(plan), list[Record]()
    records.append(Opened(at=world.time, plan=plan.digest))
    apply(progress, records[0])
    run(progress, world, records.append, lambda: world.time > START + 60)

    red = [r for r in records if isinstance(r, Gated) and r.verdict == "hold"]
    assert red and red[0].at == START + 5 + 15
    assert red[0].reasons == ("the control plane can't be read: no answer for 15 s",)
    assert [r.at - START for r in red[:4]] == [20, 25, 30, 35]
    started = [round(r.at - START, 1) for r in records if isinstance(r, Intent) and r.step == "bootstrap"]
    assert started == [0.3, 4.3, 8.3, 12.3, 16.3], "until it is red, and none afterwards"
    (late,) = [r for r in records if isinstance(r, Result) and r.host == hung and r.step == "bootstrap"]
    assert (round(late.at - START, 1), late.outcome.kind) == (10.3, "timeout")


class Slow(Unwatched):
    """A control plane that answers when it is told to."""

    def __init__(self) -> None:
        self.answer = threading.Event()

    def read(self) -> Reading:
        self.answer.wait(60)
        return Reading(requests=7)


def test_a_fleet_reads_the_control_plane_beside_its_work(setup: Setup, tmp_path: Path) -> None:
    plane = Slow()
    with Fleet(replace(setup, control_plane=plane), tmp_path / "work") as fleet:
        assert [fleet.gate(), fleet.gate()] == [None, None], "nobody waited for the answer"
        plane.answer.set()
        until = fleet.now() + 600
        fleet.wait(until)
        assert fleet.now() < until, "the answer wakes who waits"
        assert fleet.gate() == Reading(requests=7)
        plane.answer.clear()
        assert fleet.gate() is None, "the next one is another reading"
        plane.answer.set()


class Red(Unwatched):
    """A control plane that is red from the moment it is told to be."""

    is_red = False

    def read(self) -> Reading:
        return Reading(requests=1000, throttled=999 if self.is_red else 0)


class Watched(World):
    """A fleet whose control plane gets red once the canaries are done."""

    plane: Red

    def gate(self) -> Reading:
        self.plane.is_red = self.fine >= {*self.plan.waves[0].hosts}
        return self.plane.read()


def test_a_red_control_plane_that_a_rollout_was_given_keeps_the_next_wave_from_beginning(
    setup: Setup, tmp_path: Path
) -> None:
    plane, plan = Red(), make(300)
    options = Options(tmp_path / "plan.json", setup.access, tmp_path)
    assert _setup(options, plan, plane, None).control_plane is plane
    world = Watched(plan, Faults())
    world.plane = plane
    progress, _, _ = simulate(plan, Faults(), world=world)
    assert progress.stopped and not progress.finished and progress.began == 1
    assert world.touched == {*plan.waves[0].hosts}
