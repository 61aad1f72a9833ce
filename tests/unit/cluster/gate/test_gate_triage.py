"""Triage of nodes: which are taken out, what is done about them and when they return, in simulated time."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from image_builder.cluster.gate import breaker
from image_builder.cluster.gate.breaker import Limits
from image_builder.cluster.gate.health import Ailment, Health, health_of
from image_builder.cluster.gate.model import Node, Rules
from image_builder.cluster.gate.policy import HOST_CONDITION, Policy, Rule
from image_builder.cluster.gate.triage import Step, plan, step_of
from image_builder.drain.quarantine import RUN, Record
from image_builder.node.net.kube import condition, stamp
from image_builder.node.preflight.hold import OPEN, RELEASED, Hold

BOOT, OTHER = "11111111-2222-3333-4444-555555555555", "11111111-2222-3333-4444-666666666666"
NOW = 1_700_000_000.0
SICK = Ailment("NodeHealthy", "GpuLost", NOW - 600)
REBOOTS = Policy(share=1.0, rules=(Rule(reason="Gpu*", remedy="reboot"),))
OUT = Record("NodeHealthy", "GpuLost", "", "reboot", NOW - 300, BOOT, NOW - 9000)
RULES = Rules()
ADMITTED: dict[str, Any] = {"admitted_boot": BOOT, "admitted_at": NOW - 10}


def node(name: str = "n", *ailments: Ailment, **more: Any) -> Node:
    """Return a working node: its current boot passed."""
    health = {key: more.pop(key) for key in list(more) if key in Health.__dataclass_fields__}
    well = health.pop("well", frozenset() if ailments else frozenset({"NodeHealthy"}))
    state = Health(ailments=ailments, well=well, **health)
    fields = {"boot_id": BOOT, "status": "True", "tested_boot": BOOT, "reported": NOW - 9000, **more}
    return Node(name, health=state, **fields)


def out(*ailments: Ailment, record: Record = OUT, **more: Any) -> Node:
    return node("n", *ailments, record=record, is_tainted=True, **more)


@pytest.mark.parametrize(
    ("subject", "step"),
    [
        (node("n", SICK), Step.TAKE_OUT),
        (node("n"), None),
        (node("n", replace(SICK, since=NOW - 299)), None),
        (node("n", replace(SICK, since=0.0)), Step.TAKE_OUT),  # its condition names no time
        (node("n", replace(SICK, since=NOW + 299)), None),
        (node("n", replace(SICK, since=NOW + 9000)), Step.TAKE_OUT),  # its clock is ahead
        # Out for its preflight, under NVSentinel, not up yet, admitted by a person who knew.
        (node("n", SICK, taints=({"key": RULES.taint, "effect": "NoSchedule"},)), None),
        (node("n", SICK, is_left=True), None),
        (node("n", SICK, boot_id=""), None),
        (node("n", SICK, **ADMITTED), None),
        (node("n", SICK, admitted_boot=OTHER, admitted_at=NOW), Step.TAKE_OUT),
        (node("n", SICK, admitted_boot=OTHER, admitted=frozenset({"GpuLost"})), Step.TAKE_OUT),
        (out(SICK), Step.DRAIN),
        (out(SICK, is_left=True), None),
        (out(SICK, record=replace(OUT, remedy="taint")), Step.TAKE_OUT),  # a more drastic remedy by now
        (out(SICK, record=replace(OUT, stage="empty")), Step.ASK),
        (out(SICK, record=replace(OUT, stage="asked")), None),
        (out(SICK, record=replace(OUT, stage="sent", sent_at=1.0, sent_boot="boot")), None),
        (out(SICK, record=replace(OUT, remedy="hand-over", stage="empty")), Step.ASK),
        (out(SICK, **ADMITTED), Step.GIVE_BACK),
        # Healthy again, and tested since, or not, or under another boot.
        (out(record=replace(OUT, remedy="taint")), None),
        (out(reported=NOW), Step.GIVE_BACK),
        (out(boot_id=OTHER, tested_boot=OTHER), Step.GIVE_BACK),
        (out(record=replace(OUT, remedy="taint"), boot_id=OTHER), None),
        (out(record=replace(OUT, remedy="taint"), reported=NOW, status="False"), None),
        (out(record=replace(OUT, remedy="taint"), reported=NOW, well=frozenset()), None),
        (out(replace(SICK, since=NOW), record=replace(OUT, remedy="taint"), reported=NOW), None),
        # Where somebody removed part of our marks, the rest is removed or all of them are restored.
        (node("n", is_tainted=True), Step.GIVE_BACK),
        (node("n", cordon=RUN), Step.GIVE_BACK),
        (node("n", cordon="roll-7"), None),
        (node("n", SICK, record=OUT), Step.TAKE_OUT),
    ],
)
def test_what_a_node_needs(subject: Node, step: Step | None) -> None:
    need = step_of(subject, {}, REBOOTS, RULES, NOW)
    assert (need and need[0]) == step


def test_a_finding_that_passes_and_returns_must_last_again() -> None:
    """Each turn of the condition has its own time; its heartbeat says nothing about how long it lasts."""
    turns = [("False", 0, 299, None), ("False", 0, 300, Step.TAKE_OUT), ("True", 290, 600, None)]
    turns += [("False", 500, 799, None), ("False", 500, 800, Step.TAKE_OUT)]
    for status, turned, seconds, step in turns:
        times = [datetime.fromtimestamp(NOW + at, UTC) for at in (turned, seconds)]
        made = condition("NodeHealthy", status, "GpuLost", "", times[1], stamp(times[0]))
        document = {"metadata": {"name": "n"}, "status": {"conditions": [made]}}
        subject = replace(node("n"), health=health_of(document, BOOT, "", REBOOTS))
        need = step_of(subject, {}, REBOOTS, RULES, NOW + seconds)
        assert (need and need[0]) == step, (status, turned, seconds)


def test_what_is_ignored_is() -> None:
    policy = Policy(rules=(Rule(reason="GpuLost", remedy="ignore"),))
    assert step_of(node("n", SICK), {}, policy, RULES, NOW) is None


@pytest.mark.parametrize("since", [NOW - 600, NOW + 9000], ids=["newer", "the node's clock is ahead"])
def test_an_admission_holds_for_its_findings_even_if_another_renews_their_condition(since: float) -> None:
    """A condition has one time: that of its newest finding."""
    known, other = replace(SICK, since=since), replace(SICK, since=since, reason="ClockOff")
    admission: dict[str, Any] = {"admitted_boot": BOOT, "admitted_at": NOW - 4000}
    subject = node("n", known, admitted=frozenset({"GpuLost"}), **admission)
    assert step_of(subject, {}, REBOOTS, RULES, NOW) is None
    need = step_of(replace(subject, health=Health(ailments=(other, known))), {}, REBOOTS, RULES, NOW)
    assert need and need[1] and need[1].reason == "ClockOff"
    # The times of others' conditions are exact.
    others = replace(subject, health=Health(ailments=(replace(known, condition="GpuXidWatch"),)))
    assert step_of(others, {}, REBOOTS, RULES, NOW)
    # An earlier version did not name the findings.
    assert step_of(node("n", replace(SICK, since=NOW - 600), **admission), {}, REBOOTS, RULES, NOW)


def test_a_condition_that_the_policy_no_longer_names_keeps_no_node_out() -> None:
    """Such a condition is neither an ailment nor well."""
    record = replace(OUT, condition="example.com/Disk", remedy="taint")
    subject = out(record=record, reported=NOW, well=frozenset())
    need = step_of(subject, {}, Policy(conditions={"example.com/*": "True"}), RULES, NOW)
    assert need is None
    assert step_of(subject, {}, Policy(), RULES, NOW) == (Step.GIVE_BACK, record)
    assert step_of(replace(subject, reported=NOW - 9000), {}, Policy(), RULES, NOW) is None
    host = replace(record, condition=HOST_CONDITION)
    assert step_of(out(record=host, reported=NOW, well=frozenset()), {}, Policy(), RULES, NOW) is None


def fleet(sick: int, of: int, **more: Any) -> list[Node]:
    return [node(f"n{n:03}", *([SICK] if n < sick else []), **more) for n in range(of)]


@pytest.mark.parametrize(
    ("sick", "of", "share", "most"), [(5, 100, 0.02, 2), (9, 9, 0.02, 1), (9, 9, 0.0, 0)]
)
def test_no_more_than_the_budget_is_out(sick: int, of: int, share: float, most: int) -> None:
    steps = plan(fleet(sick, of), {}, (), Policy(share=share), RULES, NOW)
    assert [(n.name, step) for n, step, _ in steps] == [(f"n{n:03}", Step.TAKE_OUT) for n in range(most)]


def taken_out(nodes: list[Node], policy: Policy) -> int:
    return len([step for _, step, _ in plan(nodes, {}, (), policy, RULES, NOW) if step is Step.TAKE_OUT])


def test_those_that_are_out_are_in_the_budget() -> None:
    nodes = fleet(5, 100)
    nodes[91] = replace(out(SICK), name="n091")
    assert taken_out(nodes, Policy(share=0.03)) == 2


@pytest.mark.parametrize(
    ("fenced", "emptied", "most"),
    [(0, 0, 150), (150, 0, 150), (3750, 0, 150), (3750, 150, 150), (0, 300, 75), (9, 375, 0)],
)
def test_hosts_that_a_roll_has_fenced_use_up_nothing(fenced: int, emptied: int, most: int) -> None:
    """Only those that it has emptied count, against the share of the fleet that may be unavailable."""
    nodes = fleet(200, 7500)
    for n in range(fenced):
        nodes[1000 + n] = node(f"n{1000 + n}", cordon="roll-7")
    for n in range(emptied):
        nodes[5000 + n] = node(f"n{5000 + n}", cordon="roll-7", barred_by="roll-7")
    assert taken_out(nodes, Policy()) == most


def test_the_longest_ill_goes_first() -> None:
    nodes = [node("a", SICK), node("b", replace(SICK, since=NOW - 900))]
    assert [n.name for n, _, _ in plan(nodes, {}, (), Policy(share=0.5), RULES, NOW)] == ["b"]


def test_who_is_given_back_goes_first_and_then_names_count() -> None:
    names = [("d", SICK), ("z", None), ("a", SICK), ("y", None)]
    nodes = [replace(out(ill) if ill else out(reported=NOW), name=name) for name, ill in names]
    assert [n.name for n, _, _ in plan(nodes, {}, (), REBOOTS, RULES, NOW)] == ["y", "z", "a", "d"]


def test_what_a_rollout_drives_is_left_to_it() -> None:
    """Its nodes get the taint; a host that it is working on gets nothing."""
    sets: dict[str, Any] = {"scale_set": "/set/a"}
    nodes = [node("new", SICK, **sets), replace(out(SICK, **sets), name="out")]
    nodes += [node("a-work", SICK, cordon="roll-7", **sets)]
    for held, expected in (((), {"new", "out"}), ({"/set/a"}, {"new"})):
        assert {n.name for n, _, _ in plan(nodes, {}, held, REBOOTS, RULES, NOW)} == expected


@pytest.mark.parametrize(("state", "count"), [(OPEN, 0), (RELEASED, 2)])
def test_what_the_breaker_holds_goes_no_further(state: str, count: int) -> None:
    hold = Hold("GpuLost", RULES.pool, "a", 9, 9, int(NOW), state)
    nodes = [node("n", SICK, pool="a"), replace(out(SICK, pool="a"), name="out")]
    nodes += [replace(out(reported=NOW, pool="a"), name="back")]
    steps = plan(nodes, {hold.key: hold}, (), REBOOTS, RULES, NOW)
    assert steps[0][0].name == "back" and len(steps) == 1 + count


def test_a_hold_on_one_finding_does_not_shield_the_others_of_a_node() -> None:
    hold = Hold("ClockOff", RULES.pool, "", 9, 9, int(NOW))
    subject = node("n", replace(SICK, reason="ClockOff"), SICK)
    ((_, step, record),) = plan([subject], {hold.key: hold}, (), Policy(share=1.0), RULES, NOW)
    assert step is Step.TAKE_OUT and record and record.reason == "GpuLost"


def test_many_that_ail_alike_open_the_breaker() -> None:
    limits = Limits(share=0.05, window=3600, least=3)
    assert breaker.step(fleet(5, 100), {}, NOW, limits, "pool") == {}
    (hold,) = breaker.step(fleet(6, 100), {}, NOW, limits, "pool").values()
    assert (hold.code, hold.failed, hold.of) == ("GpuLost", 6, 100)
    old = [
        replace(n, health=replace(n.health, ailments=(replace(SICK, since=NOW - 9000),)))
        for n in fleet(6, 100)
    ]
    assert breaker.step(old, {}, NOW, limits, "pool") == {}
    assert set(breaker.step(old, {hold.key: hold}, NOW, limits, "pool")) == {hold.key}
