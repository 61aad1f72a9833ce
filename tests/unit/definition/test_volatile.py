"""What in a template differs from play to play."""

from __future__ import annotations

import pytest

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
