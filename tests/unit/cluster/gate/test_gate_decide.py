"""The gate's one rule as a table, and the patches that carry it out."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from image_builder.cluster.gate.decide import Action, decide, may_work, patch
from image_builder.cluster.gate.model import ADMITTED, Node, Rules, node_from
from image_builder.cluster.gate.policy import Policy, Rule
from image_builder.cluster.gate.triage import Step, step_of
from image_builder.node.finding import kubernetes_reason
from image_builder.node.preflight.model import CONDITION
from image_builder.text import stamp

RULES = Rules()
FIRST, SECOND = (f"{digit * 8}-{digit * 4}-{digit * 4}-{digit * 4}-{digit * 12}" for digit in "12")
OURS = {"key": RULES.taint, "value": "pending", "effect": "NoSchedule"}
OTHER = {"key": "dedicated", "value": "gpu", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    "annotation",
    ["[" * 100_000, "[[[], 1]]", '{"at": 1e999}', '{"at": "0001-01-01T00:00:00"}', f'{{"at": {"9" * 5000}}}'],
    ids=range(5),
)
def test_a_broken_admission_is_none(annotation: str) -> None:
    node = node_from({"metadata": {"name": "n", "annotations": {ADMITTED: annotation}}}, RULES)
    assert (node.admitted_boot, node.admitted_at) == ("", 0.0)


@pytest.mark.parametrize(
    ("boot", "status", "tested", "admitted", "works"),
    [
        pytest.param(FIRST, "True", FIRST, "", True, id="this boot passed"),
        pytest.param(SECOND, "True", FIRST, "", False, id="another boot passed"),
        pytest.param(FIRST, "False", FIRST, "", False, id="it failed"),
        pytest.param(FIRST, "Unknown", FIRST, "", False, id="it was not settled"),
        pytest.param(FIRST, "", "", "", False, id="nothing was reported"),
        pytest.param(FIRST, "True", "", "", False, id="a condition of no boot"),
        pytest.param("", "True", "", "", False, id="no boot is known"),
        pytest.param("", "True", FIRST, "", False, id="the kubelet has not spoken"),
        pytest.param(FIRST, "False", FIRST, FIRST, True, id="let in by hand"),
        pytest.param(SECOND, "False", SECOND, FIRST, False, id="another boot was let in"),
        pytest.param("", "", "", "", False, id="nothing at all"),
    ],
)
def test_table(boot: str, status: str, tested: str, admitted: str, works: bool) -> None:
    node = Node("n", boot, status, tested, admitted_boot=admitted)
    assert may_work(node) is works
    tainted = Node("n", boot, status, tested, admitted_boot=admitted, taints=(OTHER, OURS))
    assert decide(tainted, RULES) is (Action.ADMIT if works else Action.NONE)
    assert decide(node, RULES) is (Action.NONE if works else Action.GATE)


def test_only_the_gates_own_taint_counts() -> None:
    no_execute = {**OURS, "effect": "NoExecute"}
    assert decide(Node("n", FIRST, "True", FIRST, taints=(OTHER, no_execute)), RULES) is Action.NONE


def apply(changes: list[dict[str, Any]], document: dict[str, Any]) -> dict[str, Any] | None:
    """Apply a patch made of the two operations in use; return None if a test fails (RFC 6902)."""
    patched = copy.deepcopy(document)
    for change in changes:
        *folders, name = change["path"].split("/")[1:]
        place = patched
        for folder in folders:
            place = place[folder]
        name = name.replace("~1", "/")
        if change["op"] == "test":
            if place.get(name) != change["value"]:
                return None
        else:
            place[name] = change["value"]
    return patched


def made(boot: str, taints: list[dict[str, str]], status: str = "", tested: str = "") -> dict[str, Any]:
    conditions = [{"type": CONDITION, "status": status, "message": f"boot={tested} x"}] if status else []
    spec: dict[str, Any] = {"taints": taints} if taints else {}
    return {
        "metadata": {"name": "n"},
        "spec": spec,
        "status": {"nodeInfo": {"bootID": boot}, "conditions": conditions},
    }


_TAINTS = st.lists(
    st.sampled_from([OURS, OTHER, {"key": "a", "effect": "NoExecute"}]), unique_by=lambda t: t["key"]
)


@given(_TAINTS, st.sampled_from(["", "True", "False"]), st.sampled_from([FIRST, SECOND]))
def test_what_is_done_settles_it_and_touches_no_other_taint(
    taints: list[dict[str, str]], status: str, tested: str
) -> None:
    document = made(FIRST, taints, status, tested)
    node = node_from(document, RULES)
    action = decide(node, RULES)
    if action is Action.NONE:
        return
    after = apply(patch(node, action, RULES), document)
    assert after is not None
    assert decide(node_from(after, RULES), RULES) is Action.NONE
    assert [t for t in after["spec"]["taints"] if t["key"] != RULES.taint] == [
        t for t in taints if t is not OURS
    ]


@pytest.mark.parametrize(
    "changed",
    [
        made(SECOND, [OURS], "True", FIRST),
        made(FIRST, [OURS, OTHER], "True", FIRST),
        made(FIRST, [], "True", FIRST),
    ],
)
def test_what_was_decided_from_is_tested(changed: dict[str, Any]) -> None:
    node = node_from(made(FIRST, [OURS], "True", FIRST), RULES)
    assert apply(patch(node, Action.ADMIT, RULES), changed) is None


def test_a_gated_node_says_whether_it_failed() -> None:
    for status, value in (("False", "failed"), ("True", "pending"), ("", "pending")):
        changes = patch(Node("n", FIRST, status, SECOND), Action.GATE, RULES)
        assert changes[-1]["value"] == [{**OURS, "value": value}]


@pytest.mark.parametrize("annotation", ["", "x", "[]", "{}", '{"boot_id": null}'])
def test_an_annotation_that_names_no_boot_lets_nobody_in(annotation: str) -> None:
    document = made(FIRST, [OURS])
    document["metadata"]["annotations"] = {ADMITTED: annotation}
    assert not may_work(node_from(document, RULES))
    document["metadata"]["annotations"] = {ADMITTED: json.dumps({"boot_id": FIRST})}
    assert may_work(node_from(document, RULES))


ADMITTED_AT = 1_700_000_000.0
LATER = ADMITTED_AT + 30 * 86400


def ill(document: dict[str, Any], message: str, since: float) -> dict[str, Any]:
    """Return a node with the condition that our agent sets for a message, a good one if that is empty."""
    code = message.partition(":")[0]  # the gate reads the codes of several findings in the message
    condition = {
        "type": "NodeHealthy",
        "status": "False" if message else "True",
        "reason": kubernetes_reason(code) if code else "NodeIsHealthy",
        "message": f"{message} (boot {FIRST})",
        "lastTransitionTime": stamp(since),
    }
    after = copy.deepcopy(document)
    after["status"]["conditions"] = [condition]
    return after


def admitted(*findings: str, boot: str = FIRST) -> dict[str, Any]:
    document = made(FIRST, [])
    record = {"by": "me", "at": stamp(ADMITTED_AT), "reason": "r", "boot_id": boot, "findings": findings}
    document["metadata"]["annotations"] = {ADMITTED: json.dumps(record)}
    return document


def taken_out(document: dict[str, Any]) -> str:
    """Return the reason for which a node is taken out an hour later, empty if it isn't."""
    step = step_of(node_from(document, RULES), {}, RULES.health, RULES, LATER + 3600)
    assert step is None or (step[0] is Step.TAKE_OUT and step[1])
    return step[1].reason if step and step[1] else ""


