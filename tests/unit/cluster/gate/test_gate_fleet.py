"""A fleet in simulated time: false alarms, real ones, rollouts and reboots, with invariants after every turn."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from image_builder.cluster.gate import bad_hosts, breaker
from image_builder.cluster.gate.breaker import Limits
from image_builder.cluster.gate.health import Ailment, Health
from image_builder.cluster.gate.model import Node, Rules
from image_builder.cluster.gate.policy import HOST_REASON, Policy, Rule
from image_builder.cluster.gate.retest import cap
from image_builder.cluster.gate.triage import Step, plan
from image_builder.drain.hosts import BadHost
from image_builder.drain.quarantine import Record
from image_builder.node.preflight.hold import Hold

START, TURN = 1_700_000_000.0, 30.0
RULES = Rules()
POLICY = Policy(
    rules=(Rule(reason="GpuLost", remedy="hand-over"), Rule(reason=HOST_REASON, remedy="taint")),
)


@dataclass
class Fleet:
    """Nodes, the gate's memory, and its actions; each step takes effect at once, as on the API server."""

    nodes: dict[str, Node]
    now: float = START
    holds: dict[str, Hold] = field(default_factory=dict)
    known: dict[str, BadHost] = field(default_factory=dict)
    steps: list[tuple[str, Step]] = field(default_factory=list)

    def change(self, name: str, **health: object) -> None:
        node = self.nodes[name]
        self.nodes[name] = replace(node, health=replace(node.health, **health))  # type: ignore[arg-type]

    def ail(self, name: str, reason: str) -> None:
        self.change(name, ailments=(Ailment("NodeHealthy", reason, self.now),), well=frozenset())

    def heal(self, name: str) -> None:
        self.change(name, ailments=(), well=frozenset({"NodeHealthy"}))

    def boot(self, name: str, status: str = "True") -> None:
        """Reboot a node, and report its preflight."""
        boot = f"{name}-{self.now}"
        self.nodes[name] = replace(
            self.nodes[name], boot_id=boot, tested_boot=boot, reported=self.now, status=status
        )

    def turn(self) -> None:
        """Give the gate a turn, and check the invariants."""
        self.now += TURN
        nodes = list(self.nodes.values())
        self.holds = breaker.step(nodes, self.holds, self.now, Limits(), RULES.pool)
        self.known = bad_hosts.step(nodes, self.known, self.now, POLICY)
        judged = [bad_hosts.judged(node, self.known, POLICY) for node in nodes]
        before = self.out()
        for node, step, record in plan(judged, self.holds, (), POLICY, RULES, self.now):
            self.steps.append((node.name, step))
            self._do(node, step, record)
        away = len(before | {node.name for node in nodes if node.health.barred_by})
        room = min(
            cap(len(nodes), POLICY.share) - len(before),
            cap(len(nodes), max(POLICY.unavailable, POLICY.share)) - away,
        )
        assert len(self.out() - before) <= max(0, room)

    def _do(self, node: Node, step: Step, record: Record | None) -> None:
        if step is Step.GIVE_BACK:
            assert record and node.status == "True" and node.tested_boot == node.boot_id
            assert node.reported >= record.since and node.reported > record.tested, (
                "it came back without its preflight"
            )
            assert not node.health.ailments
            self.change(node.name, record=None, is_tainted=False)
            return
        assert record is not None
        stage = {Step.TAKE_OUT: record.stage, Step.DRAIN: "empty", Step.ASK: "asked"}[step]
        self.change(node.name, record=replace(record, stage=stage), is_tainted=True)

    def out(self) -> set[str]:
        return {name for name, node in self.nodes.items() if node.health.record}


def fleet(size: int) -> Fleet:
    names = [f"n{n:04}" for n in range(size)]
    well = frozenset({"NodeHealthy"})
    return Fleet(
        {
            name: Node(
                name,
                boot_id=name,
                status="True",
                tested_boot=name,
                reported=START - 9000,
                health=Health(well=well, host=f"H{name}"),
            )
            for name in names
        }
    )


@pytest.mark.parametrize(("sick", "most"), [(50, 20), (51, 0), (500, 0)])
def test_a_false_alarm_takes_out_no_more_than_its_budget(sick: int, most: int) -> None:
    """Of 1,000 nodes, 5 % cost as much as the budget says; more than that cost nothing, because the breaker holds."""
    state = fleet(1000)
    for name in list(state.nodes)[:sick]:
        state.ail(name, "GpuLost")
    for _ in range(15):
        state.turn()
        assert len(state.out()) == (most if state.now - START >= 300 else 0)
    for name in state.nodes:
        state.heal(name)
    state.turn()
    assert len(state.out()) == most, "that the alarm is over brings nobody back"
    for name in state.out():
        state.boot(name)
    state.turn()
    assert not state.out()
    state.turn()
    assert not state.known, "hosts that are well aren't held against anybody"


def test_whatever_happens_the_budget_holds_and_who_comes_back_passed() -> None:
    steps = [step for seed in range(3) for _, step in _lived(random.Random(seed)).steps]
    assert set(steps) == set(Step), "each was taken somewhere"


def _lived(chance: random.Random) -> Fleet:
    """Return a fleet after an hour in which nodes fall ill, recover, fail, are rolled and move."""
    state = fleet(150)
    names = list(state.nodes)
    for _ in range(120):
        if chance.random() < 0.3:
            state.ail(
                chance.choice(names), chance.choice(("GpuLost", "GpuInforom", "ClockOff", "DriveState"))
            )
        for name in names:
            health = state.nodes[name].health
            if (health.ailments or health.record) and chance.random() < 0.1:
                chance.choice((state.heal, state.boot))(name)
                state.boot(name, chance.choice(("True", "False")))
        if chance.random() < 0.2:
            state.change(
                chance.choice(names),
                cordon=chance.choice(("", "roll-7")),
                barred_by=chance.choice(("", "roll-7")),
            )
        if chance.random() < 0.2:
            # Its machine is replaced by one on another node's host.
            state.change(chance.choice(names), host=f"H{chance.choice(names)}")
        state.turn()
    return state
