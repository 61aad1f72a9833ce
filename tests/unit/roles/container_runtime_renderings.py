"""The role container_runtime as Ansible evaluates it: its variables, and the text of its templates."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, generate_ansible_template_vars, trust_as_template

ROLE = Path(__file__).resolve().parents[3] / "roles" / "container_runtime"
TRIXIE = {"target_distribution": "debian", "target_suite": "trixie"}


@cache
def _role_file(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = DataLoader().load_from_file(str(ROLE / name), trusted_as_template=True)
    return loaded


def templar(**variables: Any) -> Templar:
    """Return a templar with the role's defaults, ``variables`` and the role's vars, lowest first."""
    scope = {
        **_role_file("defaults/main.yml"),
        **TRIXIE,
        "target_booted": False,
        "target_archives": "",
        **variables,
        **_role_file("vars/main.yml"),
    }
    return Templar(DataLoader(), scope)


def value(name: str, **variables: Any) -> Any:
    """Return one variable of the role as plain data."""
    return json.loads(templar(**variables).template(trust_as_template("{{ " + name + " | to_json }}")))


def render(template: str, *, item: Any = None, **variables: Any) -> str:
    """Render one of the role's templates as ansible.builtin.template does."""
    source = ROLE / "templates" / template
    engine = templar(**variables, item=item)
    engine.available_variables = {
        **engine.available_variables,
        **generate_ansible_template_vars(template, str(source)),
    }
    text = engine.template(
        trust_as_template(source.read_text()), escape_backslashes=False, overrides={"trim_blocks": True}
    )
    assert isinstance(text, str)
    return text
