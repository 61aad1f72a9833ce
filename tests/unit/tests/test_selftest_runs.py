"""When a run of pytest is red, green or flaky, by what its two runs found."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.selftest import runs
from tests.selftest.plugin import ALLOWED_SKIPS, FAILED_FILES, Result, allowed_skips, is_allowed

PLACE = runs.Surroundings(Path("store"), Path("cache"), Path("reports"), 1, lambda _line: None)
FILES = [f"tests/unit/test_{number}.py" for number in range(FAILED_FILES + 1)]


def result(failed: int, **fields: Any) -> Result:
    return Result(outcomes=Counter({"passed": 9, "failed": failed}), failed=FILES[:failed], **fields)


@pytest.mark.parametrize(
    ("first", "again", "before", "status", "flaky"),
    [
        ((0, result(0)), (0, result(0)), 0, 0, 0),
        ((1, result(1)), (0, result(0)), 0, 0, 1),
        ((1, result(FAILED_FILES)), (0, result(0)), 0, 0, FAILED_FILES),
        ((1, result(1)), (1, result(1)), 0, 1, 0),
        ((1, result(1)), (5, result(0)), 0, 1, 0),
        ((1, result(1)), (0, result(0, skipped=Counter({"no Chromium": 1}))), 0, 1, 0),
        ((1, result(FAILED_FILES + 1)), (0, result(0)), 0, 1, 0),
        ((1, result(1)), (0, result(0)), FAILED_FILES, 1, 0),
        ((1, result(1, refused=["one"])), (0, result(0)), 0, 1, 0),
        ((1, result(0)), (0, result(0)), 0, 1, 0),
        ((3, result(1)), (0, result(0)), 0, 3, 0),
    ],
    ids=[
        *(
            "passed",
            "flaky",
            "three flaky",
            "failed twice",
            "nothing to run again",
            "skipped the second time",
        ),
        *("a fourth file", "a fourth file of both parts", "a skip", "nothing failed", "broke off"),
    ],
)
def test_verdict(
    monkeypatch: pytest.MonkeyPatch,
    first: tuple[int, Result],
    again: tuple[int, Result],
    before: int,
    status: int,
    flaky: int,
) -> None:
    answers = iter([first, *[again] * FAILED_FILES])
    monkeypatch.setattr(runs, "_pytest", lambda name, *_: runs.Run(*next(answers), Path(name)))
    run = runs._twice("unit", runs.UNIT, 2, [], PLACE, before)
    assert (run.status, len(run.flaky)) == (status, flaky)


def test_tests_that_never_ran_make_a_run_red(monkeypatch: pytest.MonkeyPatch) -> None:
    found = result(1)
    found.outcomes["not run"] = 1
    monkeypatch.setattr(runs, "_pytest", lambda name, *_: runs.Run(1, found, Path(name)))
    assert runs._twice("unit", runs.UNIT, 2, [], PLACE).status == 1


def test_the_list_of_skips_names_files_and_reasons() -> None:
    allowed = allowed_skips(ALLOWED_SKIPS.read_text(encoding="utf-8"))
    assert allowed and all(words and pattern.count("/") >= 2 for pattern, words in allowed)
    assert is_allowed("tests/a/test_b.py::test_c", "no npm on this host", [("tests/a/*", "no npm")])
    assert not is_allowed("tests/a/test_b.py::test_c", "not today", [("tests/a/*", "no npm")])
