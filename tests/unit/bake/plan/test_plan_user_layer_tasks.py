"""Inputs that a user's tasks read outside their layer: an edit reruns it, and what can't be known is reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import indent

import pytest
from ansible.parsing.vault import VaultLib, VaultSecret

from tests.unit.bake.plan.user_layer import EVERY_PLAY, MINE, changed, edit, plan

ROLE = "roles/needed/tasks/main.yml"
PLAY = "playbooks/tasks/included.yml"
CERTS = "inventory/certs/a.pem"
INVENTORY = """
    site_certs: ["{{ inventory_dir }}/certs/a.pem", "{{ inventory_dir }}/key.asc"]
    site_pairs: [{src: "{{ inventory_dir }}/certs/a.pem", dest: /etc/a.pem}]
    site_file: "{{ inventory_dir }}/certs/a.pem"
    site_vars: "{{ inventory_dir }}/more"
    site_composed: "{{ vars['site_' ~ 'other'] }}"
    site_motd: "{{ inventory_dir }}/site.j2"
    site_name: a
"""
FILES = {
    CERTS: "old\n",
    "inventory/certs/README.md": "old\n",
    "inventory/more/a.yml": "mine_more: old\n",
    "inventory/site.j2": "{% include 'part.j2' %}\n",
    "inventory/any.j2": "{% include site_name %}\n",
    "inventory/asks.j2": "{{ '/etc/*.conf' | fileglob }}\n",
    "inventory/part.j2": "{{ lookup('file', inventory_dir ~ '/certs/a.pem') }}\n",
    "roles/mine/files/looks.conf": "{{ lookup('file', site_file) }}\n",
    "roles/first/vars/main.yml": '__first_src: "{{ site_file }}"\n',
    "shared/site.txt": "old\n",
}


def _with_task(root: Path, place: str, task: str, more: Mapping[str, str] | None = None) -> None:
    """Give the layer a task, in its role or its playbook, and the files that it needs."""
    for name, text in {**FILES, **(more or {})}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    edit("inventory/hosts.yml", "    site_name: a\n", INVENTORY.lstrip("\n"))(root)
    _add(root, place, task)


def _add(root: Path, place: str, task: str) -> None:
    lines = "".join(f"  {line}\n" for line in task.strip("\n").splitlines())
    with (root / place).open("a") as tasks:
        tasks.write(f"- name: Added\n{lines}")


def _new(path: str) -> Callable[[Path], None]:
    def write(root: Path) -> None:
        (root / path).write_text("new\n")

    return write


SENT = [
    pytest.param(
        """
copy: {src: "{{ item }}", dest: /etc/}
loop: "{{ site_certs }}"
""",
        CERTS,
        id="copy of a loop's item",
    ),
    pytest.param(
        """
copy: {src: "{{ item.src }}", dest: "{{ item.dest }}"}
loop: "{{ site_pairs }}"
""",
        CERTS,
        id="copy of a part of a loop's item",
    ),
    pytest.param(
        """
copy: {src: "{{ cert }}", dest: /etc/}
loop: "{{ site_certs }}"
loop_control: {loop_var: cert}
""",
        CERTS,
        id="copy of a loop's own variable",
    ),
    pytest.param(
        """
copy: {src: "{{ item }}", dest: /etc/}
with_items: "{{ site_certs }}"
""",
        CERTS,
        id="with_items",
    ),
    pytest.param(
        """
copy: {content: "{{ lookup('file', item) }}", dest: "/etc/{{ item | basename }}"}
loop: "{{ site_certs }}"
""",
        CERTS,
        id="a lookup of a loop's item",
    ),
    pytest.param(
        """
copy: {src: "{{ item }}", dest: /etc/}
with_fileglob: "{{ inventory_dir }}/certs/*.pem"
""",
        CERTS,
        id="with_fileglob",
    ),
    pytest.param(
        """
copy: {src: "{{ item }}", dest: /etc/}
with_fileglob: "{{ inventory_dir }}/certs/*.pem"
""",
        _new("inventory/certs/b.pem"),
        id="with_fileglob, a file more",
    ),
    pytest.param(
        """
copy: {src: "{{ item }}", dest: /etc/}
with_first_found: ["{{ inventory_dir }}/certs/none.pem", "{{ inventory_dir }}/certs/a.pem"]
""",
        CERTS,
        id="with_first_found",
    ),
    pytest.param("""include_vars: "{{ site_vars }}/a.yml" """, "inventory/more/a.yml", id="include_vars"),
    pytest.param(
        """include_vars: {dir: "{{ site_vars }}"}""",
        "inventory/more/a.yml",
        id="include_vars of a directory",
    ),
    pytest.param(
        """
