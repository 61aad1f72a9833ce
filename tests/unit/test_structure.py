"""The structure of the tests: where they are, and which run only at night."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from image_builder.settings import REPO_ROOT

TESTS = REPO_ROOT / "tests"
PAGE = REPO_ROOT / "docs/reference/benchmarks.md"
UNTESTED = Path(__file__).with_name("untested_modules.txt")
# Modules without a test of their name are on the list, which may only get shorter.
MOST_UNTESTED = 116
# Names of a folder's own module, whose test has the folder's name.
_OF_THE_FOLDER = {"command", "model", "plan", "run"}
# A file with nightly tests, or with nightly parameters of tests.
_NIGHT = re.compile(r"pytest\.mark\.nightly|\bevery_engine\(|\bwhole_workers\(")
_IMPORTS_UNIT = re.compile(
    r"^\s*(?:from|import) tests\.unit\b|^\s*from tests import .*\bunit\b", re.MULTILINE
)
_NIGHTLY = re.compile(r"^@pytest\.mark\.nightly\n(?:@.*\n)*def (\w+)", re.MULTILINE)


def _untested() -> list[str]:
    """Return modules without a test of their name: `test_copy.py` or `test_promote_copy.py` for promote/copy.py."""
    names = {path.stem.removeprefix("test_") for path in TESTS.rglob("test_*.py")}
    modules = []
    for path in sorted((REPO_ROOT / "image_builder").rglob("*.py")):
        *folders, name = path.relative_to(REPO_ROOT).with_suffix("").parts
        own = {folders[-1]} if name in _OF_THE_FOLDER else set()
        tails = {"_".join([*folders[number:], name]) for number in range(len(folders) + 1)}
        if "suite" in folders or name.startswith("__"):
            continue  # the suite's own tests are its mutations
        if not names & (own | tails | {f"{folder}_{name}" for folder in folders}):
            modules.append(path.relative_to(REPO_ROOT).as_posix())
    return modules


def test_a_module_without_a_test_of_its_name_is_on_a_list_that_only_shrinks(
    request: pytest.FixtureRequest,
) -> None:
    modules = _untested()
    if request.config.getoption("--update-golden"):
        UNTESTED.write_text("".join(f"{module}\n" for module in modules))
    assert UNTESTED.read_text().split() == modules, (
        "a new module needs a test; --update-golden takes others off"
    )
    assert len(modules) <= MOST_UNTESTED


def test_a_release_is_read_in_two_minutes() -> None:
    lines = (
        (REPO_ROOT / "CHANGELOG.md")
        .read_text(encoding="utf-8")
        .partition("## [Unreleased]\n")[2]
        .splitlines()
    )
    assert len(lines) <= 60


def test_what_tests_share_is_in_support_and_not_beside_a_unit_test() -> None:
    others = [path for path in TESTS.rglob("*.py") if TESTS / "unit" not in path.parents]
    assert [str(path) for path in others if _IMPORTS_UNIT.search(path.read_text(encoding="utf-8"))] == []


def test_what_is_left_to_the_night_says_what_proves_it_on_every_commit() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Nightly tests")[2].partition("\n## ")[0]
    missing = []
    for path in sorted(TESTS.rglob("test_*.py")):
        name, text = path.relative_to(REPO_ROOT).as_posix(), path.read_text(encoding="utf-8")
        if _NIGHT.search(text) and f"`{name}`" not in section and f"`{name}::" not in section:
            missing.append(name)
        if functions := _NIGHTLY.findall(text):
            missing += [
                f"{name}::{test}" for test in functions if name not in section or f"::{test}`" not in section
            ]
    assert missing == []
