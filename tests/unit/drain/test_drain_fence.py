"""Our cordon and its record: the patches, and what is read back."""

from __future__ import annotations

import pytest

from image_builder.drain.fence import CORDON, SCALE_DOWN, Record, cordon, record_of, recordon, uncordon
from tests.unit.drain.manifests import node_object

OURS = Record("roll-7", 1000.0)


def test_a_record_is_read_as_it_was_written() -> None:
    record = Record("roll-7", 1000.5, was_unschedulable=True, scale_down="false")
    assert record_of(node_object({CORDON: record.text()})) == record


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"run": "a", "since": "NaN", "scale_down": null}', "1"])
def test_what_is_no_record(text: str) -> None:
    assert record_of(node_object({CORDON: text})) is None


def test_a_cordon_is_tested_by_what_it_was_decided_from() -> None:
    record, patch = cordon(node_object({SCALE_DOWN: "false"}), "roll-7", 1000.0)
    assert record == Record("roll-7", 1000.0, was_unschedulable=False, scale_down="false")
    tests = {step["path"]: step["value"] for step in patch if step["op"] == "test"}
    assert tests == {
        "/metadata/uid": "uid-1",
        "/spec/unschedulable": None,
        "/metadata/annotations/image-builder~1cordon": None,
    }
    assert patch[-1] == {"op": "add", "path": "/spec/unschedulable", "value": True}


def test_a_node_without_annotations() -> None:
    patch = recordon(node_object(), OURS)
    assert {"op": "test", "path": "/metadata/annotations", "value": None} in patch
    added = {"op": "add", "path": "/metadata/annotations", "value": {CORDON: OURS.text(), SCALE_DOWN: "true"}}
    assert added in patch


def test_what_is_ours_is_taken_away() -> None:
    patch = uncordon(node_object({CORDON: OURS.text(), SCALE_DOWN: "true"}, cordoned=True))
    assert patch[0] == {
        "op": "test",
        "path": "/metadata/annotations/image-builder~1cordon",
        "value": OURS.text(),
    }
    removed = {step["path"] for step in patch if step["op"] == "remove"}
    assert len(removed) == 3 and "/spec/unschedulable" in removed


def test_a_cordon_from_before_stays() -> None:
    record = Record("roll-7", 1000.0, was_unschedulable=True, scale_down="true")
    patch = uncordon(node_object({CORDON: record.text(), SCALE_DOWN: "true"}, cordoned=True))
    assert [step["op"] for step in patch] == ["test", "remove", "add"]
    assert not any(step["path"] == "/spec/unschedulable" for step in patch)


def test_nothing_of_others_is_touched() -> None:
    assert uncordon(node_object({SCALE_DOWN: "true"}, cordoned=True)) == []
