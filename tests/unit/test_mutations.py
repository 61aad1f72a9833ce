"""The recorded mutants are about code and tests that are there. ``python -m tests.mutations`` runs them."""

from __future__ import annotations

from image_builder.settings import REPO_ROOT
from tests import mutations


def test_each_mutant_has_its_place() -> None:
    lost = []
    for mutant in mutations.load():
        try:
            mutations.locate(mutant)
        except LookupError as error:
            lost.append(str(error))
    assert lost == []


def test_each_mutant_changes_its_place_and_names_its_tests() -> None:
    for mutant in mutations.load():
        assert mutant.find != mutant.replace and mutant.why, mutant
        assert mutant.marker in ("", "root"), mutant
        paths = [REPO_ROOT / test.partition("::")[0] for test in mutant.tests]
        assert paths and all(path.exists() for path in paths), mutant


def test_no_two_mutants_are_the_same() -> None:
    changes = [(mutant.find, mutant.replace, mutant.file) for mutant in mutations.load()]
    assert len(changes) == len(set(changes))