vars: {found: "{{ site_vars }}"}
include_vars: {dir: "{{ found }}"}
""",
        _new("inventory/more/b.yml"),
        id="include_vars of a directory, a file more",
    ),
    pytest.param(
        """copy: {src: "{{ inventory_dir }}/certs", dest: /etc/}""", CERTS, id="copy of a directory"
    ),
    pytest.param(
        """copy: {src: "{{ inventory_dir }}/certs/", dest: /etc/}""",
        "inventory/certs/README.md",
        id="copy of a directory, a note in it",
    ),
    pytest.param(
        """copy: {src: "{{ inventory_dir }}/certs", dest: /etc/}""",
        _new("inventory/certs/b.pem"),
        id="copy of a directory, a file more",
    ),
    pytest.param(
        """assemble: {src: "{{ inventory_dir }}/certs", dest: /etc/a, remote_src: false}""",
        CERTS,
        id="assemble",
    ),
    pytest.param(
        """template: {src: "{{ site_motd }}", dest: /etc/a}""",
        edit("inventory/part.j2", "{{", "# {{"),
        id="what a template includes",
    ),
    pytest.param(
        """template: {src: "{{ site_motd }}", dest: /etc/a}""",
        CERTS,
        id="what a template that another one includes looks up",
    ),
    pytest.param(
        """copy: {content: "{{ lookup('template', site_motd) }}", dest: /etc/a}""",
        edit("inventory/part.j2", "{{", "# {{"),
        id="what a template behind a lookup includes",
    ),
    pytest.param(
        """template: {src: ../../../roles/mine/files/looks.conf, dest: /etc/a}""",
        CERTS,
        id="a template in files that looks up",
    ),
    pytest.param("""copy: src={{ site_file }} dest=/etc/a""", CERTS, id="arguments in one line"),
    pytest.param("""script: "{{ site_file }} --quiet" """, CERTS, id="script"),
    pytest.param("""script: {cmd: "{{ site_file }} --quiet"}""", CERTS, id="script, its command"),
    pytest.param(
        """copy: {src: files/../../../shared/site.txt, dest: /etc/a}""", "shared/site.txt", id="files/.."
    ),
    pytest.param(
        """
vars: {source: "{{ site_file }}"}
copy: {src: "{{ source }}", dest: /etc/a}
when: site_pairs | length > 0
""",
        CERTS,
        id="a variable of the task, with a condition",
    ),
    pytest.param(
        """
copy: {dest: /etc/a}
module_defaults: {copy: {src: "{{ site_file }}"}}
""",
        CERTS,
        id="module_defaults",
    ),
    pytest.param(
        """
