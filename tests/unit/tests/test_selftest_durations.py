"""The duration of a run: read from its JUnit files, compared with its ceilings, recorded and shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.selftest import ceilings, durations
from tests.selftest.ceilings import CEILINGS, WHOLE

CASES = '<testcase file="a.py" time="1.5"/><testcase file="b.py" time="9"/>'
ONE = f"<testsuites><testsuite>{CASES}</testsuite></testsuites>"
TWO = '<testsuites><testsuite><testcase file="a.py" time="0.25"/></testsuite></testsuites>'
QUICK = dict.fromkeys(CEILINGS, 1.0)


def test_the_seconds_of_each_file_are_those_of_all_lanes_the_longest_first(tmp_path: Path) -> None:
    (tmp_path / "one.xml").write_text(ONE)
    (tmp_path / "two.xml").write_text(TWO)
    seconds = durations.files(tmp_path)
    assert list(seconds.items()) == [("b.py", 9.0), ("a.py", 1.75)]
    assert list(durations.slowest(seconds))[1:] == ["     9.0  b.py", "     1.8  a.py"]


@pytest.mark.parametrize(
    ("minutes", "whole", "gigabytes", "store", "red"),
    [
        (QUICK, 20.0, 10.0, "empty", []),
        (QUICK | {"bake": CEILINGS["bake"] * 1.19}, 20.0, 10.0, "empty", []),
        (QUICK | {"bake": CEILINGS["bake"] * 1.21}, 20.0, 10.0, "empty", ["bake"]),
        (QUICK, WHOLE["filled"] * 1.21, 10.0, "filled", ["all, filled store"]),
        (QUICK, WHOLE["empty"] * 1.19, 10.0, "empty", []),
        (QUICK, WHOLE["empty"] * 1.21, 31.0, "empty", ["all, empty store", "disk"]),
        # For a quick run, neither the total nor the disk is reported.
        ({"fast": 1.0}, 99.0, 99.0, "empty", []),
        ({"fast": CEILINGS["fast"] * 1.21}, 2.5, 1.0, "empty", ["fast"]),
    ],
)
def test_a_ceiling_that_is_exceeded_by_a_fifth_is_red(
    minutes: dict[str, float], whole: float, gigabytes: float, store: str, red: list[str]
) -> None:
    lines = list(ceilings.lines(minutes, whole, gigabytes, store))
    assert [line.partition(":")[0] for line, is_red in lines if is_red] == red
    assert all(("(over by more than a fifth)" in line) is is_red for line, is_red in lines)


def test_a_slow_machine_may_take_as_much_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "_KEYS", 1_000)
    minutes = {"fast": CEILINGS["fast"] * 2}
    assert [is_red for _, is_red in ceilings.lines(minutes, 5.0, 1.0, "empty", 2.0)] == [False, False]
    assert ceilings.slowness() >= 1


def _record(path: Path, **runs: dict[str, Any]) -> Path:
    path.write_text(json.dumps(runs))
    return path


def _run(**seconds: float) -> dict[str, Any]:
    return {
        "day": "2026-11-24",
        "processors": 2,
        "gigabytes": 12.5,
        "minutes": QUICK | {"all": 20.0},
        "files": {f"{name}.py": taken for name, taken in seconds.items()},
    }


def test_a_filled_store_says_what_to_expect_where_both_are_recorded(tmp_path: Path) -> None:
    record = _record(tmp_path / "record.json", empty=_run(a=9, b=8), filled=_run(a=2))
    assert durations.expected(record) == {"a.py": 2, "b.py": 8}
    assert durations.expected(tmp_path / "none") == {}


def test_the_page_shows_what_is_recorded(tmp_path: Path) -> None:
    content = durations.table(_record(tmp_path / "record.json", empty=_run()))
    assert (
        "| part | minutes, empty store | ceiling |" in content
        and f"| all | 20.0 | {WHOLE['empty']:g} empty, {WHOLE['filled']:g} filled |" in content
    )
    page = durations.in_page("before\n<!-- ci-durations -->\nold\n<!-- /ci-durations -->\nafter\n", content)
    assert page == f"before\n<!-- ci-durations -->\n{content}<!-- /ci-durations -->\nafter\n"
    if durations.RECORD.exists():
        assert durations.table() in durations.PAGE.read_text(encoding="utf-8")
