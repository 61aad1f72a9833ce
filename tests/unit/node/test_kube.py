"""A node's requests. How an API server handles them is tested in tests/gpu/test_gate.py."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from image_builder.node.net.kube import KubeError, condition, each_item


@pytest.mark.parametrize("status", [0, 401, 403, 404, 409, 429, 500, 503])
def test_what_may_pass_is_not_hopeless(status: int) -> None:
    assert not KubeError("", status).is_hopeless


def test_a_condition_is_at_most_a_kilobyte_and_whole_characters() -> None:
    made = condition("A", "True", "Passed", "boot=1 " + "é" * 2000, datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))
    assert len(made["message"].encode()) == 1023 and made["message"].endswith("é")
    assert made["lastTransitionTime"] == made["lastHeartbeatTime"] == "2026-01-02T03:04:05Z"


@pytest.mark.parametrize("items", [[], [{"a": 1}], [{"a": '"items":[{'}, {"b": [1, {"c": "]"}]}, {}]])
def test_a_list_is_read_item_by_item(items: list[dict[str, Any]]) -> None:
    text = json.dumps({"kind": "NodeList", "metadata": {"resourceVersion": "7"}, "items": items})
    seen: list[dict[str, Any]] = []
    assert each_item(text.replace(": ", ":").replace(", ", ","), seen.append) == "7"
    assert seen == items


def test_a_list_of_nothing_may_be_null() -> None:
    assert each_item('{"metadata":{"resourceVersion":"7"},"items":null}', lambda _: None) == "7"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"metadata":{"resourceVersion":"7"},"items":[{"a":1},',
        '{"metadata":{"resourceVersion":"7"},"items":[{"a":1}',
        '{"metadata":{"resourceVersion":"7"},"items":{}}',
    ],
)
def test_a_list_that_broke_off_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        each_item(text, lambda _: None)
