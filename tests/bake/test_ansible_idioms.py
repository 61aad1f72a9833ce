"""A user's repository means the same to a plan as to Ansible, idiom by idiom.

Each idiom is a variable of a role. Three programs report its resulting value, each started as a user would start it:
the plan, ``ansible-playbook`` with the same inventories and options, and the play of a bake.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from image_builder.settings import REPO_ROOT

pytestmark = pytest.mark.root

# The contents of the repository, by file. `first` and `second` are two inventories of one command line.
FILES = {
    "ansible.cfg": """
[defaults]
roles_path = roles:shared
collections_path = collections
inject_facts_as_vars = false
""",
    "first/hosts.yml": """
images:
  hosts:
    node:
      idioms_host: host
    node.example:
  children:
    low: {hosts: {node: }, vars: {ansible_group_priority: 1}}
    high: {hosts: {node: }, vars: {ansible_group_priority: 10}}
    outer: {children: {inner: {hosts: {node: }}}}
  vars:
    image_base: {suite: trixie}
    image_layers: [idioms]
    idioms_of_inventory: inventory
    site_name: a name
    site_which: name
""",
    "first/hosts_constructed.yml": """
plugin: ansible.builtin.constructed
strict: true
compose: {idioms_composed: "site_name | upper"}
groups: {built: "site_name == 'a name'"}
""",
    "first/group_vars/all.yml": "idioms_group: all\nidioms_deep: {a: 1, b: 1}\n",
    "first/group_vars/images/one.yml": "idioms_file: one\nidioms_deep: {b: 2}\n",
    "first/group_vars/images/two.yml": "idioms_file: two\n",
    "first/group_vars/images/nested/three.yml": "idioms_nested: three\n",
    "first/group_vars/outer.yml": "idioms_depth: outer\n",
    "first/group_vars/inner": "idioms_depth: inner\n",
    "first/group_vars/high.yml": "idioms_priority: high\nansible_group_priority: 0\n",
    "first/group_vars/low.yml": "idioms_priority: low\n",
    "first/group_vars/built.yml": "idioms_built: built\n",
    "first/host_vars/node/main.yml": """
idioms_host_directory: from host_vars
idioms_key: "{{ inventory_dir }}/keys/site.asc"
idioms_date: 2026-01-31
idioms_number: 0x1f
idioms_truth: yes
idioms_quoted: "yes"
idioms_null:
idioms_keys: "{{ {site_name: 1} }}"
idioms_native: "{{ [1, 2.5, true, none] }}"
idioms_text_of_number: "{{ '7' }}"
idioms_branch: "{{ 'known' if true else nobody_set_this }}"
idioms_raw: !unsafe "{{ not a template }}"
idioms_omit: "{{ nobody_set_this | default(omit) is defined }}"
""",
    "second/hosts.ini": """
[images]
node idioms_ini=17 idioms_ini_text="a b"
[images:vars]
idioms_of_inventory=second
idioms_ini_group={'a': [1, 2]}
""",
    "playbooks/layers/group_vars/all.yml": "idioms_beside: beside the playbook\n",
    "playbooks/layers/host_vars/node.yml": "idioms_beside_host: beside the playbook\n",
    "playbooks/layers/files/beside.txt": "beside the playbook",
    "playbooks/layers/vars.yml": "idioms_vars_file: from a file\n",
    "playbooks/layers/idioms.yml": """
- name: Layer idioms
  hosts: images
  gather_facts: false
  vars: {idioms_play: play}
  vars_files: [vars.yml]
  roles:
    - role: beside
    - role: idioms
      vars: {idioms_handed: "handed to {{ inventory_hostname }}"}
      idioms_parameter: beside the keywords
""",
    "roles/idioms/files/own.txt": "the role's own",
    "roles/idioms/templates/own.j2": "{{ site_name }} of {{ role_name }}",
    "roles/idioms/meta/main.yml": "dependencies: [{role: needed, vars: {needed_handed: handed}}, site.own.base]\n",
    "roles/idioms/vars/main.yml": "idioms_constant: constant\n",
    "playbooks/layers/roles/beside/defaults/main.json": '{"beside_default": "a role beside the layers"}',
    "roles/idioms/filter_plugins/whisper.py": """
class FilterModule:
    def filters(self):
        return {"whisper": lambda text: text.lower() + "..."}
""",
    "roles/idioms/defaults/main.yml": r"""
