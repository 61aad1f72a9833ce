"""The two records of a verification run: what makes them valid as a result, and what makes them worthless."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from image_builder.errors import VerifyError
from image_builder.text import json_lines
from image_builder.verify.result import (
    SuiteResult,
    from_json,
    junit_outcomes,
    read_run,
    require_passed,
    table,
)

PASSED = {"test_a.py::test_one": "passed", "test_a.py::test_two[0]": "passed"}
FAILED = {"test_a.py::test_one": "passed", "test_a.py::test_two[0]": "failed"}
TAGS = {
    "passed": "",
    "failed": '<failure message="m"/>',
    "error": '<error message="m"/>',
    "skipped": "<skipped/>",
}


def lines(
    outcomes: dict[str, str], *, selected: list[str] | None = None, status: int | None = 0
) -> list[str]:
    """Return the suite's own record of a run."""
    events: list[dict[str, Any]] = [
        {
            "event": "collected",
            "selected": list(outcomes) if selected is None else selected,
            "not_applicable": [{"name": "test_a.py::test_docker", "reason": "no layer docker"}],
        }
    ]
    events += [
        {
            "event": "check",
            "name": name,
            "outcome": outcome,
            "seconds": 0.5,
            "message": "" if outcome == "passed" else "bad",
        }
        for name, outcome in outcomes.items()
    ]
    if status is not None:
        events.append({"event": "finished", "status": status})
    return [json.dumps(event) for event in events]


def junit(outcomes: dict[str, str]) -> str:
    """Return pytest's record of a run."""
    cases = "".join(
        f'<testcase classname="test_a" name="{name.partition("::")[2]}">{TAGS[outcome]}</testcase>'
        for name, outcome in outcomes.items()
    )
    return f'<?xml version="1.0"?><testsuites><testsuite name="image">{cases}</testsuite></testsuites>'


def result(outcomes: dict[str, str], status: int = 0) -> SuiteResult:
    return read_run(
        lines(outcomes, status=status),
        junit_outcomes(junit(outcomes)),
        status,
        target="sealed tree",
        marker="offline",
        seconds=1.5,
    )


def refused(text: list[str], record: str, status: int) -> str:
    """Return why a run is refused."""
    with pytest.raises(VerifyError) as error:
        read_run(text, junit_outcomes(record), status, target="sealed tree", marker="offline", seconds=1.0)
    return error.value.message


def test_a_green_run() -> None:
    found = result(PASSED)
    require_passed(found)
    assert found.summary() == "2 checks: 2 passed; 1 not applicable"
    assert found.not_applicable[0].reason == "no layer docker"
    assert found.as_json()["verdict"] == "passed"


@pytest.mark.parametrize("outcome", ["failed", "error"])
def test_a_check_that_is_not_green_is_named(outcome: str) -> None:
    found = result({**PASSED, "test_a.py::test_two[0]": outcome}, status=1)
    assert found.as_json()["verdict"] == "failed"
    with pytest.raises(
        VerifyError, match=r"1 of 2 checks failed on sealed tree\n  test_a.py::test_two\[0\]: bad"
    ):
        require_passed(found)


def test_many_failures_are_counted_not_all_shown() -> None:
    outcomes = {f"test_a.py::test_{n}": "failed" for n in range(25)}
    with pytest.raises(VerifyError, match="and 5 more"):
        require_passed(result(outcomes, status=1))
    with pytest.raises(VerifyError) as error:
        require_passed(result(dict(list(outcomes.items())[:20]), status=1))
    assert len(error.value.message.splitlines()) == 21