BOTH = "2 findings: clock.off: 2 s off; gpu.lost: GPU 3"


def test_an_admitted_finding_that_went_away_and_comes_back_counts() -> None:
    before = admitted("ClockOff", "GpuLost")
    renewed = ill(before, BOTH, LATER)
    assert decide(node_from(renewed, RULES), RULES) is Action.NONE and taken_out(renewed) == ""
    gone = ill(before, "clock.off: 2 s off", ADMITTED_AT - 60)
    node = node_from(gone, RULES)
    assert decide(node, RULES) is Action.FORGET
    after = apply(patch(node, Action.FORGET, RULES), gone)
    assert after is not None and decide(node_from(after, RULES), RULES) is Action.NONE
    old, new = (json.loads(d["metadata"]["annotations"][ADMITTED]) for d in (before, after))
    assert new == {**old, "findings": ["ClockOff"]}
    # The one that stayed is still admitted, although the other's return renews the condition's time.
    assert taken_out(ill(after, BOTH, LATER)) == "GpuLost"
    assert taken_out(ill(after, BOTH.replace("gpu.lost", "gpu.slow"), LATER)) == "GpuSlow"
    assert taken_out(ill(after, "clock.off: 2 s off", LATER)) == ""


def test_all_of_an_admissions_findings_may_go() -> None:
    well = ill(admitted("GpuLost"), "", ADMITTED_AT + 60)
    after = apply(patch(node_from(well, RULES), Action.FORGET, RULES), well)
    assert after is not None and taken_out(ill(after, "gpu.lost: GPU 3", LATER)) == "GpuLost"


@pytest.mark.parametrize(
    "document",
    [
        ill(admitted("GpuLost", boot=SECOND), "", LATER),
        # The message has no room for the second one.
        ill(admitted("GpuLost"), "2 findings: clock.off: 2 s off, and so on...", LATER),
        ill(admitted(), "", LATER),
    ],
    ids=["another boot's", "maybe cut off", "none"],
)
def test_nothing_else_changes_an_admission(document: dict[str, Any]) -> None:
    assert decide(node_from(document, RULES), RULES) is not Action.FORGET
    # What the policy ignores may hide findings that it doesn't.
    rules = (Rule(reason="Gpu*", remedy="reimage"), Rule(remedy="ignore"))
    ignoring = Rules(health=Policy(rules=rules))
    assert decide(node_from(document, ignoring), ignoring) is not Action.FORGET


def test_an_admission_that_a_person_renews_meanwhile_is_left() -> None:
    node = node_from(ill(admitted("GpuLost"), "", LATER), RULES)
    assert apply(patch(node, Action.FORGET, RULES), admitted("GpuLost", "ClockOff")) is None


def test_a_bare_node_is_understood() -> None:
    assert node_from({"metadata": {"name": "n"}}, RULES) == Node("n")
