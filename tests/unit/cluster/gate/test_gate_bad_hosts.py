"""Bad physical hosts: when one is remembered, when it is struck off, and what that means for nodes that land on it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from image_builder.cluster.gate.bad_hosts import Memory, judged, on_known, step
from image_builder.cluster.gate.health import Ailment, Health
from image_builder.cluster.gate.model import Node, Rules
from image_builder.cluster.gate.policy import HOST_CONDITION, HOST_REASON, Policy, Rule
from image_builder.cluster.gate.remedies import Remedies
from image_builder.cluster.gate.triage import Step, plan, step_of
from image_builder.drain import hosts
from image_builder.drain.hosts import BadHost
from image_builder.drain.quarantine import Record
from image_builder.node.net.kube import Client
from image_builder.node.preflight import model
from image_builder.node.preflight.model import FAILED, Verdict

BOOT, NEXT = "11111111-2222-3333-4444-555555555555", "11111111-2222-3333-4444-666666666666"
NOW = 1_700_000_000.0
RULES, POLICY = Rules(), Policy()
HOLDS = Policy(share=1.0, rules=(Rule(reason=HOST_REASON, remedy="taint"),))
LOST = Record("NodeHealthy", "GpuLost", "gpu.lost: 3", "hand-over", NOW - 300, BOOT, NOW - 9000)
BAD = BadHost("A", "old", "GpuLost", "gpu.lost: 3", NOW - 300)


def node(name: str = "old", host: str = "A", record: Record | None = None, **more: Any) -> Node:
    """Return a node that passed its preflight, on a physical host."""
    fields = {"boot_id": BOOT, "status": "True", "tested_boot": BOOT, "reported": NOW - 9000, **more}
    health = Health(host=host, record=record, is_tainted=record is not None, well=frozenset({"NodeHealthy"}))
    return Node(name, health=health, **fields)


def out(name: str = "old", host: str = "A", **more: Any) -> Node:
    return node(name, host, LOST, **more)


def failed(code: str) -> Node:
    """Return a node that failed its preflight."""
    verdict = Verdict(FAILED, code, "so it is", "replace")
    document = model.document(verdict, [], boot_id=BOOT, image_build="b", started="now", seconds=9.0)
    return node(status="False", message=model.message(document), reported=NOW - 300)


def test_the_host_of_a_node_that_leaves_is_remembered() -> None:
    known = step([out()], {}, NOW, POLICY)
    assert known == {"A": BAD}
    # Its machine is gone, comes up elsewhere, or another lands on the host: the host stays known.
    for nodes in (
        [],
        [node(host="B", boot_id=NEXT, tested_boot=NEXT, reported=NOW)],
        [node("new", reported=NOW)],
    ):
        assert step(nodes, known, NOW, POLICY) == known


def test_a_nodes_own_record_has_its_limits() -> None:
    """Root of a node writes what it likes into its annotation, and so into the memory of all hosts."""
    (entry,) = step([node(record=replace(LOST, detail="x" * 9999))], {}, NOW, POLICY).values()
    assert len(entry.detail) == 300
    ahead = NOW + 3 * 86400
    # From the future it would never be forgotten.
    assert step([node(record=replace(LOST, since=ahead))], {}, NOW, POLICY) == {}
    assert step([], {"A": replace(BAD, since=ahead)}, NOW, POLICY) == {}
    # A clock may be ahead.
    assert step([], {"A": replace(BAD, since=NOW + 60)}, NOW, POLICY)


def test_who_only_advises_says_once_what_would_be_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(hosts, "read", lambda _: {})
    monkeypatch.setattr(hosts, "write", lambda *_: pytest.fail("nothing is written"))
    memory = Memory(None, POLICY, lines.append)  # type: ignore[arg-type]
    for nodes in ([out()], [out()], []):
        memory.turn(nodes, NOW, advises=True)
    assert lines == [f"would be remembered: {BAD.words}", "would be forgotten: A is no longer bad"]


@pytest.mark.parametrize(
    ("subject", "remembered"),
    [
        (out(host=""), False),
        (node(record=replace(LOST, reason="ClockOff")), False),
        # The node is still out, and its machine came up elsewhere.
        (out(host="B", boot_id=NEXT), False),
        (node(record=replace(LOST, condition=HOST_CONDITION, reason=HOST_REASON)), False),
        (failed("gpu.lost"), True),
        (failed("driver.mismatch"), False),
        (node(), False),
    ],
)
def test_only_hardware_is_held_against_a_host(subject: Node, remembered: bool) -> None:
    assert bool(step([subject], {}, NOW, POLICY)) == remembered


@pytest.mark.parametrize(
    ("subject", "known"),
    [
        (node(boot_id=NEXT, tested_boot=NEXT, reported=NOW), False),
        (node(reported=BAD.since // 1), False),
        # Not tested since, failed or tested under another boot, still out, another node.
        (node(), True),
        (node(reported=NOW, status="False"), True),
        (node(reported=NOW, boot_id=NEXT), True),
        (out(reported=NOW), True),
        (node("new", reported=NOW), True),
        (node(host="B", reported=NOW), True),
    ],
)
def test_only_the_same_machines_preflight_clears_a_host(subject: Node, known: bool) -> None:
    assert bool(step([subject], {"A": BAD}, NOW, POLICY)) == known


def test_the_newest_finding_counts_and_old_ones_are_forgotten() -> None:
    newer = replace(LOST, reason="GpuInforom", since=NOW)
    assert step([node("new", record=newer)], {"A": BAD}, NOW, POLICY)["A"].node == "new"
    assert step([out()], {"A": replace(BAD, node="new", since=NOW)}, NOW, POLICY)["A"].node == "new"
    day = 86400.0
    assert step([], {"A": BAD}, BAD.since + 90 * day, POLICY) and not step(
        [], {"A": BAD}, NOW + 90 * day, POLICY
    )
    assert step([out()], {}, NOW, Policy(remember_days=0)) == {}


@pytest.mark.parametrize("letter", ["x", "é", "😀"])
def test_what_is_remembered_fits_a_config_map(letter: str) -> None:
    """Each node writes its own detail, in any script."""
    many = {f"H{n}": BadHost(f"H{n}", f"n{n}", "GpuLost", letter * 300, NOW - n) for n in range(3000)}
    entries = step([], many, NOW, POLICY)
    assert "H0" in entries and "H2999" not in entries
    assert sum(len(name) + len(entry.text()) for name, entry in entries.items()) < 1 << 20


def test_a_node_that_names_another_host_each_turn_displaces_no_other_nodes_entries() -> None:
    known = {"A": BAD}
    for n in range(1, 100):
        known = step([node("rogue", f"H{n}", replace(LOST, since=NOW + n))], known, NOW, POLICY)
    assert known.pop("A") == BAD
    assert sorted(known) == ["H95", "H96", "H97", "H98", "H99"]


def test_who_comes_to_a_bad_host_is_told_of_or_held_as_the_policy_says() -> None:
    known = {"A": BAD}
    arrival = node("new")
    assert on_known(arrival, known) == BAD and on_known(node("old"), known) is None
    assert step_of(judged(arrival, known, POLICY), {}, POLICY, RULES, NOW) is None
    need = step_of(judged(arrival, known, HOLDS), {}, HOLDS, RULES, NOW)
    assert need and need[0] is Step.TAKE_OUT and need[1] and need[1].condition == HOST_CONDITION
    assert "GpuLost" in need[1].detail and "old" in need[1].detail
    # Before the gate admits it, too.
    gated = node("new", taints=({"key": RULES.taint, "effect": "NoSchedule"},))
    need = step_of(judged(gated, known, HOLDS), {}, HOLDS, RULES, NOW)
    assert need and need[0] is Step.TAKE_OUT


def test_who_comes_to_a_bad_host_gets_one_event() -> None:
    posted: list[str] = []

    class Api:
        def find(self, path: str) -> dict[str, Any]:
            return {"metadata": {"name": path.rpartition("/")[2], "uid": "u"}}

        def request(self, _method: str, _path: str, body: dict[str, Any]) -> None:
            posted.append(f"{body['involvedObject']['name']} {body['reason']} {body['type']}")

    lines: list[str] = []
    remedies = Remedies(cast(Client, Api()), Rules(), lines.append, lambda: 0.0)
    remedies._memory.known = {"A": BAD}
    for nodes in ([node("new"), node("old")], [node("new")], [], [node("new")]):
        remedies._tell_of_hosts(nodes, NOW)
    assert posted == [f"new {HOST_REASON} Warning"] * 2, "once, and again after it had gone"
    assert len(lines) == 2


def test_who_is_held_for_its_host_comes_back_through_its_preflight_once_the_host_is_forgotten() -> None:
    held = Record(HOST_CONDITION, HOST_REASON, "", "taint", NOW - 60, BOOT, NOW - 9000)
    subject = node("new", record=held, reported=NOW)

    def need(subject: Node, known: dict[str, BadHost] | None) -> Step | None:
        step_and_record = step_of(judged(subject, known, HOLDS), {}, HOLDS, RULES, NOW)
        return step_and_record[0] if step_and_record else None

    assert need(subject, {"A": BAD}) is None
    assert need(subject, None) is None, "while what is known can't be read"
    assert need(subject, {}) is Step.GIVE_BACK
    assert need(replace(subject, reported=NOW - 9000), {}) is None, "not tested since"
    by_hand = replace(subject, admitted_boot=BOOT, admitted_at=NOW)
    assert need(by_hand, {"A": BAD}) is Step.GIVE_BACK
    again = replace(by_hand, health=replace(by_hand.health, record=None, is_tainted=False))
    assert need(again, {"A": BAD}) is None, "a person knew"


def test_a_bad_host_that_is_only_told_of_keeps_nobody_out_for_another_finding() -> None:
    record = replace(LOST, since=NOW - 60)
    subject = node("new", record=record, reported=NOW)
    need = step_of(judged(subject, {"A": BAD}, POLICY), {}, POLICY, RULES, NOW)
    assert need and need[0] is Step.GIVE_BACK


def test_known_hosts_are_in_the_budget() -> None:
    policy = HOLDS.model_copy(update={"share": 0.02})
    known = {f"H{n}": replace(BAD, name=f"H{n}") for n in range(50)}
    nodes = [judged(node(f"n{n:03}", f"H{n}"), known, policy) for n in range(100)]
    assert len(plan(nodes, {}, (), policy, RULES, NOW)) == 2
    # A node that is sick itself goes first, though the bad host has been known for longer.
    sick = Ailment("NodeHealthy", "GpuLost", NOW - 300)
    nodes[99] = replace(nodes[99], health=replace(nodes[99].health, ailments=(sick,)))
    known_since = replace(BAD, since=NOW - 9000)
    nodes[0] = judged(node("n000", "A"), {"A": known_since}, policy)
    assert next(n.name for n, _, _ in plan(nodes, {}, (), policy, RULES, NOW)) == "n099"