@pytest.mark.parametrize(
    ("tags", "outcome"),
    [
        (["", "failure"], "failed"),
        (["failure", ""], "failed"),
        (["failure", "error"], "error"),
        (["error", "failure"], "error"),
        (["", "error"], "error"),
        (["skipped", ""], "skipped"),
        (["", ""], "passed"),
    ],
)
def test_of_two_entries_of_a_check_the_worse_one_counts(tags: list[str], outcome: str) -> None:
    cases = "".join(f'<testcase classname="a" name="b">{f"<{t}/>" if t else ""}</testcase>' for t in tags)
    assert list(junit_outcomes(f"<testsuite>{cases}</testsuite>").values()) == [outcome]


def test_no_checks_is_no_verification() -> None:
    assert "collected no check" in refused(lines({}, status=5), junit({}), 5)
    empty = SuiteResult("sealed tree", "offline", (), (), 0.0)
    assert empty.as_json()["verdict"] == "failed"
    with pytest.raises(VerifyError, match="collected no check"):
        require_passed(empty)


@pytest.mark.parametrize("outcome", ["skipped", "xpassed", "xskipped", "", "Passed"])
def test_an_unknown_outcome_is_refused(outcome: str) -> None:
    assert "neither passed nor failed" in refused(lines({"test_a.py::test_one": outcome}), junit(PASSED), 0)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_run_that_broke_off_is_refused(cut: int) -> None:
    assert "did not come to its end" in refused(lines(PASSED)[:cut], junit(PASSED), -9)


def test_a_selected_check_without_result_is_refused() -> None:
    text = lines({"test_a.py::test_one": "passed"}, selected=list(PASSED))
    assert "gave no result" in refused(text, junit({"test_a.py::test_one": "passed"}), 0)


def test_a_check_that_was_not_selected_is_refused() -> None:
    text = lines(PASSED, selected=["test_a.py::test_one"])
    assert "was not selected" in refused(text, junit(PASSED), 0)


def test_a_check_reported_twice_is_refused() -> None:
    text = lines(PASSED)
    assert "twice" in refused([*text[:2], *text[1:]], junit(PASSED), 0)


@pytest.mark.parametrize(
    ("own", "other", "status"),
    [
        (PASSED, FAILED, 0),  # the suite says green, JUnit says red
        (FAILED, PASSED, 1),
        (PASSED, {"test_a.py::test_one": "passed"}, 0),  # a check is in only one record
        (PASSED, {**PASSED, "test_a.py::test_three": "passed"}, 0),
        (PASSED, {**PASSED, "test_a.py::test_one": "skipped"}, 0),
    ],
)
def test_records_that_disagree_are_refused(own: dict[str, str], other: dict[str, str], status: int) -> None:
    assert "disagree" in refused(lines(own, status=status), junit(other), status)


@pytest.mark.parametrize(
    ("outcomes", "told", "status"), [(PASSED, 0, 1), (PASSED, 1, 1), (FAILED, 1, 0), (PASSED, 0, -9)]
)
def test_an_exit_status_that_does_not_fit_is_refused(
    outcomes: dict[str, str], told: int, status: int
) -> None:
    assert "ended with status" in refused(lines(outcomes, status=told), junit(outcomes), status)


@pytest.mark.parametrize("bad", ["", "{", "[]", '{"event": "dance"}'])
def test_a_damaged_report_is_refused(bad: str) -> None:
    refused([*lines(PASSED), bad], junit(PASSED), 0)


def test_a_damaged_junit_file_is_refused() -> None:
    assert "damaged" in refused(lines(PASSED), junit(PASSED)[:-20], 0)


def test_verify_json_can_be_read_back() -> None:
    found = result(FAILED, status=1)
    text = json_lines(found.as_json())
    assert json.loads(text) == found.as_json()
    assert len([line for line in text.splitlines() if '"outcome"' in line]) == len(found.checks)
    assert from_json(json.loads(text)) == found
    with pytest.raises(VerifyError):
        from_json({"checks": []})


def test_the_table_names_what_failed() -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(table(result(FAILED, status=1)))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "test_two[0]" in text and "bad" in text and "1 of 2 passed" in text
    assert "test_one" not in text
