"""The gate: what readings of a control plane allow."""

from __future__ import annotations

from typing import Any

import pytest

from image_builder.pool.plan.policy import GateLimits
from image_builder.pool.run.gates import Reading, Role, count, judge

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
        ({"not_ready": 75}, "go", ""),
        ({"not_ready": 76}, "stop", "76 hosts of this run that were fine are NotReady, limit 75"),
        # Those of others, before or after, only hold.
        ({"elsewhere": 85, "nodes": 8000}, "go", ""),
        ({"elsewhere": 86, "nodes": 8000}, "hold", "81 nodes that this run didn't change"),
        ({"unread": "connection refused"}, "hold", "can't be read: connection refused"),
        # A reading that failed has no numbers, good or bad.
        ({"unread": "x", "not_ready": 999}, "hold", "can't be read"),
    ],
)
def test_a_reading_is_judged(reading: dict[str, Any], verdict: str, text: str) -> None:
    judged, reasons = judge(Reading(**reading), LIMITS, hosts=7500, elsewhere_before=5)
    assert judged == verdict
    assert text in "; ".join(reasons) and bool(reasons) == (judged != "go")


def test_every_reason_is_told() -> None:
    reading = Reading(
        requests=100, throttled=9, errors=8, csr_seconds=99, not_ready=500, elsewhere=9, nodes=9
    )
    verdict, reasons = judge(reading, LIMITS, hosts=100, elsewhere_before=0)
    assert verdict == "stop" and len(reasons) == 5


def test_fewer_not_ready_than_before_is_no_alarm() -> None:
    assert judge(Reading(elsewhere=3), LIMITS, hosts=10, elsewhere_before=50) == ("go", ())


def test_what_is_counted_is_the_run_s_own() -> None:
    roles: dict[str, Role] = {"a": "fine", "b": "changing"}
    raw = Reading(fallen=("a", "b", "c", "d"), nodes=9, pending=(5.0, 660.0, 660.1, 86_400.0))
    counted = count(raw, LIMITS, lambda name: roles.get(name, "other"))
    assert (counted.not_ready, counted.elsewhere, counted.csr_seconds) == (1, 2, 660.0)
    assert counted.fallen == ("a",)
    # A journal has the numbers.
    assert Reading.model_validate_json(counted.model_dump_json()) == Reading(
        not_ready=1, elsewhere=2, nodes=9, csr_seconds=660.0
    )
