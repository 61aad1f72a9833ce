"""Runs of real pytest processes: a run that proves nothing must never count as a verification."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from image_builder.errors import VerifyError
from image_builder.settings import REPO_ROOT, SUITE
from image_builder.verify.result import SuiteResult, require_passed
from image_builder.verify.runner import observe_suite
from tests.support.images.builds import Workplace

pytestmark = [pytest.mark.root, pytest.mark.process]

HEADER = """
import os, signal, time
import pytest
from suite import booted, needs, offline

@offline
def test_good():
    '''What it is about.'''
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """Copy the suite's machinery without its checks."""
    folder = tmp_path / "suite"
    folder.mkdir()
    for module in SUITE.glob("*.py"):
        if not module.name.startswith(("test_", "mutations")):
            shutil.copy(module, folder)
    ini = (SUITE / "pytest.ini").read_text(encoding="utf-8")
    (folder / "pytest.ini").write_text(ini, encoding="utf-8")
    facts = {
        "image": "x",
        "build_id": "0",
        "packages": [],
        "variables": {"image_layers": ["system"], "system_x": 1},
    }
    (tmp_path / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
    return folder


def run(suite: Path, checks: str, *, timeout: float | None = None) -> SuiteResult:
    (suite / "test_it.py").write_text(checks, encoding="utf-8")
    out = suite.parent / "out"
    out.mkdir(exist_ok=True)
    result = observe_suite(
        f"sandbox:{out}",
        suite.parent / "facts.json",
        out,
        marker="offline",
        python=Path(sys.executable),
        log=out / "log",
        suite=suite,
        timeout=timeout,
    )
    require_passed(result)
    return result


def refused(suite: Path, checks: str, **more: float) -> str:
    with pytest.raises(VerifyError) as error:
        run(suite, checks, **more)
    return error.value.message


def test_a_green_run_leaves_its_records(suite: Path) -> None:
    more = """
@booted
def test_elsewhere():
    assert False

@offline
@needs("kubernetes")
def test_not_of_this_image():
    assert False

@offline
@needs("system", system_x=2)
def test_not_of_these_variables():
    assert False
"""
    result = run(suite, HEADER + more)
    assert [(c.name, c.outcome, c.title) for c in result.checks] == [
        ("test_it.py::test_good", "passed", "What it is about.")
    ]
    assert {n.name: n.reason for n in result.not_applicable} == {
        "test_it.py::test_not_of_this_image": "no layer kubernetes",
        "test_it.py::test_not_of_these_variables": "system_x is 1",
    }
    out = suite.parent / "out"
    assert json.loads((out / "verify.json").read_text())["verdict"] == "passed"
    assert "testcase" in (out / "junit.xml").read_text()


def test_progress_is_told(suite: Path) -> None:
    (suite / "test_it.py").write_text(HEADER, encoding="utf-8")
    out, seen = suite.parent / "out", []
    out.mkdir()
    observe_suite(
        f"sandbox:{out}",
        suite.parent / "facts.json",
        out,
        marker="offline",
        python=Path(sys.executable),
        log=out / "log",
        suite=suite,
        on_progress=lambda name, done, total: seen.append((name, done, total)),
    )
    assert seen == [("test_it.py::test_good", 1, 1)]


@pytest.mark.parametrize(
    "checks",
    [
        "",
        "from suite import booted\n@booted\ndef test_elsewhere(): pass\n",
        "from suite import needs, offline\n@offline\n@needs('gpu')\ndef test_other(): pass\n",
    ],
)
def test_nothing_collected_fails(suite: Path, checks: str) -> None:
    assert "collected no check" in refused(suite, checks)


def test_a_failing_check_fails_and_is_recorded(suite: Path) -> None:
    message = refused(suite, HEADER + "\n@offline\ndef test_bad():\n    assert 1 == 2, 'one is not two'\n")
    assert "1 of 2 checks failed" in message and "test_it.py::test_bad: one is not two" in message
    verdict = json.loads((suite.parent / "out/verify.json").read_text())
    assert verdict["verdict"] == "failed" and verdict["counts"]["failed"] == 1


def test_the_command_keeps_the_record_of_what_failed(minimal: Workplace, tmp_path: Path) -> None:
    """The tree doesn't contain a single program."""
    (tmp_path / "tree/etc").mkdir(parents=True)
    places = (
        "--facts",
        minimal.artefact / "facts.json",
        "--output",
        tmp_path / "out",
        "--store",
        minimal.store,
    )
    pages = ("--annotations", "github", "verify", tmp_path / "tree", "--summary", tmp_path / "summary.md")
    done = subprocess.run(
        [REPO_ROOT / "image-builder", *pages, *places], capture_output=True, text=True, check=False
    )
    assert done.returncode == VerifyError.exit_code, done.stderr
    assert "\n::error::" in done.stdout and "error: " in done.stderr
    assert "❌" in (tmp_path / "summary.md").read_text()
    assert "<failure" in (tmp_path / "out/junit.xml").read_text()
    assert json.loads((tmp_path / "out/verify.json").read_text())["verdict"] == "failed"


@pytest.mark.parametrize(
    "fixture",
    [
        "@pytest.fixture\ndef broken():\n    raise OSError('no')\n",
        "@pytest.fixture\ndef broken():\n    yield\n    raise OSError('no')\n",
    ],
)
def test_an_error_outside_a_check_fails(suite: Path, fixture: str) -> None:
    message = refused(suite, HEADER + fixture + "\n@offline\ndef test_bad(broken): pass\n")
    assert "1 of 2 checks failed" in message and "OSError: no" in message


@pytest.mark.parametrize(
    "end",
    [
        "os._exit(0)",
        "os._exit(3)",
        "os.kill(os.getpid(), signal.SIGKILL)",
        "raise KeyboardInterrupt",
        "pytest.exit('enough', 0)",
    ],
)
def test_a_pytest_that_dies_fails(suite: Path, end: str) -> None:
    refused(suite, HEADER + f"\n@offline\ndef test_end():\n    {end}\n")


# Each is a check in the suite under test, which has to refuse it.
@pytest.mark.parametrize(
    "body", ["pytest.skip('not today')", "pytest.xfail('known')", "pytest.importorskip('no_such_module')"]
)
def test_an_outcome_that_is_neither_fails(suite: Path, body: str) -> None:
    assert "neither passed nor failed" in refused(
        suite, HEADER + f"\n@offline\ndef test_odd():\n    {body}\n"
    )


def test_a_module_that_cannot_be_imported_fails(suite: Path) -> None:
    (suite / "test_other.py").write_text(HEADER, encoding="utf-8")
    refused(suite, "import no_such_module\n")


def test_a_check_for_no_side_fails(suite: Path) -> None:
    assert "neither offline nor booted" in refused(suite, "def test_nowhere(): pass\n")


def test_a_misspelt_variable_fails(suite: Path) -> None:
    checks = (
        "from suite import needs, offline\n@offline\n@needs('system', system_y=1)\ndef test_typo(): pass\n"
    )
    assert "system_y, which no role of this image has" in refused(suite, checks)


def test_a_run_that_hangs_fails(suite: Path) -> None:
    message = refused(suite, HEADER + "\n@offline\ndef test_hang():\n    time.sleep(60)\n", timeout=3)
    assert "did not end" in message


def test_unreadable_facts_fail(suite: Path) -> None:
    (suite.parent / "facts.json").write_text("{}", encoding="utf-8")
    assert "the facts lack" in refused(suite, HEADER)
