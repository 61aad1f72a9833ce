"""Which variables a layer can read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from image_builder.definition import referenced_names
from image_builder.settings import REPO_ROOT

VARIABLES = {
    "engine": "docker",
    "engine_root": "/mnt/{{ disk }}",
    "disk": "{{ pool.disk }}",
    "pool": {"disk": "nvme", "zone": "{{ zone }}"},
    "zone": 1,
    "other": "{{ engine }}",
    "loop_a": "{{ loop_b }}",
    "loop_b": "{{ loop_a }}",
}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("{{ engine }}", {"engine"}),
        ("root={{engine_root|quote}}", {"engine_root", "disk", "pool", "zone"}),
        ("# mentions other in a comment", {"other", "engine"}),
        ("engines my_engine engine2", set()),
        ("vars: {x: '{{ loop_a }}'}", {"loop_a", "loop_b"}),
        ("", set()),
    ],
)
def test_names_transitively(text: str, names: set[str]) -> None:
    assert referenced_names([text], VARIABLES) == names


def test_several_texts() -> None:
    assert referenced_names(["zone", "engine"], VARIABLES) == {"zone", "engine"}


# A name that is put together at run time escapes the search by words, so no role or playbook may do that.
# `groups[...]` and other hosts' variables would make an image depend on its neighbours.
DYNAMIC = re.compile(
    r"(lookup|query|q)\(\s*['\"](ansible\.builtin\.)?(vars|varnames)['\"]"
    r"|\bhostvars\b|\bplay_hosts\b|\bansible_play_(hosts|batch)|\bgroups\s*[\[.]|\bvars\s*\["
)


def baked_files() -> list[Path]:
    roles = [
        p for p in (REPO_ROOT / "roles").rglob("*") if "molecule" not in p.parts and p.name != "README.md"
    ]
    return [p for p in [*roles, *(REPO_ROOT / "playbooks").rglob("*")] if p.is_file()]


def test_no_dynamic_lookups_in_roles() -> None:
    files = baked_files()
    assert files
    found = [
        f"{path.relative_to(REPO_ROOT)}:{n}: {line.strip()}"
        for path in files
        for n, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if DYNAMIC.search(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "{{ lookup('vars', 'kubelet_' ~ x) }}",
        '{{ query("ansible.builtin.varnames", "^x") }}',
        "{{ hostvars[inventory_hostname].x }}",
        "{{ groups['images'] }}",
        "{{ vars['x' ~ y] }}",
    ],
)
def test_the_search_finds_dynamic_lookups(line: str) -> None:
    assert DYNAMIC.search(line)
