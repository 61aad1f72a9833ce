"""Faults in a user's tasks that are reported before the bake stops at them, and those that are left to the play."""

from __future__ import annotations

from pathlib import Path

import pytest

from image_builder.definition import load_inventory
from image_builder.definition.engine import read_play

ROLE = "roles/site_banner"
LAYER = "playbooks/layers/site.yml"
TASKS = f"{ROLE}/tasks/main.yml"
COPY = "ansible.builtin.copy: {src: absent.conf, dest: /etc/absent.conf, mode: '0644'}"


def write(project: Path, file: str, text: str) -> None:
    (project / file).parent.mkdir(exist_ok=True)
    (project / file).write_text(text)


def faults(project: Path) -> list[str]:
    """Return the faults at which the layer would stop."""
    play = read_play(project / LAYER, [project / "roles"], {"site_banner_owner": "root"}, {}, frozenset())
    return sorted(f"{Path(where).relative_to(project)} {reason}" for where, reason in play.faults)


def test_validate_tells_all_of_them(project: Path) -> None:
    write(project, TASKS, lines("  notify: Restart it\n"))
    found = load_inventory([project / "inventories/site"], project=project).problems()
    assert [(Path(p.where).name, p.path) for p in found] == [("main.yml:2", "layer site")] * 2


def lines(text: str) -> str:
    return f"---\n- name: Task\n  {COPY}\n" + text


@pytest.mark.parametrize(
    ("task", "absent"),
    [
        (COPY, "absent.conf"),
        ("ansible.builtin.template: {src: absent.j2, dest: /etc/absent, mode: '0644'}", "absent.j2"),
        ("ansible.builtin.include_vars: absent.yml", "absent.yml"),
        ("ansible.builtin.script: absent.sh --quick", "absent.sh"),
        (
            COPY.replace("absent.conf,", "'{{ item }}',", 1) + "\n  loop: [there.conf, absent.conf]",
            "absent.conf",
        ),
        (COPY + "\n  when: site_banner_owner is defined", "absent.conf"),
    ],
)
def test_a_file_that_is_not_there_is_told_at_its_task(project: Path, task: str, absent: str) -> None:
    write(project, f"{ROLE}/files/there.conf", "a\n")
    write(project, TASKS, f"---\n- name: Task\n  {task}\n")
    assert faults(project) == [f"{TASKS}:2 no such file on the machine that builds: `{absent}`"]


@pytest.mark.parametrize(
    "tasks",
    [
        lines("  when: false\n"),
        lines("  when: ansible_facts.kernel is defined\n"),
        lines("  ignore_errors: true\n"),
        lines("  failed_when: false\n"),
        lines("  tags: [never]\n"),
        lines("").replace("absent.conf,", "absent.conf, remote_src: true,", 1),
        f"---\n- name: Try\n  block:\n    - name: Task\n      {COPY}\n"
        "  rescue:\n    - name: Other\n      ansible.builtin.debug: {msg: none}\n",
        "---\n- name: Make it\n  ansible.builtin.command: make\n  delegate_to: localhost\n  changed_when: true\n"
        + lines("").removeprefix("---\n"),
    ],
    ids=["off", "by a fact", "ignored", "never failed", "never", "in the image", "rescued", "made before"],
)
def test_a_file_that_may_not_be_needed_or_come_later_is_left_to_the_play(project: Path, tasks: str) -> None:
    write(project, TASKS, tasks)
    assert faults(project) == []


def notifying(name: str) -> str:
    return f"---\n- name: Task\n  ansible.builtin.command: 'true'\n  changed_when: true\n  notify: {name}\n"


def test_a_handler_that_nobody_has_is_told_at_its_task(project: Path) -> None:
    write(project, TASKS, notifying("Restart it"))
    assert faults(project) == [f"{TASKS}:2 notifies `Restart it`: the play has no such handler"]


@pytest.mark.parametrize(
    ("name", "handler"),
    [
        ("Restart it", "name: Restart it"),
        ("'site_banner : Restart it'", "name: Restart it"),
        ("restart", "name: Restart it\n  listen: restart"),
        ("'Restart {{ site_banner_owner }}'", "name: Restart root"),
        ("Restart root", "name: 'Restart {{ site_banner_owner }}'"),
    ],
)
@pytest.mark.parametrize("place", ["role", "play"])
def test_handlers_are_known_by_each_of_their_names(
    project: Path, place: str, name: str, handler: str
) -> None:
    written = f"- {handler}\n  ansible.builtin.command: 'true'\n  changed_when: true\n"
    if place == "role":
        write(project, f"{ROLE}/handlers/main.yml", f"---\n{written}")
        write(project, TASKS, notifying(name))
    elif "site_banner :" not in name:
        nested = "".join(f"    {line}\n" for line in written.splitlines())
        text = (project / LAYER).read_text().rstrip("\n") + f"\n  handlers:\n{nested}"
        write(project, LAYER, text)
        write(project, TASKS, notifying(name))
    assert faults(project) == []


def test_a_handler_may_be_an_include_or_that_of_a_needed_role(project: Path) -> None:
    write(project, f"{ROLE}/handlers/main.yml", "- name: Restart all\n  include_tasks: all.yml\n")
    write(project, f"{ROLE}/handlers/all.yml", "- name: One\n  ansible.builtin.debug: {msg: one}\n")
    (project / ROLE / "meta").mkdir(exist_ok=True)
    write(project, f"{ROLE}/meta/main.yml", "dependencies: [needed]\n")
    (project / "roles/needed").mkdir()
    write(
        project,
        "roles/needed/handlers/main.yml",
        "- name: Reload\n  listen: needed\n  ansible.builtin.debug: {msg: needed}\n",
    )
    write(project, TASKS, notifying("[Restart all, needed, Reload]"))
    assert faults(project) == []
