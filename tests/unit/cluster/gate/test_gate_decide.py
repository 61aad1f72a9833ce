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
from image_builder.node.preflight.model import CONDITION

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


def test_a_bare_node_is_understood() -> None:
    assert node_from({"metadata": {"name": "n"}}, RULES) == Node("n")