copy: "{{ sent }}"
vars: {sent: {src: "{{ site_file }}", dest: /etc/a}}
""",
        CERTS,
        id="all arguments in one variable",
    ),
]


@pytest.mark.parametrize("place", [ROLE, PLAY])
@pytest.mark.parametrize(("task", "change"), SENT)
def test_what_a_task_sends_runs_its_layer(
    root: Path, place: str, task: str, change: str | Callable[[Path], None]
) -> None:
    _with_task(root, place, task)
    before = plan(root)
    assert before.warnings == ()
    (_new(change) if isinstance(change, str) else change)(root)
    assert changed(before, plan(root)) - {"verify"} == MINE - {"verify"}


@pytest.mark.parametrize("place", [ROLE, PLAY])
def test_what_tasks_send_is_the_same_in_each_plan(root: Path, place: str) -> None:
    _with_task(root, place, "debug: {msg: hello}")
    for case in SENT:
        _add(root, place, str(case.values[0]))
    before = plan(root)
    assert before.warnings == ()
    assert changed(before, plan(root)) == set()


@pytest.mark.parametrize(
    ("task", "change"),
    [
        pytest.param('copy: {src: "{{ __first_src }}", dest: /etc/a}', CERTS, id="copy"),
        pytest.param('script: "{{ __first_src }}"', CERTS, id="script"),
        pytest.param("copy: src={{ site_file }} dest=/etc/a", CERTS, id="arguments in one line"),
        pytest.param(
            "copy: {src: files/../../../shared/site.txt, dest: /etc/a}", "shared/site.txt", id="files/.."
        ),
        pytest.param(
            "copy: {content: \"{{ lookup('file', __first_src) }}\", dest: /etc/a}", CERTS, id="a lookup"
        ),
    ],
)
def test_a_role_that_nothing_says_it_of_may_lead_out_of_its_files(root: Path, task: str, change: str) -> None:
    (root / "roles/first/files").mkdir()
    _with_task(root, "roles/first/tasks/main.yml", task)
    before = plan(root)
    assert before.warnings == ()
    _new(change)(root)
    assert changed(before, plan(root)) - {"verify"} == EVERY_PLAY - {"verify"}


ANSWER = "finds on the machine that builds is known only while the play runs"


def test_a_roles_notes_count_once_a_task_sends_them(root: Path) -> None:
    notes = "roles/needed/templates/README.md"
    _with_task(root, ROLE, "template: {src: README.md, dest: /etc/a}", {notes: "old\n"})
    before = plan(root)
    _new(notes)(root)
    assert changed(before, plan(root)) - {"verify"} == MINE - {"verify"}


FACT = "{{ ansible_facts.kernel }}"
GIVES = "gives is known only while the play runs"


@pytest.mark.parametrize("place", [ROLE, PLAY])
@pytest.mark.parametrize(
    ("task", "warning"),
    [
        pytest.param(
            f"""copy: {{src: "{FACT}", dest: /etc/a}}""",
            f"the file `{FACT}` is named only while the play runs",
            id="a fact",
        ),
        pytest.param(
            """copy: {src: "{{ ansible_facts.kernel | default('a') }}", dest: /etc/a}""",
            "the file `{{ ansible_facts.kernel | default('a') }}` is named only while the play runs",
            id="a fact that has a default",
        ),
        pytest.param(
            """copy: {src: "{{ hostvars['worker'].site | default('a') }}", dest: /etc/a}""",
            "the file `{{ hostvars['worker'].site | default('a') }}` is named only while the play runs",
            id="what another host has",
        ),
        pytest.param(
            """
include_tasks: outer.yml
when: lookup('env', 'SITE') == 'a'
""",
            "made by the lookup `env`, known only to a play",
            id="a condition of an include",
        ),
        pytest.param(
            f"""
copy: {{src: "{{{{ item }}}}", dest: /etc/a}}
loop: "{FACT}"
""",
            "the file `{{ item }}` is named only while the play runs",
            id="a loop over a fact",
        ),
        pytest.param(
            """
copy: {src: "{{ site_file }}", dest: /etc/a}
vars: {site_file: "{{ lookup('pipe', 'id') }}"}
""",
            "the file `{{ site_file }}` is named only while the play runs",
            id="a lookup that is not run",
        ),
        pytest.param(
            """copy: {content: "{{ lookup('file', ansible_facts.kernel) }}", dest: /etc/a}""",
            "what `lookup('file', ansible_facts.kernel)` reads is known only while the play runs",
            id="a lookup of a fact",
        ),
        pytest.param(
            """copy: {content: "{{ lookup('file', '/proc/sys/kernel/random/uuid') }}", dest: /etc/a}""",
            "what it holds is known only while the play runs",
            id="a file of the kernel",
        ),
        pytest.param(
            f"""include_vars: "{FACT}.yml" """,
            f"the file `{FACT}.yml` is named only while the play runs",
            id="include_vars",
        ),
        pytest.param(
            f"""include_tasks: "{FACT}.yml" """,
            f"the tasks `{FACT}.yml` are named only while the play runs",
            id="include_tasks",
        ),
        pytest.param(
            """
copy: "{{ ansible_facts.sent }}"
""",
            "the arguments `{{ ansible_facts.sent }}` are known only while the play runs",
            id="all arguments",
        ),
        pytest.param(
            f"""action: "{{{{ 'copy' }}}} src={FACT}" """,
            "the module `{{ 'copy' }}` is named only while the play runs",
            id="a module that a template names",
        ),
        pytest.param(
            """set_fact: {"{{ site_name }}": a}""",
            "which variables it sets is known only while the play runs",
            id="set_fact of any name",
        ),
        pytest.param(
            """template: {src: "{{ inventory_dir }}/any.j2", dest: /etc/a}""",
            "what `any.j2` includes is known only while the play runs",
            id="include of any name",
        ),
        pytest.param(
            """