idioms_default: default
idioms_group: default
idioms_handed: default
idioms_play: default
idioms_parameter: default
idioms_filter: "{{ 'X' | whisper }}"
idioms_constant: default
idioms_inventory_dir: "{{ inventory_dir }}"
idioms_inventory_file: "{{ inventory_file }}"
idioms_playbook_dir: "{{ playbook_dir }}"
idioms_role: "{{ role_name }} {{ role_path }}"
idioms_hostname: "{{ inventory_hostname }} {{ inventory_hostname_short }}"
idioms_groups: "{{ groups['images'] + (groups | list | sort) }}"
idioms_group_names: "{{ group_names }}"
idioms_hostvars: "{{ hostvars['node']['site_name'] ~ hostvars[inventory_hostname].idioms_host_directory }}"
idioms_vars: "{{ vars['site_name'] ~ vars['site_' ~ site_which] }}"
idioms_lookup_vars: "{{ lookup('vars', 'site_' ~ site_which) }}"
idioms_varnames: "{{ query('varnames', '^site_') | sort }}"
idioms_version: "{{ ansible_version.full }} {{ ansible_version.major }} {{ ansible_version.string }}"
idioms_config: "{{ lookup('config', 'INJECT_FACTS_AS_VARS') }}"
idioms_file_of_role: "{{ lookup('file', 'own.txt') }}"
idioms_file_of_playbook: "{{ lookup('file', 'beside.txt') }}"
idioms_template: "{{ lookup('template', 'own.j2') }}"
idioms_fileglob: "{{ query('fileglob', '*.txt') | map('basename') | sort }}"
idioms_first: "{{ lookup('first_found', ['nothing.txt', role_path ~ '/files/own.txt']) | basename }}"
idioms_needed: "{{ needed_default }} {{ needed_handed }}"
idioms_collection: "{{ 'x' | site.own.shout }} {{ base_default }} {{ ground_default }}"
idioms_vaulted: "{{ site_first | default('') }} {{ site_second | default('') }} {{ site_third | default('') }}"
""",
    "playbooks/layers/roles/beside/tasks/main.yml": "[]\n",
    "playbooks/layers/roles/beside/meta/argument_specs.yml": """
argument_specs: {main: {options: {beside_default: {type: str}}}}
""",
    "shared/needed/defaults/main.yml": "needed_default: of the role that it needs\nneeded_handed: default\n",
    "shared/needed/tasks/main.yml": "[]\n",
    "shared/needed/meta/argument_specs.yml": """
argument_specs: {main: {options: {needed_default: {type: str}, needed_handed: {type: str}}}}
""",
    "collections/ansible_collections/site/own/galaxy.yml": "namespace: site\nname: own\nversion: 1.0.0\n",
    "collections/ansible_collections/site/own/plugins/filter/shout.py": """
class FilterModule:
    def filters(self):
        return {"shout": lambda text: text.upper() + "!"}
""",
    "collections/ansible_collections/site/own/roles/base/meta/main.yml": "dependencies: [{role: ground}]\n",
    "collections/ansible_collections/site/own/roles/base/defaults/main.yml": "base_default: of a collection\n",
    "collections/ansible_collections/site/own/roles/ground/defaults/main.yml": "ground_default: below it\n",
}
EXTRA = ("idioms_extra=words site_extra=more", '{"idioms_extra_json": {"a": [1, true]}}')
PLAY = """
- name: Show what this role sees
  ansible.builtin.debug:
    msg: "seen {{ %s | to_json | b64encode }} seen"
"""
# The values in the plan and in the bake's play, for the repository in the working directory.
OURS = """
import json, sys
from pathlib import Path
from types import SimpleNamespace
from image_builder.settings import Settings, VaultId, project_root
from image_builder.definition import load_inventory
from image_builder.definition.evaluate import evaluated_layer
from image_builder.bake.stages.layer import run

inventories, vault, extra, work = json.loads(sys.argv[1])
vault = tuple(map(VaultId.parse, vault))
inventory = load_inventory([Path(i) for i in inventories], vault, project=project_root(), extra=extra)
definition = inventory.define("node")
*_, role = evaluated_layer(definition, "idioms")
context = SimpleNamespace(
    definition=definition,
    plan=SimpleNamespace(options={"source_date_epoch": 0}),
    settings=Settings(vault=vault),
    work=Path(work),
    log=Path(work, "log"),
    doing=lambda _: None,
    shell=None,
)
run.play(context, SimpleNamespace(path=Path(work), environment={}), role.layer.playbook)
print(json.dumps([dict(role.values), {**role.failures, **role.unpredictable}]))
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Make a repository with every idiom, in a directory whose name needs quoting."""
    place = tmp_path / "images of the büro"
    for name, text in FILES.items():
        file = place / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.lstrip("\n"))
    names = set(re.findall(r"\bidioms_\w+", "\n".join([*FILES.values(), *EXTRA])))
    options = {name: {"type": "raw", "description": "an idiom"} for name in sorted(names)}
    specs = {"argument_specs": {"main": {"short_description": "idioms", "options": options}}}
    (place / "roles/idioms/meta/argument_specs.yml").write_text(json.dumps(specs))
    (place / "roles/idioms/tasks").mkdir()
    show = "{" + ", ".join(f"'{name}': {name}" for name in sorted(names)) + "}"
    (place / "roles/idioms/tasks/main.yml").write_text(PLAY % show)
    return place


def environment(**more: str) -> dict[str, str]:
    return {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "LC_ALL": "C.UTF-8", **more}


def succeed(argv: list[str], place: Path, **more: str) -> str:
    done = subprocess.run(argv, cwd=place, env=environment(**more), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def seen_by(output: str) -> dict[str, object]:
    """Return the values that a play's debug task shows."""
    text = re.sub(r"\s", "", output)
    (encoded,) = set(re.findall(r"seen([A-Za-z0-9+/=]+)seen", text))
    values: dict[str, object] = json.loads(base64.b64decode(encoded))
    return values


