"""The verification suite as text: every check has a side, a title and a mutation."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from image_builder.settings import REPO_ROOT, SUITE

MUTATIONS = REPO_ROOT / "tests" / "suite"


@dataclass(frozen=True)
class CheckText:
    name: str
    title: str
    marks: frozenset[str]


def checks() -> list[CheckText]:
    """Return every check of the suite, read from its source."""
    found = []
    for path in sorted(SUITE.glob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                marks = frozenset(mark.id for mark in node.decorator_list if isinstance(mark, ast.Name))
                found.append(CheckText(node.name, ast.get_docstring(node) or "", marks))
    return found


def recorded(function: str) -> list[str]:
    """Return the checks that ``record`` or ``record_booted`` is called for."""
    calls = (
        node
        for path in MUTATIONS.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function
    )
    return [str(call.args[0].value) for call in calls if isinstance(call.args[0], ast.Constant)]


def test_there_are_enough_checks_with_names_of_their_own() -> None:
    names = [check.name for check in checks()]
    assert len(names) >= 60
    assert sorted(names) == sorted(set(names))


def test_every_check_says_what_it_is_about_and_where_it_holds() -> None:
    assert [check.name for check in checks() if not check.title.endswith(".")] == []
    assert [check.name for check in checks() if not check.marks & {"offline", "booted"}] == []


def test_every_offline_check_has_mutations() -> None:
    offline = {check.name for check in checks() if "offline" in check.marks}
    mutated = recorded("record")
    assert sorted(mutated) == sorted(set(mutated))
    assert offline ^ set(mutated) == set()


def test_every_check_of_a_machine_alone_has_a_mutation() -> None:
    booted = {check.name for check in checks() if "offline" not in check.marks}
    mutated = recorded("record_booted")
    assert sorted(mutated) == sorted(set(mutated))
    assert booted ^ set(mutated) == set()
