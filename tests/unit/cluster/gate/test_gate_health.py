"""A node's health according to its Node object."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from image_builder.cluster.gate.admit import why
from image_builder.cluster.gate.health import health_of
from image_builder.cluster.gate.model import Node, Rules, node_from
from image_builder.cluster.gate.policy import Policy, Rule
from image_builder.cluster.gate.triage import Step, step_of
from image_builder.drain.quarantine import Record, Remedy
from image_builder.node.finding import kubernetes_reason
from image_builder.node.health import maintenance, report
from image_builder.node.health.alarms import Alarm
from image_builder.node.health.model import Finding
from image_builder.node.net.fetch import Response

BOOT, OTHER = "11111111-2222-3333-4444-555555555555", "11111111-2222-3333-4444-666666666666"
NOTICED = datetime(2026, 11, 26, 17, 45, tzinfo=UTC).timestamp()
SET = "/subscriptions/S/resourceGroups/g/providers/Microsoft.Compute/virtualMachineScaleSets/Gpu-0"


def node(*conditions: dict[str, Any], **meta: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "n", "uid": "u", **meta},
        "spec": {"providerID": f"azure://{SET}/virtualMachines/7"},
        "status": {"conditions": list(conditions)},
    }


def condition(kind: str, status: str, message: str = "", **more: Any) -> dict[str, Any]:
    at = {"lastTransitionTime": "2026-01-01T00:00:00Z"}
    return {"type": kind, "status": status, "reason": "R", "message": message, **at, **more}


def agent(boot: str, *, failed: bool) -> dict[str, Any]:
    """Return the condition as the node's agent writes it."""
    alarm = Alarm("gpu", Finding("gpu.lost", "3", "fail", "gpu 3 is lost"), 1, 0.0, since=1.0)
    made = report.condition([alarm] if failed else [], boot, "image")
    return condition("NodeHealthy", made.status, made.message, reason=made.reason)


def test_our_agents_condition_is_of_its_boot() -> None:
    sick = health_of(node(agent(BOOT, failed=True)), BOOT, "", Policy())
    (ailment,) = sick.ailments
    assert (ailment.condition, ailment.reason, ailment.since) == ("NodeHealthy", "GpuLost", 1767225600.0)
    assert health_of(node(agent(BOOT, failed=False)), BOOT, "", Policy()).well == {"NodeHealthy"}
    for failed in (False, True):
        old = health_of(node(agent(OTHER, failed=failed)), BOOT, "", Policy())
        assert not old.ailments and not old.well


@pytest.mark.parametrize(("status", "ills", "well"), [("True", 1, 0), ("False", 0, 1), ("Unknown", 0, 0)])
def test_anothers_condition(status: str, ills: int, well: int) -> None:
    health = health_of(node(condition("KernelDeadlock", status, reason="")), BOOT, "", Policy())
    assert (len(health.ailments), len(health.well), health.is_cut) == (ills, well, False)


def test_what_the_policy_ignores_is_no_ailment() -> None:
    policy = Policy(rules=(Rule(reason="ClockUnsynchronized", remedy="ignore"),))
    for reason, ills in (("ClockUnsynchronized", 0), ("GpuLost", 1)):
        sick = node(condition("NodeHealthy", "False", reason=reason))
        health = health_of(sick, BOOT, "", policy)
        assert len(health.ailments) == ills
        assert ("NodeHealthy" in health.well) is not bool(ills)


def test_a_number_that_nobody_can_parse_is_no_count() -> None:
    """A node's own message must not stop the gate for all others."""
    sick = node(condition("NodeHealthy", "False", f"{'9' * 5000} findings: clock.off: x", reason="GpuLost"))
    assert health_of(sick, BOOT, "", Policy()).ailments[0].reason == "GpuLost"


def several(*findings: tuple[str, str]) -> dict[str, Any]:
    """Return a Node with the agent's condition for these codes and details."""
    alarms = [Alarm("x", Finding(code, "", "fail", detail), 1, 0.0, since=1.0) for code, detail in findings]
    made = report.condition(alarms, BOOT, "image")
    return node(condition("NodeHealthy", made.status, made.message, reason=made.reason))


