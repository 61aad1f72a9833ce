"""A role's variables and templates as Ansible evaluates them."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, generate_ansible_template_vars, trust_as_template

from image_builder.settings import REPO_ROOT

ROLES = REPO_ROOT / "roles"


@cache
def role_file(role: str, name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = DataLoader().load_from_file(str(ROLES / role / name), trusted_as_template=True)
    return loaded


def templar(role: str, **variables: Any) -> Templar:
    """Return a templar with the role's defaults, ``variables`` and the role's vars, lowest precedence first."""
    scope = {**role_file(role, "defaults/main.yml"), **variables, **role_file(role, "vars/main.yml")}
    return Templar(DataLoader(), scope)


def value(role: str, name: str, **variables: Any) -> Any:
    """Return one variable of a role as plain data."""
    return json.loads(templar(role, **variables).template(trust_as_template("{{ " + name + " | to_json }}")))


def render(role: str, template: str, **variables: Any) -> str:
    """Render one of a role's templates as ansible.builtin.template does."""
    source = ROLES / role / "templates" / template
    engine = templar(role, **variables)
    engine.available_variables = {
        **engine.available_variables,
        **generate_ansible_template_vars(template, str(source)),
    }
    text = engine.template(
        trust_as_template(source.read_text()), escape_backslashes=False, overrides={"trim_blocks": True}
    )
    assert isinstance(text, str)
    return text
