"""A layer of a user's own: what Ansible reads for it is in its id, and what can't be known is said."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from image_builder.definition import ImageDefinition, load_inventory, resolved_variables
from image_builder.lock import Lock, LockedGroup, LockedPackage
from image_builder.plan.model import Plan
from image_builder.plan.resolve import resolve
from image_builder.stages.verify import definition_facts

REPO = Path(__file__).resolve().parents[2]
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
    "roles/mine/tasks/main.yml": """
- name: Task
  ansible.builtin.debug:
    msg: "{{ mine_text }} {{ mine_relative }} {{ site_template }} {{ lookup('vars', 'site_' ~ 'name') }}"
- name: Send a file
  ansible.builtin.copy:
    src: "{{ mine_key }}"
    dest: /etc/key.asc
    mode: "0644"
""",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A small repository with a user's layer and its inventory."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "tests/image").mkdir(parents=True)
    (tmp_path / "image_builder").symlink_to(REPO / "image_builder")
    return tmp_path


def _definition(root: Path) -> ImageDefinition:
    return load_inventory([root / "inventory/hosts.yml"], repo_root=root).define("worker")


def _plan(root: Path) -> Plan:
    groups = {
        name: LockedGroup(suite="trixie", components=["main"], requested=[], packages=list[LockedPackage]())
        for name in ("tools", "base", "first", "mine")
    }
    lock = Lock(image="worker", source_date_epoch=1, repositories={"debian": None}, groups=groups)
    return resolve(_definition(root), lock, root)


def _changed(before: Plan, after: Plan) -> set[str]:
    old = {s.name: s.id for s in before.stages}
    return {s.name for s in after.stages if s.id != old[s.name]}


def _edit(path: str, old: str, new: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        text = (root / path).read_text()
        assert old in text
        (root / path).write_text(text.replace(old, new))

    return change


@pytest.mark.parametrize(
    ("path", "old", "new", "expected"),
    [
        pytest.param("inventory/ca.pem", "old", "new", MINE, id="a file behind a lookup in the inventory"),
        pytest.param("roles/mine/files/relative.txt", "old", "new", MINE, id="a relative lookup"),
        pytest.param("inventory/motd.j2", "{{", "# {{", MINE, id="a template behind a lookup"),
        pytest.param("inventory/motd.txt", "old", "new", MINE, id="a file behind such a template's lookup"),
        pytest.param("inventory/key.asc", "old", "new", MINE, id="a file that a task sends"),
        pytest.param("playbooks/layers/site.yml", ": a", ": b", MINE, id="vars_files"),
        pytest.param(
            "playbooks/tasks/included.yml", "old", "new", MINE, id="tasks included by imported ones"
        ),
        pytest.param(
            "playbooks/tasks/inner.yml", "Again", "More", MINE, id="tasks imported by imported ones"
        ),
        pytest.param("playbooks/tasks/in_a_block.yml", "old", "new", MINE, id="an import in a block"),
        pytest.param("roles/included/tasks/main.yml", "Task", "New", MINE, id="include_role: its tasks"),
        pytest.param(
            "inventory/hosts.yml", "site_of_include: a", "site_of_include: b", MINE, id="its variable"
        ),
        pytest.param("roles/needed/tasks/main.yml", "old", "new", MINE, id="a role that a role depends on"),
        pytest.param(
            "playbooks/layers/templates/beside.j2", "old", "new", EVERY_PLAY, id="a template beside layers"
        ),
        pytest.param(
            "playbooks/layers/files/beside.txt", "old", "new", EVERY_PLAY, id="a file beside layers"
        ),
        pytest.param(
            "playbooks/layers/filter_plugins/beside.py", "1", "2", EVERY_PLAY, id="a plugin beside layers"
        ),
        pytest.param(
            "inventory/hosts.yml", "site_name: a", "site_name: b", MINE, id="a variable named at run time"
        ),
        pytest.param(
            "ansible.cfg", "roles\n", "roles\nansible_managed = mine\n", EVERY_PLAY, id="ansible.cfg"
        ),
    ],
)
def test_what_an_edit_runs(root: Path, path: str, old: str, new: str, expected: set[str]) -> None:
    before = _plan(root)
    assert before.warnings == ()
    assert _changed(before, _plan(root)) == set()
    _edit(path, old, new)(root)
    # What the suite is told holds no value of a lookup.
    assert _changed(before, _plan(root)) - {"verify"} == expected - {"verify"}


@pytest.mark.parametrize(
    ("path", "old", "new", "warning"),
    [
        pytest.param(
            "inventory/hosts.yml",
            "lookup('file', inventory_dir ~ '/ca.pem')",
            "lookup('env', 'MINE')",
            "mine_text: made by the lookup `env`, known only to a play",
            id="env",
        ),
        pytest.param(
            "inventory/hosts.yml",
            "lookup('file', inventory_dir ~ '/ca.pem')",
            "lookup('pipe', 'touch ' ~ inventory_dir ~ '/ran') | default('x')",
            "mine_text: made by the lookup `pipe`, known only to a play",
            id="pipe",
        ),
        pytest.param(
            "roles/mine/tasks/main.yml",
            "lookup('vars', 'site_' ~ 'name')",
            "lookup('ansible.builtin.url', 'https://a.example')",
            "roles/mine/tasks/main.yml: made by the lookup `ansible.builtin.url`, known only to a play",
            id="url, in a task",
        ),
        pytest.param(
            "roles/needed/tasks/main.yml",
            "- name: Task\n",
            "- name: Task\n  with_lines: [id]\n",
            "roles/needed/tasks/main.yml:1: what `with_lines` gives is known only while a play runs",
            id="with_lines",
        ),
        pytest.param(
            "roles/mine/tasks/main.yml",
            "- name: Send a file\n",
            "- name: Send a file\n  delegate_to: localhost\n",
            "a task on the machine that builds reads what it likes",
            id="a task elsewhere",
        ),
        pytest.param(
            "playbooks/layers/mine.yml",
            "{{ mine_included }}",
            "{{ ansible_facts.kernel }}",
            "the role `{{ ansible_facts.kernel }}` is named only while the play runs",
            id="a role that a fact names",
        ),
    ],
)
def test_what_only_the_play_knows_runs_its_layer_in_every_build(
    root: Path, path: str, old: str, new: str, warning: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    _edit(path, old, new)(root)
    plan = _plan(root)
    assert _changed(plan, _plan(root)) == MINE
    assert [w.partition(": ")[0] for w in plan.warnings] == ["stage mine runs in every build"]
    assert plan.warnings[0].endswith(warning)
    assert not (root / "inventory/ran").exists(), "a plan runs no program"


def test_where_repository_and_inventory_lie_does_not_matter(
    root: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    _edit(
        "inventory/hosts.yml", "site_name: a", "mine_made: \"{{ inventory_dir ~ '/x' }}\"\n    site_name: a"
    )(root)
    other = tmp_path_factory.mktemp("elsewhere") / "repository"
    shutil.copytree(root, other, symlinks=True)
    assert _changed(_plan(root), _plan(other)) == {"verify"}, "it is told the path"


FACTS = {"build_id": "0" * 64, "packages": [], "preload": []}


def test_facts_hold_what_roles_and_the_builder_own_and_nothing_else(root: Path) -> None:
    more = "    ansible_become_password: hunter2\n    site_pipe: \"{{ lookup('pipe', 'id') }}\"\n"
    more += '    mine_made: "{{ mine_text | b64encode }}"\n'
    # Made from what is looked up, and the same with any other answer.
    more += "    mine_key: \"{{ 'a/key' if mine_text is defined else '' }}\"\n"
    _edit("inventory/hosts.yml", '    mine_key: "{{ inventory_dir }}/key.asc"\n', "")(root)
    _edit("inventory/hosts.yml", "    site_name: a\n", f"    site_name: a\n{more}")(root)
    (root / "inventory/ca.pem").write_text("s3cr3t\n")
    definition = _definition(root)
    told = definition_facts(definition, **FACTS)["variables"]  # type: ignore[arg-type]
    assert isinstance(told, dict)
    assert {n for n in told if not n.startswith("image_")} == {"mine_included", "mine_key"}
    assert told["mine_key"] == "a/key"
    assert told["image_layers"] == ["first", "mine"]
    assert resolved_variables(definition)["mine_made"] == "czNjcjN0", "what a build itself needs"
    plan = str(_plan(root).as_json())
    assert "s3cr3t" not in plan
    assert "czNjcjN0" not in plan
    assert "hunter2" not in plan
