"""What in a template differs from play to play."""

from __future__ import annotations

from pathlib import Path

import pytest

from image_builder.definition.engine import read_play
from image_builder.definition.engine.volatile import volatile


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("{{ now() }}", {"now()"}),
        ("{{ now(utc=true).strftime('%Y') }}", {"now()"}),
        ("{% set n = now %}{{ n() }}", {"now()"}),
        ("{% if now().year > 2020 %}x{% endif %}", {"now()"}),
        ("{{ 5 | random }}", {"random"}),
        ("{{ 5 | ansible.builtin.random }}", {"random"}),
        ("{{ 5 | random(1, 2) }}", {"random"}),
        ("{{ [1, 2] | shuffle }}", {"shuffle"}),
        ("{{ [[1, 2]] | map('shuffle') }}", {"shuffle"}),
        ("{{ [5] | map('ansible.builtin.random') }}", {"random"}),
        ("{{ [5] | map(site_filter) }}", {"map(…)"}),
        ("{{ '52:54:00' | community.general.random_mac }}", {"random_mac"}),
        ("{{ '%Y' | strftime }}", {"strftime"}),
        ("{{ 'x' | password_hash('sha512') }}", {"password_hash"}),
        ("{{ 'x' | vault('secret') }}", {"vault"}),
        ("{{ lipsum(n=1) }}", {"lipsum()"}),
        ("{{ template_run_date }} {{ template_mtime.year }}", {"template_run_date", "template_mtime"}),
        ("{{ template_host ~ template_fullpath ~ template_uid ~ template_path }}", {
            "template_host", "template_fullpath", "template_uid", "template_path",
        }),
        ("{{ vars['template_host'] }}", {"template_host"}),
        ("{{ ansible_playbook_python }}", {"ansible_playbook_python"}),
        ("{% set l = lookup %}{{ l('env', 'X') }}", {"lookup under another name"}),
        ("{{ '%Y' | strftime(none) }} {{ '%Y' | strftime(none, true) }}", {"strftime"}),
        ("{{ 5 | random(seed=none) }}", {"random"}),
        ("{{ 'x' | password_hash('sha512', '') }}", {"password_hash"}),
        ("{{ 'x' | password_hash('sha512', salt=none) }}", {"password_hash"}),
        ("{{ [1, 2] | shuffle(seed=0) }}", {"shuffle"}),
        ("{{ broken | random", {"random"}),
    ],
)  # fmt: skip
def test_the_time_chance_and_the_machine_that_builds_are_noticed(text: str, names: set[str]) -> None:
    assert volatile(text) == names


@pytest.mark.parametrize(
    "text",
    [
        "now and then, at random: kernel.randomize_va_space",
        "{{ kernel.randomize_va_space }} {{ site.now }} {{ 'random' }}",
        "{{ 59 | random(seed=inventory_hostname) }} {{ [1, 2] | shuffle(seed='a') }}",
        "{{ 'x' | password_hash('sha512', site_salt) }} {{ 'x' | password_hash(salt='a') }}",
        "{{ '%Y' | strftime(0) }} {{ 5 | random(seed=0) }} {{ 5 | random(1, 2, inventory_hostname) }}",
        "{{ [5] | map('random', seed='a') | map(attribute='a') | map('upper') }}",
        "{% set now = 1 %}{{ now }}",
        "{{ template_destpath }} {{ lookup('file', 'a') }} {{ query('vars', 'b') }}",
        "{% raw %}{{ now() }}{% endraw %}",
        "{# {{ now() }} #}",
    ],
)
def test_what_always_gives_the_same_is_not(text: str) -> None:
    assert volatile(text) == frozenset()


@pytest.mark.parametrize(
    ("text", "names"), [("[[ now() ]]", {"now()"}), ("{{ now() }}", set()), ("[[ now(", {"now"})]
)
def test_other_delimiters_are_followed(text: str, names: set[str]) -> None:
    assert volatile(text, (("variable_start_string", "[["), ("variable_end_string", "]]"))) == names


def test_the_time_is_noticed_in_a_template_with_other_delimiters(tmp_path: Path) -> None:
    (tmp_path / "a.j2").write_text("[[ now() ]]\n")
    play = tmp_path / "play.yml"
    marks = "variable_start_string: '[[', variable_end_string: ']]'"
    task = f"ansible.builtin.template: {{src: a.j2, dest: /a, {marks}}}"
    play.write_text(f"- hosts: all\n  gather_facts: false\n  tasks:\n    - {task}\n")
    reading = read_play(play, [tmp_path], {"inventory_hostname": "node"}, {}, frozenset())
    assert [text for text in reading.unknown if "`now()`" in text] == [
        f"{play}:4: what `now()` gives is known only while the play runs"
    ]


@pytest.mark.parametrize("mark", ["'{%'", "[1]", "5", "''"])
def test_odd_delimiters_are_no_bug(tmp_path: Path, mark: str) -> None:
    (tmp_path / "a.j2").write_text("{{ now() }}\n")
    play = tmp_path / "play.yml"
    task = f"ansible.builtin.template: {{src: a.j2, dest: /a, variable_start_string: {mark}}}"
    play.write_text(f"- hosts: all\n  gather_facts: false\n  tasks:\n    - {task}\n")
    assert read_play(play, [tmp_path], {"inventory_hostname": "node"}, {}, frozenset()).templates