CLOCK, XID = ("clock.off", "2 s off"), ("gpu.xid", "Xid 79")
SEVERAL: dict[str, tuple[tuple[tuple[str, str], ...], list[str]]] = {
    "one is not ignored": ((CLOCK, XID), ["GpuXid"]),
    "all are ignored": ((CLOCK, ("clock.off", "3 s off; all")), []),
    "no room for all": ((("clock.off", "x" * 2000), XID), ["NodeHealthy"]),
    "each counts, once": ((("drive.state", "sda"), XID, ("gpu.xid", "Xid 94")), ["DriveState", "GpuXid"]),
}


@pytest.mark.parametrize(("findings", "reasons"), SEVERAL.values(), ids=SEVERAL)
def test_each_finding_of_a_condition_counts_unless_it_is_ignored(
    findings: tuple[tuple[str, str], ...], reasons: list[str]
) -> None:
    policy = Policy(rules=(Rule(reason="Clock*", remedy="ignore"),))
    health = health_of(several(*findings), BOOT, "", policy)
    assert [ailment.reason for ailment in health.ailments] == reasons
    assert health.is_cut is (reasons == ["NodeHealthy"])
    assert ("NodeHealthy" in health.well) is not bool(reasons)


@pytest.mark.parametrize(("code", "remedy"), [("gpu.lost", "hand-over"), ("maintenance.scheduled", "drain")])
def test_the_gravest_of_several_findings_decides(code: str, remedy: Remedy) -> None:
    policy = Policy(
        rules=(
            Rule(reason="ClockOff", remedy="taint"),
            Rule(reason=kubernetes_reason(code), remedy=remedy),
        )
    )
    health = health_of(several(CLOCK, (code, "x")), BOOT, "", policy)
    need = step_of(Node("n", BOOT, health=health), {}, policy, Rules(), NOTICED)
    assert need and need[1] and (need[1].reason, need[1].remedy) == (kubernetes_reason(code), remedy)


def test_status_names_a_condition_once() -> None:
    subject = Node("n", BOOT, "True", BOOT, health=health_of(several(CLOCK, XID), BOOT, "", Policy()))
    said = why(subject)
    assert said.startswith("NodeHealthy ClockOff, GpuXid: 2 findings: ") and said.count("Xid 79") == 1


def test_a_scale_set_is_read_from_the_providers_id() -> None:
    assert health_of(node(), BOOT, "", Policy()).scale_set == SET.lower()
    assert health_of({"metadata": {"name": "n"}}, BOOT, "", Policy()).scale_set == ""


@pytest.mark.parametrize(
    ("meta", "pool", "is_left"),
    [
        ({}, "a", False),
        ({}, "h100", True),
        ({"labels": {"k8saas.nvidia.com/ManagedByNVSentinel": "false"}}, "h100", False),
        ({"labels": {"nvsentinel.dgxc.nvidia.com/managed": "false"}}, "h100", False),
        ({"annotations": {"quarantineHealthEvent": "{}"}}, "a", True),
    ],
)
def test_what_is_left_to_nvsentinel(meta: dict[str, Any], pool: str, *, is_left: bool) -> None:
    assert health_of(node(**meta), BOOT, pool, Policy(nvsentinel=("h100",))).is_left is is_left


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        *((kind, Step.TAKE_OUT) for kind in ("Reboot", "Redeploy", "Preempt", "Terminate")),
        ("Freeze", None),
    ],
)
def test_scheduled_events_are_acted_on_at_once(kind: str, step: Step | None) -> None:
    """From the agent's reading of the metadata service, through its report, to the gate's decision."""
    answer = {
        "Events": [
            {
                "EventId": "C7061BAC-AFDC-4513-B24B-AA5F13A16123",
                "EventStatus": "Scheduled",
                "EventType": kind,
                "NotBefore": "Thu, 26 Nov 2026 18:00:00 GMT",
                "Resources": ["gpu-0_7"],
            }
        ]
    }
    (finding,) = maintenance.rule(maintenance.parse(Response(200, json.dumps(answer).encode())))
    made = report.condition([Alarm("maintenance", finding, 1, 0.0, since=1.0)], BOOT, "image")
    at = {"lastTransitionTime": "2026-11-26T17:45:00Z"}
    message = condition("NodeHealthy", made.status, made.message, reason=made.reason, **at)
    drains = Policy(rules=(Rule(reason="MaintenanceScheduled", remedy="drain", lasting_seconds=0.0),))
    for policy, is_drained in ((Policy(), False), (drains, True)):
        health = health_of(node(message), BOOT, "", policy)
        need = step_of(Node("n", BOOT, health=health), {}, policy, Rules(), NOTICED)
        assert (need and need[0]) == step
        if need and need[1]:
            assert need[1].is_drained is is_drained
            assert "not before 2026-11-26T18:00:00Z" in need[1].words