def compared(
    place: Path, work: Path, *, vault: tuple[str, ...] = (), **more: str
) -> tuple[dict[str, object], dict[str, object], dict[str, object]]:
    """Return the values seen by ``ansible-playbook``, by the plan, and by the play of a bake."""
    inventories = ["first", "second"]
    arguments = [word for inventory in inventories for word in ("-i", inventory)]
    arguments += [word for text in EXTRA for word in ("-e", text)]
    arguments += [word for text in vault for word in ("--vault-id", text)]
    playbook = ["ansible-playbook", "playbooks/layers/idioms.yml", "--limit", "node", *arguments]
    ansible = seen_by(succeed(playbook, place, HOME=os.fspath(work)))
    work = work / "bake"
    work.mkdir(parents=True)
    parameters = json.dumps([inventories, vault, EXTRA, os.fspath(work)])
    ours = succeed([sys.executable, "-c", OURS, parameters], place, PYTHONPATH=os.fspath(REPO_ROOT), **more)
    values, failures = json.loads(ours)
    assert failures == {}
    return ansible, values, seen_by((work / "log").read_text())


def test_every_idiom_is_what_ansible_makes_of_it(repository: Path, tmp_path: Path) -> None:
    ansible, plan, bake = compared(repository, tmp_path)
    assert len(ansible) > 50
    own = {name: plan[name] for name in ansible}
    assert own == ansible
    assert bake == ansible


def test_settings_of_the_repository_count_and_those_of_the_caller_do_not(
    repository: Path, tmp_path: Path
) -> None:
    replaced, plan, bake = compared(repository, tmp_path / "caller", ANSIBLE_HASH_BEHAVIOUR="merge")
    assert plan["idioms_deep"] == bake["idioms_deep"] == replaced["idioms_deep"] == {"b": 2}
    with (repository / "ansible.cfg").open("a") as stream:
        stream.write("hash_behaviour = merge\n")
    merged, plan, bake = compared(repository, tmp_path / "repository")
    assert plan["idioms_deep"] == bake["idioms_deep"] == merged["idioms_deep"] == {"a": 1, "b": 2}


def test_vaulted_values_of_two_ids_reach_plays_and_no_plan(repository: Path, tmp_path: Path) -> None:
    ids = tuple(f"{label}@{tmp_path / label}" for label in ("first", "second"))
    for label in ("first", "second"):
        (tmp_path / label).write_text(f"password of {label}")
    vaulted = ["ansible-vault", "encrypt_string", "--vault-id", ids[0], "hunter1", "--name", "site_first"]
    (repository / "first/host_vars/node/secret.yml").write_text(succeed(vaulted, repository))
    secret = repository / "first/group_vars/images/secret.yml"
    secret.write_text("site_second: hunter2\n")
    succeed(["ansible-vault", "encrypt", "--vault-id", ids[1], os.fspath(secret)], repository)
    files = [repository / file for file in ("playbooks/layers/vars.yml", "roles/idioms/vars/main.yml")]
    files[0].write_text(files[0].read_text() + "site_third: hunter3\n")
    succeed(["ansible-vault", "encrypt", "--vault-id", ids[0], *map(os.fspath, files)], repository)
    ansible, plan, bake = compared(repository, tmp_path / "work", vault=ids)
    assert ansible == bake
    assert ansible["idioms_vaulted"] == "hunter1 hunter2 hunter3" and ansible["idioms_constant"] == "constant"
    assert plan.keys().isdisjoint({"idioms_vaulted", "idioms_vars_file", "idioms_constant"})
    assert "hunter" not in json.dumps(plan)
