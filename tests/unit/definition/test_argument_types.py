"""Values that no option's type can have: each is a problem with its line, whatever Ansible itself would make of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from image_builder.definition import Inventory, engine
from image_builder.definition.roles import RoleBook
from image_builder.settings import REPO_ROOT

INFINITE: list[Any] = [
    "infinity",
    "inf",
    "-inf",
    "nan",
    float("inf"),
    float("nan"),
    "1e400",
    "1e99999999",
    10**400,
]
ODD: list[Any] = [*INFINITE, "9" * 5000, "x", "", "{", True, -1, 1.5, None]
ODD += [
    [],
    {},
    [None],
    [[]],
    [{}],
    ["inf"],
    [float("nan")],
    [1, {"a": 2}],
    {"a": None},
    {1: 2},
    {"x": {"y": [1]}},
]


def _options() -> dict[str, Any]:
    book = RoleBook((REPO_ROOT,))
    return {name: option for role in book.roles() for name, option in role.options.items()}


def test_no_value_of_any_option_is_a_bug() -> None:
    options = _options()
    assert len(options) > 200
    for name, option in options.items():
        for value in ODD:
            assert isinstance(engine.argument_faults(name, option, value), list), (name, value)
        if option.get("type") in ("int", "float"):
            assert all(engine.argument_faults(name, option, value) for value in INFINITE), name


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ({"type": "int"}, "infinity", "infinity is not an integer"),
        ({"type": "float"}, float("nan"), "nan is not a number"),
        ({"type": "list", "elements": "int"}, [1, "inf"], "inf is not an integer"),
        ({"type": "dict", "options": {"a": {"type": "int"}}}, {"a": "inf"}, "a: inf is not an integer"),
        ({"type": "dict", "options": {"a": {"type": "int"}}}, 7, "7 is not a mapping"),
        ({"type": "list", "elements": "dict", "options": {"a": {}}}, [7], "7 is not a mapping"),
        ({"type": "dict"}, {1: 2}, "the key 1 is not a string"),
    ],
)
def test_the_reason_names_the_value(option: dict[str, Any], value: Any, reason: str) -> None:
    assert engine.argument_faults("x", option, value) == [reason]


def test_it_is_one_problem_among_the_others(load: Callable[..., Inventory]) -> None:
    text = "system_limits: {nofile: infinity}\nsystem_swap: maybe\n"
    found = [str(problem) for problem in load(group_vars__workers=text).problems()]
    assert "group_vars/workers.yml:1  system_limits: nofile: infinity is not an integer" in found
    assert any(line.startswith("group_vars/workers.yml:2  system_swap: ") for line in found)
    found = [str(p) for p in load(group_vars__workers="image_pull: {progress_seconds: .nan}\n").problems()]
    assert any(line.startswith("group_vars/workers.yml:1  image_pull.progress_seconds: ") for line in found)
