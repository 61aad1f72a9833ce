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


def faults(project: Path, **extra: str) -> list[str]:
    """Return the faults at which the layer would stop, given variables of the command line."""
    variables = {"site_banner_owner": "root", "inventory_hostname": "node"}
    play = read_play(project / LAYER, [project / "roles"], variables, extra, frozenset())
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
        "---\n- name: Try\n  block:\n    - name: Other\n      ansible.builtin.command: 'false'\n"
        f"  rescue:\n    - name: Task\n      {COPY}\n",
    ],
    ids=["off", "by a fact", "ignored", "never failed", "never", "in the image", "rescued", "in a rescue"],
)
def test_a_file_that_may_not_be_needed_is_left_to_the_play(project: Path, tasks: str) -> None:
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


ELSEWHERE = [
    "ansible.builtin.command: id\n  delegate_to: localhost",
    "local_action: {module: ansible.builtin.command, _raw_params: id}",
    "local_action: ansible.builtin.command id",
    "ansible.builtin.command: id\n  connection: local",
    "ansible.builtin.command: id\n  connection: ansible.builtin.local",
    "ansible.builtin.command: id\n  vars: {ansible_connection: local}",
    "ansible.builtin.set_fact: {ansible_connection: local}",
    "ansible.builtin.setup:\n  delegate_to: localhost\n  delegate_facts: true",
    "ansible.builtin.command: id\n  run_once: true\n  delegate_to: \"{{ site_lb | default('127.0.0.1') }}\"",
    'ansible.builtin.command: id\n  delegate_to: "{{ item }}"\n  loop: [node, node2]',
    "ansible.builtin.command: id\n  delegate_to: localhost\n  ignore_errors: true",
    "ansible.builtin.command: id\n  delegate_to: localhost\n  when: site_banner_owner == 'root'",
]
WAITS = [
    "ansible.builtin.pause: {prompt: Go on?}",
    "ansible.builtin.pause:",
    "pause: {echo: false}",
    "ansible.builtin.pause: {prompt: Go on?, seconds: '{{ omit }}'}",
]


@pytest.mark.parametrize("task", [*ELSEWHERE, *WAITS])
def test_a_task_for_another_machine_or_a_person_is_refused(project: Path, task: str) -> None:
    write(project, TASKS, f"---\n- name: Task\n  {task}\n")
    (fault,) = faults(project)
    assert fault.startswith(f"{TASKS}:2 ")
    assert ("acts on `" in fault) == (task in ELSEWHERE)


@pytest.mark.parametrize(
    "task",
    [
        "ansible.builtin.command: id\n  delegate_to: '{{ inventory_hostname }}'",
        "ansible.builtin.command: id\n  delegate_to: '{{ omit }}'",
        "ansible.builtin.debug: {msg: here}\n  delegate_to: localhost",
        "ansible.builtin.command: id\n  delegate_to: localhost\n  when: false",
        "ansible.builtin.command: id\n  delegate_to: localhost\n  when: ansible_facts.kernel is defined",
        "ansible.builtin.command: id\n  delegate_to: '{{ ansible_facts.nodename }}'",
        "ansible.builtin.command: id\n  delegate_to: localhost\n  tags: never",
        "ansible.builtin.command: id\n  connection: ssh",
        "ansible.builtin.pause: {seconds: 1}",
        "ansible.builtin.pause: {minutes: 1, prompt: Wait}",
        "ansible.builtin.include_tasks: other.yml\n  when: ansible_facts.kernel is defined",
        "ansible.builtin.include_tasks: other.yml\n  loop: '{{ ansible_facts.interfaces }}'",
    ],
)
def test_a_task_that_may_be_for_the_image_is_left_to_the_play(project: Path, task: str) -> None:
    write(project, f"{ROLE}/tasks/other.yml", f"---\n- name: Task\n  {ELSEWHERE[0]}\n")
    write(project, TASKS, f"---\n- name: Task\n  {task}\n")
    assert faults(project) == []


@pytest.mark.parametrize(
    ("around", "line"),
    [
        (
            "- name: Around\n  delegate_to: localhost\n  block:\n    - name: Task\n      ansible.builtin.command: id",
            5,
        ),
        (
            "- name: Around\n  ansible.builtin.include_tasks:\n    file: other.yml\n"
            "    apply: {delegate_to: localhost}",
            0,
        ),
        ("- name: Around\n  ansible.builtin.import_tasks: other.yml\n  delegate_to: localhost", 0),
    ],
)
def test_what_is_around_a_task_may_send_it_elsewhere(project: Path, around: str, line: int) -> None:
    write(project, f"{ROLE}/tasks/other.yml", "---\n- name: Task\n  ansible.builtin.command: id\n")
    write(project, TASKS, f"---\n{around}\n")
    (fault,) = faults(project)
    place = f"{TASKS}:{line}" if line else f"{ROLE}/tasks/other.yml:2"
    assert fault == f"{place} acts on `localhost`: a bake has only the image"


def test_a_role_may_be_sent_elsewhere(project: Path) -> None:
    write(project, TASKS, "---\n- name: Task\n  ansible.builtin.command: id\n")
    text = (project / LAYER).read_text()
    assert text.count("- role: site_banner") == 1
    write(
        project,
        LAYER,
        text.replace("- role: site_banner", "- role: site_banner\n      delegate_to: localhost"),
    )
    assert faults(project) == [f"{TASKS}:2 acts on `localhost`: a bake has only the image"]


def test_a_handler_counts_once_something_notifies_it(project: Path) -> None:
    write(project, f"{ROLE}/handlers/main.yml", f"---\n- name: Restart it\n  {ELSEWHERE[0]}\n")
    assert faults(project) == []
    write(project, TASKS, notifying("Restart it"))
    assert faults(project) == [f"{ROLE}/handlers/main.yml:2 acts on `localhost`: a bake has only the image"]


def test_a_refusal_without_conditions_holds_whatever_else_is_unknown(project: Path) -> None:
    unknown = "- name: Any\n  ansible.builtin.include_vars: '{{ ansible_facts.os_family }}.yml'\n"
    write(project, TASKS, f"---\n{unknown}- name: Task\n  {ELSEWHERE[0]}\n- name: Task\n  {ELSEWHERE[-1]}\n")
    assert [fault.split()[0] for fault in faults(project)] == [f"{TASKS}:4"]


@pytest.mark.parametrize(
    ("more", "extra", "lines_after"),
    [
        ("connection: local", {}, {1}),
        ("vars: {ansible_connection: local}", {}, {1}),
        ("vars_prompt:\n    - name: site_a\n    - {name: site_b, default: b}", {}, {2, 3}),
        ("vars_prompt:\n    - name: site_a\n    - {name: site_b, default: b}", {"site_a": "a"}, {3}),
    ],
)
def test_a_play_for_this_machine_or_a_person_is_refused(
    project: Path, more: str, extra: dict[str, str], lines_after: set[int]
) -> None:
    write(project, TASKS, "---\n- name: Task\n  ansible.builtin.command: id\n")
    text = (project / LAYER).read_text().rstrip("\n")
    write(project, LAYER, f"{text}\n  {more}\n")
    last = len(text.splitlines())
    assert {fault.split()[0] for fault in faults(project, **extra)} == {
        f"{LAYER}:{last + n}" for n in lines_after
    }
