"""Defects in the program that its tests must notice: each is a change in one place, with the tests that must fail.

They are data, a file for each area. A mutant is identified by its text, not its line, and its tests by their file
names, so both are found after a move to another directory. ``python -m tests.mutations`` applies each of them to a copy
of the checkout and runs its tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from image_builder.settings import REPO_ROOT

FOLDER = Path(__file__).parent
KILLED, SURVIVED, HUNG = "killed", "survived", "hung"
# The directories of the program: code, roles with their templates, playbooks.
_PROGRAM = ("image_builder", "roles", "playbooks")


@dataclass(frozen=True)
class Mutant:
    """One defect. ``tests`` are paths for pytest; ``marker`` is ``root``, or empty for tests that need nothing."""

    area: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]
    why: str
    marker: str = ""

    @property
    def name(self) -> str:
        return f"{self.area}: {self.why}"


def load() -> list[Mutant]:
    """Return all recorded mutants, by area. Raises TypeError for an entry with the wrong keys."""
    return [
        Mutant(path.stem, **{**entry, "tests": tuple(entry["tests"])})
        for path in sorted(FOLDER.glob("*.yml"))
        for entry in yaml.safe_load(path.read_text(encoding="utf-8"))
    ]


def locate(mutant: Mutant, root: Path = REPO_ROOT) -> Path:
    """Return the file with the mutant's text: the named one, or else the only one in the program.

    Raises LookupError if the text is there more than once, or nowhere.
    """
    named = root / mutant.file
    if named.is_file() and (number := _count(named, mutant.find)):
        if number > 1:
            raise LookupError(f"{mutant.name}: {mutant.file} has its text {number} times")
        return named
    files = [path for folder in _PROGRAM for path in sorted((root / folder).rglob("*")) if path.is_file()]
    places = [path for path in files for _ in range(_count(path, mutant.find))]
    if len(places) != 1:
        where = ", ".join(str(path.relative_to(root)) for path in places) or "nowhere"
        raise LookupError(f"{mutant.name}: its text is not in {mutant.file}, but {where}")
    return places[0]


def _count(path: Path, text: str) -> int:
    return 0 if path.suffix == ".pyc" else path.read_bytes().count(text.encode())


def find_tests(mutant: Mutant, root: Path = REPO_ROOT) -> tuple[str, ...]:
    """Return the mutant's tests as arguments for pytest; a file that has moved is found by its name.

    Raises LookupError if no file has that name, or several do.
    """
    return tuple(_find_test(mutant, test, root) for test in mutant.tests)


def _find_test(mutant: Mutant, test: str, root: Path) -> str:
    file, colons, name = test.partition("::")
    if (root / file).exists():
        return test
    found = sorted((root / "tests").rglob(Path(file).name))
    if len(found) != 1:
        raise LookupError(f"{mutant.name}: {file} is not there, and {len(found)} files have its name")
    return f"{found[0].relative_to(root)}{colons}{name}"


def fate(status: int | None) -> str:
    """Return the fate of a mutant from pytest's status, which is None if the tests had to be ended.

    Only a failed test kills a mutant: on a busy machine, slow tests and broken ones look alike.
    """
    if status is None:
        return HUNG
    return {0: SURVIVED, 1: KILLED}.get(status, f"pytest ended with {status}")


def has_moved(mutant: Mutant, root: Path = REPO_ROOT) -> bool:
    """Return whether a mutant's text or tests can't be found any more: nobody edits these files for a refactoring."""
    try:
        locate(mutant, root)
        find_tests(mutant, root)
    except LookupError:
        return True
    return False


def left(fates: Mapping[str, str]) -> dict[str, str]:
    """Return the mutants that no test killed, with their fates."""
    return {name: what for name, what in fates.items() if what != KILLED}
