"""The effect of the role azure_guest on a running machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from image_builder.canonical import JSON
from image_builder.definition import engine
from image_builder.definition.evaluate import role_variables
from image_builder.definition.roles import RoleBook

REPO = Path(__file__).resolve().parents[3]
ROLE = REPO / "roles/azure_guest"
INVENTORY: dict[str, JSON] = {
    "target_distribution": "debian",
    "target_suite": "trixie",
    "azure_guest_agent": True,
}


def _value(name: str) -> Any:
    book = RoleBook((REPO,))
    layer = book.layer("system")
    use = next(use for use in layer.uses if use.name == "azure_guest")
    return engine.Evaluator(role_variables(book, layer, use, INVENTORY)).evaluate(f"{{{{ {name} }}}}")


def test_no_unit_that_ends_by_itself_is_started_at_every_run() -> None:
    """Ansible's module takes a finished unit for a stopped one: it would start it, and report a change, each time."""
    started = set(_value("__azure_guest_units"))
    assert started == {"azure-pod-guard.service", "walinuxagent.service"}
    for file in _value("__azure_guest_files"):
        if Path(file["dest"]).name in started:
            text = (ROLE / "templates" / file["src"]).read_text()
            assert "Type=oneshot" not in text or "RemainAfterExit=yes" in text, file["src"]


def test_a_machine_whose_first_boot_is_over_is_told_so_once() -> None:
    """Otherwise its next boot would repeat the first one: new host keys, another user."""
    tasks = yaml.safe_load((ROLE / "tasks/service.yml").read_text())
    (told,) = [task["ansible.builtin.command"] for task in tasks if "ansible.builtin.command" in task]
    assert told["argv"] == ["systemctl", "start", "first-boot-durable.service"]
    assert told["creates"] == "{{ __azure_guest_first_boot_marker }}"
    text = (ROLE / "templates/first-boot-durable.service.j2").read_text()
    assert "ConditionPathExists=!{{ __azure_guest_first_boot_marker }}" in text
    assert f"ConditionPathExists={told['removes']}\n" in text
