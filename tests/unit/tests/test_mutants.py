"""A check counts as seen red only if its own assertion fails, and nothing else."""

from __future__ import annotations

import pytest

from image_builder.verify.result import Check, Outcome, SuiteResult, blind

SEEN: tuple[Outcome, str] = ("failed", "AssertionError")
PROVES_NOTHING: list[tuple[Outcome, str]] = [
    ("passed", ""),
    ("failed", "KeyError"),
    ("error", "AssertionError"),
    ("error", "ValueError"),
]


def result(marker: str, **outcomes: tuple[Outcome, str]) -> SuiteResult:
    checks = [
        Check(f"test_x.py::test_y[0-{state}]", outcome, 0.1, exception=exception)
        for state, (outcome, exception) in outcomes.items()
    ]
    return SuiteResult("target", marker, tuple(checks), (), 0.1)


@pytest.mark.parametrize(("outcome", "exception"), PROVES_NOTHING)
def test_only_its_own_assertion_shows_that_a_check_sees(outcome: Outcome, exception: str) -> None:
    assert blind(result("offline", sound=SEEN)) == {}
    assert list(blind(result("offline", sound=(outcome, exception)))) == ["test_x.py::test_y[0-sound]"]
    assert blind(result("booted", sound=("passed", ""), broken=SEEN)) == {}
    seen = blind(result("booted", sound=("passed", ""), broken=(outcome, exception)))
    assert list(seen) == ["test_x.py::test_y[0-broken]"]


@pytest.mark.parametrize(("outcome", "exception"), [SEEN, *PROVES_NOTHING[1:]])
def test_a_check_that_is_red_on_a_sound_machine_is_not_proven(outcome: Outcome, exception: str) -> None:
    seen = blind(result("booted", sound=(outcome, exception), broken=SEEN))
    assert list(seen) == ["test_x.py::test_y[0-sound]"]
