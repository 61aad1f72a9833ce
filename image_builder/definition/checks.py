"""The user's own checks: test files in addition to the suite's, and the mutations that must turn each check red.

``checks/test_*.py`` hold the checks. ``checks/mutations.yml`` maps each check to shell commands that break its subject,
one at a time; an entry that is a mapping holds the command and, for a running machine, the one that repairs it. A check
that nothing turns red proves nothing.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

from image_builder.definition import engine
from image_builder.definition.values import Place
from image_builder.errors import Problem
from image_builder.settings import CHECKS, MUTATIONS, SUITE
from image_builder.text import did_you_mean

# The names by which pytest recognizes a test file, a test, and a test class.
_PREFIX, _SUFFIX, _CLASS = "test_", "_test", "Test"


def check_problems(project: Path) -> list[Problem]:
    """Return the problems in a repository's checks and their mutations."""
    folder = project / CHECKS
    if not folder.is_dir():
        return []
    problems: list[Problem] = []
    checks: dict[str, Place] = {}
    suite = _names_of_suite()
    for file in sorted(filter(Path.is_file, folder.rglob("*.py"))):
        if (SUITE / file.name).exists():
            problems.append(
                Problem(str(Place(str(file))), file.name, "the suite has a file of this name: rename it")
            )
        try:
            found = list(_checks(file))
        except SyntaxError as error:
            problems.append(Problem(str(Place(str(file), error.lineno or 1)), file.name, error.msg))
            continue
        except ValueError as error:
            problems.append(Problem(str(Place(str(file), 1)), file.name, str(error)))
            continue
        for name, place in found if file.name.startswith(_PREFIX) or file.stem.endswith(_SUFFIX) else ():
            if name in suite or name in checks:
                problems.append(Problem(str(place), name, "there is another check of this name: rename it"))
            checks[name] = place
    return problems + _mutation_problems(folder / MUTATIONS, checks)


@functools.cache
def _names_of_suite() -> frozenset[str]:
    return frozenset(name for file in SUITE.glob(f"{_PREFIX}*.py") for name, _ in _checks(file))


def _checks(file: Path) -> Iterator[tuple[str, Place]]:
    """Yield the name and the place of each check in a file."""
    bodies = [ast.parse(file.read_bytes(), str(file)).body]
    while bodies:
        for node in bodies.pop():
            if isinstance(node, ast.FunctionDef) and node.name.startswith(_PREFIX):
                yield node.name, Place(str(file), node.lineno)
            elif isinstance(node, ast.ClassDef) and node.name.startswith(_CLASS):
                bodies.append(node.body)


def _mutation_problems(file: Path, checks: Mapping[str, Place]) -> list[Problem]:
    try:
        recorded = (engine.read_yaml(file) if file.is_file() else None) or {}
    except engine.UnreadableError as error:
        return [Problem(str(error.place or Place(str(file))), file.name, error.reason)]
    if not isinstance(recorded, Mapping):
        return [Problem(str(Place(str(file), 1)), file.name, "must map each check to a list of commands")]
    problems = [
        Problem(
            str(engine.place_of(name) or Place(str(file))),
            str(name),
            f"no such check{did_you_mean(name, checks)}",
        )
        for name in recorded.keys() - checks.keys()
    ]
    for name, place in checks.items():
        if name not in recorded:
            reason = f"nothing shows that it can fail: put what breaks it into {CHECKS}/{MUTATIONS}"
            problems.append(Problem(str(place), name, reason))
        elif not _is_commands(recorded[name]):
            where = str(engine.place_in(recorded, [name]) or Place(str(file)))
            reason = "must be a list of commands, each a text, or a mapping of `break` and `mend`"
            problems.append(Problem(where, name, reason))
    return problems


def _is_commands(value: object) -> bool:
    return isinstance(value, list) and value != [] and all(_is_command(entry) for entry in value)


def _is_command(entry: object) -> bool:
    if isinstance(entry, Mapping):
        return entry.keys() == {"break", "mend"} and all(map(_is_text, entry.values()))
    return _is_text(entry)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value.strip() != ""