def at(minutes: float) -> str:
    return datetime.fromtimestamp(NOTICED + 60 * minutes, UTC).isoformat()


ALIVE = {"type": "Ready", "status": "True", "lastHeartbeatTime": at(0)}


@pytest.mark.parametrize(
    ("kind", "beat", "policy", "counts"),
    [
        ("KubeletUnhealthy", at(-5), Policy(), True),
        ("KubeletUnhealthy", at(-29), Policy(), True),
        ("KubeletUnhealthy", at(-31), Policy(), False),
        ("KubeletUnhealthy", "2026-06-01T00:00:00Z", Policy(), False),
        ("KubeletUnhealthy", "2026-06-01T00:00:00Z", Policy(stale_seconds=0), True),
        ("KubeletUnhealthy", None, Policy(), True),
        ("example.com/Disk", "2026-06-01T00:00:00Z", Policy(conditions={"example.com/*": "True"}), False),
        # NVSentinel's have no heartbeat: they report what changes.
        ("GpuXidWatch", "2026-06-01T00:00:00Z", Policy(), True),
    ],
)
def test_a_condition_that_nobody_maintains_says_nothing(
    kind: str, beat: str | None, policy: Policy, *, counts: bool
) -> None:
    document = node(condition(kind, "True", lastHeartbeatTime=beat), ALIVE)
    health = health_of(document, BOOT, "", policy)
    assert (len(health.ailments), health.stale) == (counts, frozenset() if counts else {kind})
    # A node whose clock is off, or that is down, is judged by its own clock.
    assert health_of(node(condition(kind, "True", lastHeartbeatTime=beat)), BOOT, "", policy).ailments


@pytest.mark.parametrize(("tested_boot", "counts"), [(BOOT, 0), (OTHER, 1)])
def test_a_condition_from_before_the_boot_says_nothing(tested_boot: str, counts: int) -> None:
    """node-problem-detector starts after the preflight has been reported, and renews it then."""
    passed = condition(
        Rules().condition, "True", f"boot={tested_boot} passed in 212 s", lastHeartbeatTime=at(-2)
    )
    document = node(passed, condition("KernelDeadlock", "True", lastHeartbeatTime=at(-9)), ALIVE)
    document["status"]["nodeInfo"] = {"bootID": BOOT}
    assert len(node_from(document, Rules()).health.ailments) == counts


def test_a_node_that_is_out_for_such_a_condition_returns_by_its_preflight() -> None:
    stale = condition("KernelDeadlock", "True", lastHeartbeatTime="2026-06-01T00:00:00Z")
    health = health_of(node(stale, ALIVE), BOOT, "", Policy())
    record = Record("KernelDeadlock", "R", "", "taint", NOTICED - 60, BOOT, NOTICED - 9000)
    gate = Node("n", boot_id=BOOT, status="True", tested_boot=BOOT, reported=NOTICED - 9000)
    out = replace(gate, health=replace(health, record=record, is_tainted=True))
    assert step_of(out, {}, Policy(), Rules(), NOTICED) is None
    assert step_of(replace(out, reported=NOTICED), {}, Policy(), Rules(), NOTICED) == (Step.GIVE_BACK, record)


@pytest.mark.parametrize(("key", "run"), [("image-builder/roll", "roll-7"), ("image-builder/quarantine", "")])
def test_a_host_that_a_roll_has_emptied_is_known_by_its_taint(key: str, run: str) -> None:
    document = node()
    document["spec"]["taints"] = [{"key": key, "value": "roll-7", "effect": "NoExecute"}]
    assert health_of(document, BOOT, "", Policy()).barred_by == run
