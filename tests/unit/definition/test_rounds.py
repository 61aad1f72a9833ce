"""The value of a variable that a task sees, without a play."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from image_builder.definition.engine.reads import NotingLoader
from image_builder.definition.engine.rounds import Rounds


@pytest.mark.parametrize(
    ("fact", "parameter", "extra", "seen"),
    [
        ({}, {}, {}, "play"),
        ({"a": "fact"}, {}, {}, "fact"),
        ({"a": "fact"}, {"a": "include"}, {}, "include"),
        ({"a": "fact"}, {"a": "include"}, {"a": "extra"}, "extra"),
    ],
)
def test_an_includes_parameters_win_over_facts_and_extra_variables_over_all(
    fact: dict[str, Any], parameter: dict[str, Any], extra: dict[str, Any], seen: str
) -> None:
    manager = SimpleNamespace(get_vars=lambda **_: {"a": "play"}, _extra_vars=extra)
    task = SimpleNamespace(get_include_params=lambda: parameter, get_search_path=lambda: ["/role"])
    loader = cast(NotingLoader, SimpleNamespace(get_basedir=lambda: "/play"))
    rounds = Rounds(SimpleNamespace(image_builder_variables=manager), loader, frozenset())
    rounds._set |= fact
    variables = rounds.variables(task)
    assert variables["a"] == variables["vars"]["a"] == seen
    assert variables["ansible_search_path"] == ["/role", "/play"]
