"""The recorded mutants refer to code and tests that exist, and only a failing test kills one.

``python -m tests.mutations`` runs them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import mutations
from tests.mutations import Mutant

MUTANT = Mutant(
    "area", "image_builder/named.py", "if a:", "if True:", ("tests/unit/test_named.py::test_a",), "a"
)


def test_each_mutant_has_its_place_and_its_tests() -> None:
    lost = []
    for mutant in mutations.load():
        try:
            mutations.locate(mutant)
            mutations.find_tests(mutant)
        except LookupError as error:
            lost.append(str(error))
    assert lost == []


def test_each_mutant_changes_its_place_and_names_its_tests() -> None:
    for mutant in mutations.load():
        assert mutant.find != mutant.replace and mutant.why and mutant.tests, mutant
        assert mutant.marker in ("", "root"), mutant


def test_no_two_mutants_are_the_same() -> None:
    changes = [(mutant.find, mutant.replace, mutant.file) for mutant in mutations.load()]
    assert len(changes) == len(set(changes))


def _write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("files", "place"),
    [
        ({"image_builder/named.py": "if a:\n", "image_builder/b.py": "if a:\n"}, "image_builder/named.py"),
        (
            {"image_builder/named.py": "", "image_builder/node/moved.py": "if a:\n"},
            "image_builder/node/moved.py",
        ),
        ({"roles/r/templates/x.service.j2": "if a:\n"}, "roles/r/templates/x.service.j2"),
        ({"image_builder/b.py": "if a:\n", "image_builder/b.pyc": "if a:\n"}, "image_builder/b.py"),
    ],
    ids=["where it is named", "moved", "in a role's template", "compiled beside it"],
)
def test_a_mutants_text_is_found(tmp_path: Path, files: dict[str, str], place: str) -> None:
    _write(tmp_path, files)
    assert mutations.locate(MUTANT, tmp_path) == tmp_path / place


@pytest.mark.parametrize(
    "files",
    [
        {"image_builder/named.py": "if a:\nif a:\n", "image_builder/b.py": "if a:\n"},
        {"image_builder/b.py": "if a:\n", "image_builder/c.py": "if a:\nif a:\n"},
        {"image_builder/b.py": "if a:\n", "roles/r/templates/x.j2": "if a:\n"},
        {"image_builder/b.py": "if b:\n", "docs/x.md": "if a:\n"},
    ],
    ids=["twice where it is named", "twice in another file", "in two files", "nowhere in the program"],
)
def test_a_mutant_that_has_not_one_place_is_lost(tmp_path: Path, files: dict[str, str]) -> None:
    _write(tmp_path, files)
    with pytest.raises(LookupError, match=r"area: a: "):
        mutations.locate(MUTANT, tmp_path)


@pytest.mark.parametrize(
    ("folders", "found"),
    [
        (("unit", "boot"), "tests/unit/test_named.py::test_a"),
        (("unit/node",), "tests/unit/node/test_named.py::test_a"),
        (("unit/node", "boot"), None),
        ((), None),
    ],
    ids=["where it is named", "moved", "two of the name", "gone"],
)
def test_a_mutants_tests_are_found_by_their_files_name(
    tmp_path: Path, folders: tuple[str, ...], found: str | None
) -> None:
    _write(tmp_path, {f"tests/{folder}/test_named.py": "" for folder in folders})
    if found:
        assert mutations.find_tests(MUTANT, tmp_path) == (found,)
    else:
        with pytest.raises(LookupError, match=r"tests/unit/test_named\.py is not there"):
            mutations.find_tests(MUTANT, tmp_path)


@pytest.mark.parametrize(
    ("status", "fate"),
    [
        (1, "killed"),
        (0, "survived"),
        (None, "hung"),
        (2, "pytest ended with 2"),
        (5, "pytest ended with 5"),
        (-9, "pytest ended with -9"),
    ],
    ids=["a test failed", "all passed", "too long", "not collected", "no tests", "shot"],
)
def test_only_a_test_that_fails_kills(status: int | None, fate: str) -> None:
    assert mutations.fate(status) == fate
    assert mutations.left({"a": fate}) == ({} if status == 1 else {"a": fate})
