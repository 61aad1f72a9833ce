"""The output for a CI service: errors as its own commands, and a Markdown page that is red where something failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from image_builder.cli import ci, failure
from image_builder.errors import (
    DefinitionError,
    FetchError,
    ImageBuilderError,
    Problem,
    UsageError,
    VerifyError,
)
from image_builder.verify.result import Check, SuiteResult

PROBLEMS = DefinitionError(
    [
        Problem("inventories/site/hosts.yml:7", "image_disk.root_size_mib", "must be a number, got 5 %"),
        Problem("a, b:c/x;y].yml:12", "one", "two\nlines"),
        Problem("", "three", "nowhere"),
    ]
)


@pytest.mark.parametrize(
    ("service", "lines"),
    [
        (
            "github",
            [
                "::error::three: nowhere",
                "::error file=a%2C b%3Ac/x;y].yml,line=12::one: two%0Alines",
                "::error file=inventories/site/hosts.yml,line=7::image_disk.root_size_mib: must be a number, got 5 %25",
            ],
        ),
        (
            "azure",
            [
                "##vso[task.logissue type=error;]three: nowhere",
                "##vso[task.logissue type=error;sourcepath=a, b:c/x%3By%5D.yml;linenumber=12;]one: two%0Alines",
                "##vso[task.logissue type=error;sourcepath=inventories/site/hosts.yml;linenumber=7;]"
                "image_disk.root_size_mib: must be a number, got 5 %AZP25",
            ],
        ),
    ],
)
def test_each_problem_is_shown_at_its_line(service: ci.Service, lines: list[str]) -> None:
    assert ci.annotate(PROBLEMS, service) == lines


def test_other_errors_have_no_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> int:
        raise FetchError("no answer")

    monkeypatch.setattr(failure, "service", "github")
    assert failure.guard(fail, json_wanted=False) == FetchError.exit_code
    shown = capsys.readouterr()
    assert shown.out == "::error::no answer\n" and shown.err == "error: no answer\n"
    failure.guard(fail, json_wanted=True)
    shown = capsys.readouterr()
    assert "::error::no answer" in shown.err and shown.out.startswith("{")


def test_a_verdict_is_shown_to_the_service_beside_its_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(failure, "service", "azure")
    for on_stdout in (True, False):
        failure.report(VerifyError("1 of 2 checks failed"), on_stdout=on_stdout)
        shown = capsys.readouterr()
        line = "##vso[task.logissue type=error;]1 of 2 checks failed\n"
        assert (shown.out, shown.err.count(line)) == (line if on_stdout else "", 0 if on_stdout else 1)


def test_a_console_with_problems_makes_a_page_red(tmp_path: Path) -> None:
    file = tmp_path / "summary.md"
    with ci.summary(file, "boot node") as page:
        page.checks(result("passed"))
        page.console(())
        assert page.is_green
        page.console(("kernel: | oops",))
    assert "### ❌ boot node" in file.read_text() and "| kernel: \\| oops |" in file.read_text()


def result(outcome: str) -> SuiteResult:
    check = Check("test_x.py::test_y", outcome, 0.1, message="a | b\nmore")  # type: ignore[arg-type]
    return SuiteResult("sealed tree", "offline", (check,), (), 0.1)


def test_a_page_is_added_to_what_is_there(tmp_path: Path) -> None:
    file = tmp_path / "summary.md"
    file.write_text("before\n")
    with ci.summary(file, "boot node") as page:
        page.checks(result("passed"))
    assert file.read_text() == "before\n### ✅ boot node\n\n1 checks: 1 passed\n\n"


def test_a_red_check_and_an_error_make_a_page_red(tmp_path: Path) -> None:
    file = tmp_path / "summary.md"
    with ci.summary(file, "verify") as page:
        page.checks(result("failed"))
    with pytest.raises(ImageBuilderError), ci.summary(file, "build node"):
        raise FetchError("no answer")
    with pytest.raises(KeyboardInterrupt), ci.summary(file, "build node"):
        raise KeyboardInterrupt
    text = file.read_text()
    assert text.count("❌") == 3 and "✅" not in text
    assert "| test_x.py::test_y | failed | a \\| b |" in text and "error: no answer" in text


def test_a_page_that_can_not_be_written_is_told_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(UsageError), ci.summary(tmp_path / "none/summary.md", "build"):
        pytest.fail("it began")
