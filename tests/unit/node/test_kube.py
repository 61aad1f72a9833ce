"""How long a node waits, and what it says. What an API server makes of it is in tests/integration/test_gate.py."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from image_builder.node.net import kube
from image_builder.node.net.kube import KubeError, backoff, condition, each_item, patiently


@given(st.integers(0, 10_000), st.floats(0, 1, exclude_max=True), st.none() | st.floats(-5, 1e9))
def test_a_wait_is_within_its_limits_and_what_was_asked_for_is_obeyed(
    attempt: int, chance: float, asked: float | None
) -> None:
    wait = backoff(attempt, retry_after=asked, chance=lambda: chance)
    least = min(max(asked or 0, 0), kube.LONGEST_RETRY_AFTER)
    assert least <= wait <= least + min(kube.LONGEST_WAIT, 2.0 ** min(attempt, 60))


def test_full_jitter_spreads_over_a_limit_that_doubles_up_to_ten_minutes() -> None:
    most = [backoff(attempt, chance=lambda: 1.0) for attempt in range(12)]
    assert most == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 600, 600]
    assert backoff(11, chance=lambda: 0.0) == 0


def test_patience_ends_with_success_or_with_what_is_hopeless() -> None:
    answers: list[Exception | str] = [KubeError("away"), KubeError("busy", 429, 7.0), "done"]
    waits: list[float] = []
    told: list[str] = []

    def send() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert patiently(send, tell=told.append, sleep=waits.append, chance=lambda: 0.5) == "done"
    assert waits == [0.5, 8.0]
    assert told == ["away; again in 0 s", "busy; again in 8 s"]
    answers = [KubeError("no such field", 422)]
    with pytest.raises(KubeError, match="no such field"):
        patiently(send, tell=told.append, sleep=waits.append)
    assert len(waits) == 2


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
