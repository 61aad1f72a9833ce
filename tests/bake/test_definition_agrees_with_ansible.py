"""The values that a definition resolves without a play are those that a play sees."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from image_builder.definition import ImageDefinition, load_inventory, resolved_variables
from image_builder.definition.evaluate import EvaluatedRole, evaluated_layer
from image_builder.settings import REPO_ROOT
from image_builder.system import process

pytestmark = pytest.mark.root

# Replaces a role's tasks: no task of a role runs, only its variables are written down.
TASKS = """
- name: Write down what this role sees
  ansible.builtin.copy:
    dest: "{out}/{role}.json"
    content: "{{{{ {{{pairs}}} | to_json }}}}"
    mode: "0600"
"""


def test_values_are_those_of_a_play(tmp_path: Path) -> None:
    """Of the image with the most variables."""
    name = "worker_h100"
    definition = load_inventory([REPO_ROOT / "inventories/azure_vmss"]).define(name)
    shutil.copytree(REPO_ROOT / "playbooks", tmp_path / "playbooks")
    shutil.copytree(REPO_ROOT / "roles", tmp_path / "roles", ignore=shutil.ignore_patterns("molecule"))
    seen: dict[str, object] = {}
    for layers in _together(definition):
        roles = [role for layer in layers for role in evaluated_layer(definition, layer)]
        for role in roles:
            _write_down(tmp_path, role)
        _play(tmp_path, layers, name, definition.inventory_paths[0], definition.play_variables)
        for role in roles:
            seen.update(json.loads((tmp_path / f"{role.use.name}.json").read_text()))
    ours = resolved_variables(definition)
    assert len(ours) > 150
    assert {n: seen[n] for n in seen if seen[n] != ours[n]} == {}
    assert set(ours) == set(seen)


def _together(definition: ImageDefinition) -> list[list[str]]:
    """Return the layers, in order, in the fewest runs of Ansible in which no role occurs twice."""
    runs: list[list[str]] = []
    names: set[str] = set()
    for layer in definition.layers:
        own = {role.use.name for role in evaluated_layer(definition, layer)}
        if not runs or own & names:
            runs.append([])
            names = set()
        runs[-1].append(layer)
        names |= own
    return runs


def _write_down(root: Path, role: EvaluatedRole) -> None:
    """Replace a role's tasks with one that writes down what the role sees."""
    tasks = root / "roles" / role.use.name / "tasks"
    shutil.rmtree(tasks)
    tasks.mkdir()
    pairs = ", ".join(f"'{n}': {n}" for n in sorted(role.values) if n not in ("role_path", "role_name"))
    text = TASKS.format(out=root, role=role.use.name, pairs=pairs)
    # In the real role, a task reads any table next to vars/main.yml.
    for file in sorted((root / "roles" / role.use.name / "vars").glob("*.yml")):
        if file.name != "main.yml":
            text = f"- ansible.builtin.include_vars: {file.name}\n" + text
    (tasks / "main.yml").write_text(text)


def _play(root: Path, layers: Iterable[str], image: str, inventory: Path, variables: object) -> None:
    extra = root / "extra.json"
    extra.write_text(json.dumps({**variables, "ansible_connection": "local"}))  # type: ignore[dict-item]
    process.run(
        [
            Path(sys.executable).parent / "ansible-playbook",
            *(root / f"playbooks/layers/{layer}.yml" for layer in layers),
            *("-i", inventory, "--limit", image, "--skip-tags", "never", "--extra-vars", f"@{extra}"),
        ],
        env={
            "ANSIBLE_ROLES_PATH": str(root / "roles"),
            "ANSIBLE_HOME": str(root / "home"),
            "ANSIBLE_LOCAL_TEMP": str(root / "tmp"),
            "ANSIBLE_REMOTE_TEMP": str(root / "remote"),
            "ANSIBLE_PYTHON_INTERPRETER": sys.executable,
        },
        timeout=300,
    )
