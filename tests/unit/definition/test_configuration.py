"""An `ansible.cfg` that Ansible can't read is for the user to fix."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest

from image_builder.definition.engine import configuration
from image_builder.errors import DefinitionError


class Unreadable(ModuleType):
    """Ansible, as imported where its settings can't be read."""

    def __getattr__(self, name: str) -> None:
        if name == "constants":
            raise ValueError("File contains no section headers.\nline: 1")
        raise AttributeError(name)


def test_a_configuration_that_cannot_be_read_is_a_problem_at_its_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ANSIBLE_CONFIG", "/images/ansible.cfg")
    monkeypatch.setitem(sys.modules, "ansible", Unreadable("ansible"))
    monkeypatch.delitem(sys.modules, "ansible.constants")
    with pytest.raises(DefinitionError) as refused:
        importlib.reload(configuration)
    (problem,) = refused.value.problems
    assert (problem.where, problem.path) == ("/images/ansible.cfg", "ansible.cfg")
    assert problem.reason == "File contains no section headers. line: 1"
