"""The mark of a quarantined node: what comes and goes with it, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from image_builder.drain import fence, quarantine
from image_builder.drain.quarantine import MARK, TAINT, Record
from tests.unit.drain.manifests import node_object

RECORD = Record("NodeHealthy", "GpuLost", "gpu 3", "reboot", 1_800_000_000.0, "boot", 5.0)
FOREIGN = {"key": "other", "effect": "NoSchedule"}


def applied(document: dict[str, Any], patch: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a Node after a patch, which is refused if one of its tests fails."""
    node = json.loads(json.dumps(document))
    for step in patch:
        *parents, last = [part.replace("~1", "/") for part in step["path"].split("/")[1:]]
        target = node
        for parent in parents:
            target = target.setdefault(parent, {})
        if step["op"] == "test":  # the API omits empty values
            assert (target.get(last) or None) == step["value"], step
        elif step["op"] == "add":
            target[last] = step["value"]
        else:
            del target[last]
    return dict(node)


@pytest.mark.parametrize("annotations", [{}, {"a": "b"}])
@pytest.mark.parametrize("taints", [[], [FOREIGN]])
def test_what_comes_goes(annotations: dict[str, str], taints: list[dict[str, str]]) -> None:
    node = node_object(annotations)
    node["spec"] = {"taints": taints} if taints else {}
    out = applied(node, quarantine.take_out(node, RECORD))
    assert quarantine.record_of(out) == RECORD and quarantine.is_tainted(out)
    assert out["spec"]["taints"][-1] == {"key": TAINT, "value": "GpuLost", "effect": "NoSchedule"}
    again = applied(out, quarantine.reach(out, RECORD, "empty"))
    assert quarantine.record_of(again) == replace(RECORD, stage="empty")
    assert again["spec"] == out["spec"]
    assert applied(again, quarantine.give_back(again)) == node


def test_only_the_gates_own_cordon_goes_with_it() -> None:
    for run, is_ours in ((quarantine.RUN, True), ("roll-7", False)):
        node = node_object()
        node = applied(node, fence.cordon(node, run, 1.0)[1])
        node = applied(node, quarantine.take_out(node, RECORD))
        back = applied(node, quarantine.give_back(node))
        assert fence.is_cordoned(back) is not is_ours
        assert quarantine.record_of(back) is None and not quarantine.is_tainted(back)


def test_nothing_is_sent_for_a_node_without_a_mark() -> None:
    assert quarantine.give_back(node_object({"a": "b"}, cordoned=True)) == []


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{", "[" * 100_000, json.dumps({"condition": "c"})),
        RECORD.text().replace("reboot", "explode"),
        *(RECORD.text().replace("1800000000.0", since) for since in ("NaN", "1e300", "-1", "1" + "0" * 400)),
    ],
    ids=range(10),
)
def test_a_broken_record_is_none(text: str) -> None:
    assert quarantine.record_of(node_object({MARK: text})) is None


def test_a_record_from_before_requests_were_sent_and_hosts_named_is_understood() -> None:
    values = json.loads(replace(RECORD, stage="asked").text())
    old = {name: value for name, value in values.items() if name != "host" and not name.startswith("sent_")}
    assert quarantine.record_of(node_object({MARK: json.dumps(old)})) == replace(RECORD, stage="asked")


def test_what_was_sent_is_remembered() -> None:
    sent = replace(RECORD, stage="sent", sent_at=1_800_000_001.25, sent_boot="boot-2")
    assert quarantine.record_of(node_object({MARK: sent.text()})) == sent
    assert quarantine.record_of(node_object({MARK: replace(sent, sent_at=float("nan")).text()})) is None


def test_a_reason_that_is_no_label_value_is_made_one() -> None:
    odd = replace(RECORD, reason="Observed GPU count: " + "x" * 80)
    taints = applied(node_object(), quarantine.take_out(node_object(), odd))["spec"]["taints"]
    assert taints[0]["value"].startswith("Observed-GPU-count-x") and len(taints[0]["value"]) == 63


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ("out", "to be drained"),
        ("empty", "empty"),
        ("asked", "empty: reboot it"),
        ("sent", "reboot sent at 2027-01-15T08:01:00Z"),
    ],
)
def test_words(stage: quarantine.Stage, words: str) -> None:
    text = replace(RECORD, stage=stage, sent_at=RECORD.since + 60).words
    assert text == f"NodeHealthy GpuLost since 2027-01-15T08:00:00Z, {words}: gpu 3"
