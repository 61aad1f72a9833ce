"""A user's own layer: what Ansible reads for it is in its id, and what can't be known is reported."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from image_builder.bake.plan.model import Plan
from image_builder.definition import resolved_variables
from image_builder.verify.runner import definition_facts
from tests.unit.bake.plan.user_layer import EVERY_PLAY, MINE, changed, definition, edit, plan


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
def test_what_an_edit_runs(
    root: Path, unchanged: Plan, path: str, old: str, new: str, expected: set[str]
) -> None:
    edit(path, old, new)(root)
    # The facts for the suite contain no values of lookups.
    assert changed(unchanged, plan(root)) - {"verify"} == expected - {"verify"}


def test_without_an_edit_nothing_runs(root: Path, unchanged: Plan) -> None:
    assert unchanged.warnings == ()
    assert changed(unchanged, plan(root)) == set()


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
            "inventory/hosts.yml",
            "lookup('file', inventory_dir ~ '/ca.pem')",
            "lookup('file', '/proc/sys/kernel/random/uuid')",
            "/proc/sys/kernel/random/uuid: what it holds is known only while the play runs",
            id="a file of the kernel",
        ),
        pytest.param(
            "roles/mine/tasks/main.yml",
            "lookup('vars', 'site_' ~ 'name')",
            "lookup('ansible.builtin.url', 'https://a.example')",
            "roles/mine/tasks/main.yml:2: made by the lookup `ansible.builtin.url`, known only to a play",
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
            "inventory/hosts.yml",
            "lookup('file', inventory_dir ~ '/ca.pem')",
            "now().year",
            "mine_text: what `now()` gives is known only while the play runs",
            id="the time",
        ),
        pytest.param(
            "playbooks/layers/mine.yml",
            "  roles:\n",
            "  vars: {site_hash: \"{{ 'x' | password_hash }}\"}\n  roles:\n",
            "playbooks/layers/mine.yml:2: what `password_hash` gives is known only while the play runs",
            id="a salt, in the play",
        ),
        pytest.param(
            "roles/mine/meta/main.yml",
            "role: needed\n",
            'role: needed\n    vars: {needed_text: "{{ 9 | random }}"}\n',
            "roles/mine/meta/main.yml: what `random` gives is known only while the play runs",
            id="chance, in a role's dependency",
        ),
        pytest.param(
            "ansible.cfg",
            "[defaults]\n",
            "[defaults]\nansible_managed = {file} of {host}, %Y\n",
            "roles/mine/templates/managed.j2: what `ansible_managed` of ansible.cfg gives is known only while the "
            "play runs",
            id="a header with the machine's name",
        ),
        pytest.param(
            "roles/mine/meta/main.yml",
            "role: needed\n",
            "role: needed\n    vars: {needed_text: \"{{ '/etc/a' is exists }}\"}\n",
            "roles/mine/meta/main.yml: what `exists` finds on the machine that builds is known only while "
            "the play runs",
            id="a file of the machine that builds",
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
    edit(path, old, new)(root)
    first = plan(root)
    assert changed(first, plan(root)) == MINE
    assert [w.partition(": ")[0] for w in first.warnings] == ["stage mine runs in every build"]
    assert first.warnings[0].endswith(warning)
    assert not (root / "inventory/ran").exists(), "a plan runs no program"
    places = {name for stage in first.stages for name in stage.places}
    assert not any(name.startswith("/proc") for name in places), (
        "it would count as changed while a stage runs"
    )


@pytest.mark.parametrize(
    ("value", "name"), [("{{ now() }}", "`now()`"), ("{{ lookup('pipe', 'date') }}", "`pipe`")]
)
def test_neither_another_host_nor_the_command_line_brings_the_time(root: Path, value: str, name: str) -> None:
    given = plan(root, f'{{"site_name": "{value}"}}')
    assert "run" in {stage.name: stage.options for stage in given.stages}["mine"]
    assert given.warnings and all(name in warning for warning in given.warnings)
    other = f'    other: {{site_stamp: "{value}"}}\n'
    edit("inventory/hosts.yml", "  vars:\n", f"{other}  vars:\n")(root)
    assert plan(root).warnings == ()
    edit("roles/mine/templates/managed.j2", "ansible_managed", "hostvars.other.site_stamp")(root)
    assert [name in warning for warning in plan(root).warnings] == [True]


def test_where_repository_and_inventory_lie_does_not_matter(root: Path, tmp_path: Path) -> None:
    edit(
        "inventory/hosts.yml", "site_name: a", "mine_made: \"{{ inventory_dir ~ '/x' }}\"\n    site_name: a"
    )(root)
    other = tmp_path / "repository"
    shutil.copytree(root, other, symlinks=True)
    assert changed(plan(root), plan(other)) == {"verify"}, "it is told the path"


FACTS = {"build_id": "0" * 64, "packages": [], "preload": []}


def test_facts_hold_what_roles_and_the_builder_own_and_nothing_else(root: Path) -> None:
    more = "    ansible_become_password: hunter2\n    site_pipe: \"{{ lookup('pipe', 'id') }}\"\n"
    more += '    mine_made: "{{ mine_text | b64encode }}"\n'
    # Derived from a lookup, but the same whatever the lookup returns.
    more += "    mine_key: \"{{ 'a/key' if mine_text is defined else '' }}\"\n"
    edit("inventory/hosts.yml", '    mine_key: "{{ inventory_dir }}/key.asc"\n', "")(root)
    edit("inventory/hosts.yml", "    site_name: a\n", f"    site_name: a\n{more}")(root)
    (root / "inventory/ca.pem").write_text("s3cr3t\n")
    (root / "roles/mine/files/a").mkdir()
    (root / "roles/mine/files/a/key").touch()
    defined = definition(root)
    told = definition_facts(defined, **FACTS)["variables"]  # type: ignore[arg-type]
    assert isinstance(told, dict)
    assert {n for n in told if not n.startswith("image_")} == {"mine_included", "mine_key"}
    assert told["mine_key"] == "a/key"
    assert told["image_layers"] == ["first", "mine"]
    assert resolved_variables(defined)["mine_made"] == "czNjcjN0", "what a build itself needs"
    text = str(plan(root).as_json())
    assert "s3cr3t" not in text
    assert "czNjcjN0" not in text
    assert "hunter2" not in text
