"""One closing line for several runs of pytest: nothing that any of them reports is lost."""

from __future__ import annotations

from tests.selftest.lanes import Outcome, closing_line


def _lane(closing: str, status: int = 0) -> Outcome:
    return Outcome(status, {}, closing)


def test_a_single_run_closes_with_its_own_words() -> None:
    assert (
        closing_line([_lane("=== 3 passed, 9 deselected in 1.00s ===")], 7)
        == "=== 3 passed, 9 deselected in 1.00s ==="
    )


def test_several_runs_are_added_up() -> None:
    lanes = [
        _lane("====== 4037 passed, 859 deselected, 1 warning in 180.55s (0:03:00) ======"),
        _lane(
            "= \x1b[31m\x1b[1m1 failed\x1b[0m, \x1b[32m820 passed\x1b[0m, 3 skipped, 1 error in 12.5s =", 1
        ),
        _lane("28 passed, 2 warnings in 1234.56s (0:20:34)"),
    ]
    told = closing_line(lanes, 3725.4)
    assert told.strip("= ") == "1 failed, 4885 passed, 3 skipped, 3 warnings, 1 errors in 3725.40s (1:02:05)"
    assert told.startswith("= ") and told.endswith(" =")


def test_a_run_without_any_test_adds_nothing() -> None:
    lanes = [_lane("===== 2 passed in 0.10s ====="), _lane("===== 7 deselected in 0.05s =====", 5)]
    assert closing_line(lanes, 1).strip("= ") == "2 passed in 1.00s (0:00:01)"


def test_a_run_that_did_not_close_is_named() -> None:
    told = closing_line([_lane("== 2 passed in 0.10s =="), _lane("", -9)], 1)
    assert told == "pytest ended without a closing line, status -9; besides 2 passed"