command: id
when: site_file is not exists
""",
            f"what `exists` {ANSWER}",
            id="a condition on a file of the machine that builds",
        ),
        pytest.param(
            """copy: {content: "{{ [site_file] | select('file') | list }}", dest: /etc/a}""",
            f"what `file` {ANSWER}",
            id="a choice of its files",
        ),
        pytest.param(
            """template: {src: "{{ inventory_dir }}/asks.j2", dest: /etc/a}""",
            f"what `fileglob` {ANSWER}",
            id="a template that asks for its files",
        ),
        pytest.param(
            """own: {}""",
            "what the action plugin `own` reads is known only while the play runs",
            id="a plugin of one's own",
        ),
        pytest.param(
            """copy: {content: "{{ now() }}", dest: /etc/a}""",
            f"what `now()` {GIVES}",
            id="the time",
        ),
        pytest.param(
            """
command: id
when: 100 | random > 50
""",
            f"what `random` {GIVES}",
            id="chance decides",
        ),
        pytest.param(
            """set_fact: {site_file: "{{ ['a', 'b'] | shuffle | first }}"}""",
            f"what `shuffle` {GIVES}",
            id="an order",
        ),
        pytest.param(
            """
include_tasks: outer.yml
vars: {site_seed: "{{ 9 | random }}"}
""",
            f"what `random` {GIVES}",
            id="a variable of an include",
        ),
        pytest.param(
            """
