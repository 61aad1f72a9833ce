"""A small repository with a user's own layer, and the plans of its image."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from image_builder.bake.lock.model import Lock, LockedGroup, LockedPackage
from image_builder.bake.plan.model import Plan
from image_builder.bake.plan.resolve import resolve
from image_builder.cli.command import extensions
from image_builder.definition import ImageDefinition, load_inventory
from tests.unit.bake.plan.tree import Tree

REPO = Path(__file__).resolve().parents[4]
MINE = {"mine", "seal", "verify", "disk", "convert"}
# ansible.cfg is read by every play.
EVERY_PLAY = {"first", *MINE}

PLAYBOOK = """
- name: Layer mine
  hosts: images
  gather_facts: false
  vars_files: [site.yml]
  pre_tasks:
    - name: A block
      block:
        - name: Import in a block
          ansible.builtin.import_tasks: ../tasks/in_a_block.yml
    - name: Import
      ansible.builtin.import_tasks: ../tasks/outer.yml
    - name: Include a role
      ansible.builtin.include_role:
        name: "{{ mine_included }}"
  roles:
    - role: mine
"""
INVENTORY = """
images:
  hosts:
    worker:
  vars:
    image_base: {suite: trixie}
    image_layers: [first, mine]
    mine_included: included
    mine_text: "{{ lookup('file', inventory_dir ~ '/ca.pem') }}"
    mine_relative: "{{ lookup('ansible.builtin.file', 'relative.txt') }}"
    mine_key: "{{ inventory_dir }}/key.asc"
    site_name: a
    site_of_include: a
    site_template: "{{ query('template', inventory_dir ~ '/motd.j2') | first }}"
"""
FILES = {
    "ansible.cfg": "[defaults]\nroles_path = roles\n",
    "inventory/hosts.yml": INVENTORY,
    "inventory/ca.pem": "old\n",
    "inventory/key.asc": "old\n",
    "inventory/motd.j2": "{{ lookup('file', inventory_dir ~ '/motd.txt') }}\n",
    "inventory/motd.txt": "old\n",
    "playbooks/layers/mine.yml": PLAYBOOK,
    "playbooks/layers/first.yml": "- name: First\n  hosts: images\n  roles: [first]\n",
    "playbooks/layers/site.yml": "mine_from_site: a\n",
    "playbooks/layers/templates/beside.j2": "old\n",
    "playbooks/layers/files/beside.txt": "old\n",
    "playbooks/layers/filter_plugins/beside.py": "old = 1\n",
    "playbooks/tasks/in_a_block.yml": "- name: Task\n  ansible.builtin.debug:\n    msg: old\n",
    "playbooks/tasks/outer.yml": "- name: Nested\n  ansible.builtin.import_tasks: inner.yml\n",
    "playbooks/tasks/inner.yml": "- name: Again\n  ansible.builtin.include_tasks: included.yml\n",
    "playbooks/tasks/included.yml": "- name: Task\n  ansible.builtin.debug:\n    msg: old\n",
    "playbooks/seal.yml": "- name: Seal\n  hosts: images\n  roles: [image_seal]\n",
    "roles/first/tasks/main.yml": "- name: Task\n  ansible.builtin.debug:\n    msg: hello\n",
    "roles/image_seal/tasks/main.yml": "- name: Task\n  ansible.builtin.debug:\n    msg: hello\n",
    "roles/included/tasks/main.yml": "- name: Task\n  ansible.builtin.debug:\n    msg: '{{ site_of_include }}'\n",
    "roles/needed/tasks/main.yml": "- name: Task\n  ansible.builtin.debug:\n    msg: old\n",
    "roles/mine/meta/main.yml": "dependencies:\n  - role: needed\n",
    "roles/mine/meta/argument_specs.yml": (
        "argument_specs: {main: {options: {mine_text: {type: str}, mine_included: {type: str}, "
        "mine_relative: {type: str}, mine_key: {type: path}, mine_made: {type: str}}}}\n"
    ),
    "roles/mine/files/relative.txt": "old\n",
    "roles/mine/templates/managed.j2": "# {{ ansible_managed }}\n",
    "roles/mine/tasks/main.yml": """
- name: Task
  ansible.builtin.debug:
    msg: "{{ mine_text }} {{ mine_relative }} {{ site_template }} {{ lookup('vars', 'site_' ~ 'name') }}"
- name: Send a file
  ansible.builtin.copy:
    src: "{{ mine_key }}"
    dest: /etc/key.asc
    mode: "0644"
- name: Send a template
  ansible.builtin.template:
    src: managed.j2
    dest: /etc/managed
    mode: "0644"
""",
}


def make(folder: Path) -> Tree:
    """Write a small repository with a user's layer and its inventory."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "image_builder").symlink_to(REPO / "image_builder")
    return Tree(folder)


def definition(root: Path, *extra: str) -> ImageDefinition:
    return load_inventory([root / "inventory/hosts.yml"], repo_root=root, extra=extra).define("worker")


def plan(root: Path, *extra: str) -> Plan:
    groups = {
        name: LockedGroup(suite="trixie", components=["main"], requested=[], packages=list[LockedPackage]())
        for name in ("tools", "base", "first", "mine")
    }
    lock = Lock(image="worker", source_date_epoch=1, repositories={"debian": None}, groups=groups)
    return resolve(definition(root, *extra), lock, root, extensions())


def changed(before: Plan, after: Plan) -> set[str]:
    old = {s.name: s.id for s in before.stages}
    return {s.name for s in after.stages if s.id != old[s.name]}


def edit(path: str, old: str, new: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        text = (root / path).read_text()
        assert old in text
        (root / path).write_text(text.replace(old, new))

    return change
