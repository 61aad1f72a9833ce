"""Defects of the program that its tests must notice: each is a change of one place, with the tests that turn red.

They are data, a file for each area. A mutant is known by its text, not by its line; where the text has moved to
another file of ``image_builder`` it is found there. ``python -m tests.mutations`` makes each of them in a copy of the
checkout and runs its tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from image_builder.settings import REPO_ROOT

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Mutant:
    """One defect. ``tests`` are pytest's paths, ``marker`` is empty for tests that need nothing (``root``)."""

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
    """Return all recorded mutants, by area. Raises TypeError for an entry with other keys."""
    return [
        Mutant(path.stem, **{**entry, "tests": tuple(entry["tests"])})
        for path in sorted(FOLDER.glob("*.yml"))
        for entry in yaml.safe_load(path.read_text(encoding="utf-8"))
    ]


def locate(mutant: Mutant, root: Path = REPO_ROOT) -> Path:
    """Return the file that has the mutant's text once; raises LookupError where there is none, or there are several."""
    named = root / mutant.file
    if named.is_file() and (number := named.read_text(encoding="utf-8").count(mutant.find)):
        if number > 1:
            raise LookupError(f"{mutant.name}: {mutant.file} has its text {number} times")
        return named
    files = sorted((root / "image_builder").rglob("*.py"))
    matches = [path for path in files if path.read_text(encoding="utf-8").count(mutant.find) == 1]
    if len(matches) != 1:
        raise LookupError(
            f"{mutant.name}: its text is in {len(matches)} files of image_builder, not in {mutant.file}"
        )
    return matches[0]