block: [{debug: {msg: "{{ site_seed }}"}}]
vars: {site_seed: "{{ now().year }}"}
""",
            f"what `now()` {GIVES}",
            id="a variable of a block",
        ),
        pytest.param(
            """template: {src: "{{ inventory_dir }}/time.conf", dest: /etc/a}""",
            f"inventory/time.conf: what `template_run_date` {GIVES}",
            id="a template of the time",
        ),
        pytest.param(
            """template: {src: "{{ inventory_dir }}/around.j2", dest: /etc/a}""",
            f"inventory/time.conf: what `template_host` {GIVES}",
            id="a template in a template",
        ),
        pytest.param(
            """copy: {content: "{{ lookup('template', inventory_dir ~ '/alias.j2') }}", dest: /etc/a}""",
            f"inventory/alias.j2: what `lookup under another name` {GIVES}",
            id="a template that a lookup evaluates",
        ),
        pytest.param(
            """include_vars: "{{ inventory_dir }}/dates.yml" """,
            f"inventory/dates.yml: what `strftime` {GIVES}",
            id="variables that a task loads",
        ),
        pytest.param(
            """copy: {content: "{{ lookup('password', '/dev/null') }}", dest: /etc/a}""",
            "made by the lookup `password`, known only to a play",
            id="a password",
        ),
    ],
)
def test_what_is_not_known_before_the_play_is_said(root: Path, place: str, task: str, warning: str) -> None:
    own = {
        "roles/needed/tasks/outer.yml": "[]\n",
        "roles/needed/action_plugins/own.py": "",
        "roles/needed/library/own.py": "",
        "inventory/time.conf": "{{ template_host }} {{ template_run_date }}\n",
        "inventory/around.j2": "{% include 'time.conf' %}\n",
        "inventory/alias.j2": "{% set l = lookup %}{{ l('env', 'X') }}\n",
        "inventory/dates.yml": "site_date: \"{{ '%Y' | strftime }}\"\n",
    }
    _with_task(root, place, task, own)
    found = plan(root)
    # Random, so the stage is another one in each plan: test_what_only_the_play_knows_runs_its_layer_in_every_build.
    assert [stage.name for stage in found.stages if "run" in stage.options] == ["mine"]
    assert any(f": {warning}\n" in f"{w}\n" for w in found.warnings), found.warnings
    assert {w.partition(": ")[0] for w in found.warnings} == {"stage mine runs in every build"}


@pytest.mark.parametrize(
    "before",
    [
        pytest.param("command: id\nregister: site_file", id="register"),
        pytest.param("set_fact: {site_file: /etc/a}", id="set_fact"),
        pytest.param(
            'include_vars: {file: "{{ site_vars }}/b.yml"}\nwhen: site_registered.rc == 0',
            id="include_vars",
        ),
    ],
)
def test_what_a_task_sets_is_not_what_the_inventory_has(root: Path, before: str) -> None:
    _with_task(root, ROLE, before, {"inventory/more/b.yml": "site_file: /etc/a\n"})
    _add(root, ROLE, 'copy: {src: "{{ site_file }}", dest: /etc/a}')
    (warning,) = plan(root).warnings
    assert warning.endswith("the file `{{ site_file }}` is named only while the play runs")


FETCHED = [
    pytest.param("dest: fetched/", "playbooks/layers/fetched/worker/etc/a", id="by host"),
    pytest.param("dest: fetched/, flat: true", "playbooks/layers/fetched/a", id="into a directory"),
    pytest.param('dest: "{{ role_path }}/files/a", flat: true', "roles/needed/files/a", id="into a role"),
]


@pytest.mark.parametrize(("dest", "fetched"), FETCHED)
def test_what_the_play_fetches_is_not_what_it_reads(root: Path, dest: str, fetched: str) -> None:
    """Nor what other layers read, though what is beside their playbooks is beside this one, too."""
    more = {fetched: "site_name\n", f"{fetched}.txt": "old\n"}
    _with_task(root, ROLE, f"fetch: {{src: /etc/a, {dest}}}", more)
    before = plan(root)
    assert before.warnings == ()
    _new(fetched)(root)
    assert changed(before, plan(root)) == set()
    _new(f"{fetched}.txt")(root)
    assert ("mine" in changed(before, plan(root))) is ("/worker/" not in fetched)


@pytest.mark.parametrize(("dest", "fetched"), FETCHED)
def test_what_the_play_fetches_and_reads_is_known_only_to_it(root: Path, dest: str, fetched: str) -> None:
    _with_task(root, ROLE, f"fetch: {{src: /etc/a, {dest}}}", {fetched: "old\n"})
    with (root / ROLE).open("a") as tasks:
        tasks.write(f'- name: Send\n  copy: {{src: "{root / fetched}", dest: /etc/b}}\n')
    (warning,) = plan(root).warnings
    assert warning.endswith(f"{root / fetched}: what it holds is known only while the play runs")


def test_a_link_to_a_file_of_the_kernel_is_one(root: Path) -> None:
    (root / "roles/mine/files/up").symlink_to("/proc/uptime")
    stage = plan(root).stage("mine")
    assert stage.options["unknown"] == (
        f"{root}/roles/mine/files/up: what it holds is known only while the play runs",
    )
    assert "roles/mine/files/up" not in stage.places, "it would count as changed while the stage runs"


def test_an_extra_variable_wins_over_what_include_vars_brings(root: Path) -> None:
    _with_task(root, ROLE, 'include_vars: "{{ site_vars }}/b.yml"', {"inventory/more/b.yml": "site_on: no\n"})
    with (root / ROLE).open("a") as tasks:
        tasks.write('- name: Send\n  copy: {src: "{{ site_file }}", dest: /etc/a}\n  when: site_on | bool\n')
    before, sent = plan(root), plan(root, "site_on=yes")
    _new(CERTS)(root)
    assert changed(before, plan(root)) == set()
    assert changed(sent, plan(root, "site_on=yes")) - {"verify"} == MINE - {"verify"}


COMPOSED = [
    "copy: {content: \"{{ vars.get('site_' ~ 'other') }}\", dest: /etc/a}",
    'copy: {content: "{{ vars | dict2items }}", dest: /etc/a}',
    'copy: {content: "{% for name in vars %}{{ name }}{% endfor %}", dest: /etc/a}',
    'copy: {content: "{{ dict(vars) }}", dest: /etc/a}',
    'debug: {msg: "{{ site_composed }}"}',
    'debug: {msg: "{{ item }}"}\nwith_varnames: ^site_',
    "debug: {msg: \"{{ item }}\"}\nwith_vars: [\"{{ 'site_' ~ 'other' }}\"]",
]


@pytest.mark.parametrize("task", COMPOSED)
def test_a_name_composed_while_the_play_runs_may_be_any_variables(root: Path, task: str) -> None:
    _with_task(root, ROLE, task)
    edit("roles/mine/tasks/main.yml", " {{ lookup('vars', 'site_' ~ 'name') }}", "")(root)
    edit("inventory/hosts.yml", "    site_name: a\n", "    site_name: a\n    site_other: a\n")(root)
    before = plan(root)
    edit("inventory/hosts.yml", "site_other: a", "site_other: b")(root)
    assert changed(before, plan(root)) - {"verify"} == MINE - {"verify"}


def test_what_include_vars_brings_is_known(root: Path) -> None:
    more = {
        "inventory/more/b.yml": "site_file: '{{ inventory_dir }}/more/sent'\n",
        "inventory/more/sent": "old\n",
    }
    _with_task(root, ROLE, 'include_vars: "{{ site_vars }}/b.yml"', more)
    _add(root, ROLE, 'copy: {src: "{{ site_file }}", dest: /etc/a}')
    before = plan(root)
    assert before.warnings == ()
    _new("inventory/more/sent")(root)
    assert changed(before, plan(root)) - {"verify"} == MINE - {"verify"}
    before = plan(root)
    _new(CERTS)(root)
    assert changed(before, plan(root)) == set()


@pytest.mark.parametrize(
    "task",
    [
        pytest.param(
            'copy: {src: "{{ site_other }}", dest: /etc/a}\nwhen: site_other is defined', id="a condition"
        ),
        pytest.param(
            'include_tasks: "{{ site_other }}.yml"\nwhen: site_other is defined',
            id="a condition of an include",
        ),
        pytest.param('copy: {src: "{{ site_other | default(omit) }}", content: a, dest: /etc/a}', id="omit"),
        pytest.param(
            'copy: {src: "{{ ansible_facts.kernel }}", dest: /etc/a, remote_src: true}', id="remote_src"
        ),
        pytest.param(
            'assemble: {src: "{{ ansible_facts.kernel }}", dest: /etc/a}', id="assemble, in the image"
        ),
        pytest.param("script: site.sh {{ ansible_facts.kernel }}", id="an argument of a script"),
        pytest.param('copy: {content: "{{ ansible_facts.kernel }}", dest: /etc/a}', id="content"),
    ],
)
def test_what_reads_nothing_here_needs_no_warning(root: Path, task: str) -> None:
    _with_task(root, ROLE, task, {"roles/needed/files/site.sh": "exit 0\n"})
    first = plan(root)
    assert first.warnings == ()
    assert changed(first, plan(root)) == set()


def test_tasks_are_followed_with_each_value_of_their_loop_and_variables(root: Path) -> None:
    more = {"roles/needed/tasks/send.yml": '- name: Send\n  copy: {src: "{{ sent }}", dest: /etc/}\n'}
    task = 'include_tasks: "{{ item }}.yml"\nloop: [send]\nvars: {sent: "{{ inventory_dir }}/key.asc"}'
    _with_task(root, ROLE, task, more)
    with (root / ROLE).open("a") as tasks:
        tasks.write('- name: Again\n  include_tasks: send.yml\n  vars: {sent: "{{ site_file }}"}\n')
        tasks.write('- name: Looped\n  include_tasks: send.yml\n  loop: ["{{ site_motd }}"]\n')
        tasks.write("  loop_control: {loop_var: sent}\n")
    before = plan(root)
    assert before.warnings == ()
    for name in ("inventory/key.asc", CERTS, "inventory/site.j2"):
        _new(name)(root)
        after = plan(root)
        assert changed(before, after) - {"verify"} == MINE - {"verify"}, name
        before = after


def test_plugins_that_the_settings_name_count_for_all(root: Path) -> None:
    (root / "my_filters/deeper").mkdir(parents=True)
    (root / "my_filters/site.py").write_text("old = 1\n")
    edit("ansible.cfg", "roles\n", "roles\nfilter_plugins = my_filters\n")(root)
    before = plan(root)
    _new("my_filters/site.py")(root)
    assert changed(before, plan(root)) - {"verify"} == EVERY_PLAY - {"verify"}


def test_a_vaulted_value_decides_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan has only a stand-in for it, not the value that the play sees."""
    password = VaultSecret(b"swordfish")
    secret = VaultLib([("default", password)]).encrypt("on", password).decode()
    (root / "password").write_text("swordfish\n")
    monkeypatch.setenv("ANSIBLE_VAULT_PASSWORD_FILE", str(root / "password"))
    _with_task(root, ROLE, 'copy: {src: "{{ site_file }}", dest: /etc/a}\nwhen: site_secret == "on"')
    vaulted = f"    site_secret: !vault |\n{indent(secret, ' ' * 6)}\n"
    edit("inventory/hosts.yml", "    site_name: a\n", f"{vaulted}    site_name: a\n")(root)
    before = plan(root)
    _new(CERTS)(root)
    assert changed(before, plan(root)) - {"verify"} == MINE - {"verify"}
