"""The gate: what readings of a control plane allow."""

from __future__ import annotations

from typing import Any

import pytest

from image_builder.pool.plan.policy import GateLimits
from image_builder.pool.run.gates import Reading, judge

LIMITS = GateLimits()


@pytest.mark.parametrize(
    ("reading", "verdict", "text"),
    [
        ({"requests": 10_000}, "go", ""),
        ({}, "go", ""),
        ({"requests": 10_000, "throttled": 100}, "go", ""),
        (
            {"requests": 10_000, "throttled": 101},
            "hold",
            "101 of 10000 requests answered with 429, limit 1.0%",
        ),
        ({"requests": 10_000, "errors": 101}, "hold", "answered with 5xx"),
        # One of twenty is five percent, but not a storm.
        ({"requests": 20, "throttled": 1}, "go", ""),
        ({"requests": 20, "throttled": 2}, "hold", "2 of 20"),
        ({"csr_seconds": 60.0}, "go", ""),
        ({"csr_seconds": 61.0}, "hold", "pending for 61 s, limit 60 s"),
        ({"not_ready": 80}, "go", ""),
        ({"not_ready": 81}, "stop", "76 more nodes are NotReady than before, limit 75"),
        ({"unread": "connection refused"}, "hold", "can't be read: connection refused"),
        # A reading that failed has no numbers, good or bad.
        ({"unread": "x", "not_ready": 999}, "hold", "can't be read"),
    ],
)
def test_a_reading_is_judged(reading: dict[str, Any], verdict: str, text: str) -> None:
    judged, reasons = judge(Reading(**reading), LIMITS, not_ready_before=5, hosts=7500)
    assert judged == verdict
    assert text in "; ".join(reasons) and bool(reasons) == (judged != "go")


def test_every_reason_is_told() -> None:
    reading = Reading(requests=100, throttled=9, errors=8, csr_seconds=99, not_ready=500)
    verdict, reasons = judge(reading, LIMITS, not_ready_before=0, hosts=100)
    assert verdict == "stop" and len(reasons) == 4


def test_fewer_not_ready_than_before_is_no_alarm() -> None:
    assert judge(Reading(not_ready=3), LIMITS, not_ready_before=50, hosts=10) == ("go", ())
