"""The variables that a layer can read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from image_builder.canonical import JSON
from image_builder.definition.roles import RoleBook
from image_builder.definition.values import referenced_names
from image_builder.settings import REPO_ROOT

VARIABLES: dict[str, JSON] = {
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


# A name that is assembled at run time escapes the search by words, so no role or playbook may do that.
# `groups[...]` and other hosts' variables would make an image depend on its neighbors.
DYNAMIC = re.compile(
    r"(lookup|query|q)\(\s*['\"](ansible\.builtin\.)?(vars|varnames)['\"]"
    r"|\bhostvars\b|\bplay_hosts\b|\bansible_play_(hosts|batch)|\bgroups\s*[\[.]|\bvars\s*\["
)


def baked_files() -> list[Path]:
    roles = [
        p for p in (REPO_ROOT / "roles").rglob("*") if "molecule" not in p.parts and p.name != "README.md"
    ]
    return [p for p in [*roles, *(REPO_ROOT / "playbooks").rglob("*")] if p.is_file()]


def included_roles(content: object) -> set[str]:
    """Return the roles that tasks bring in, anywhere in a YAML file."""
    if isinstance(content, list):
        return {name for item in content for name in included_roles(item)}
    if not isinstance(content, dict):
        return set()
    found = {name for value in content.values() for name in included_roles(value)}
    for action in ("include_role", "import_role"):
        for key in (action, f"ansible.builtin.{action}"):
            if isinstance(content.get(key), dict):
                found.add(str(content[key]["name"]))
    return found


BOOK = RoleBook((REPO_ROOT,))


@pytest.mark.parametrize("name", BOOK.layer_names)
def test_layer_lists_every_role_that_it_uses(name: str) -> None:
    # Only the listed roles give it packages; the roles that they depend on have none.
    layer = BOOK.layer(name)
    metas = [BOOK.role(use.name).path / "meta/main.yml" for use in layer.uses]
    depended = {d["role"] for meta in metas for d in yaml.safe_load(meta.read_text())["dependencies"]}
    files = [
        layer.playbook,
        *(f for use in layer.uses for f in (BOOK.role(use.name).path / "tasks").glob("*.yml")),
    ]
    assert {r for f in files for r in included_roles(yaml.safe_load(f.read_text()))} <= {
        u.name for u in layer.uses
    } | depended


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


# Ansible's set filters return the order of a Python set of strings, which differs in each process: a value made
# from it would change a stage's id, or a file, for no reason.
UNORDERED = re.compile(r"\|\s*(difference|intersect|union|symmetric_difference)\(")


def unordered(text: str) -> list[str]:
    """Return the set filters whose result is neither sorted, counted nor compared with a set's."""
    found = []
    for match in UNORDERED.finditer(text):
        depth, at = 1, match.end()
        while depth and at < len(text):
            depth += {"(": 1, ")": -1}.get(text[at], 0)
            at += 1
        if not re.match(r"\s*\|\s*(sort|length|count)\b", text[at:]):
            found.append(text[match.start() : at])
    return found


def test_no_random_order_in_roles() -> None:
    found = [
        f"{p.relative_to(REPO_ROOT)}: {u}"
        for p in baked_files()
        for u in unordered(p.read_text(errors="replace"))
    ]
    assert found == []


def test_the_search_finds_random_order() -> None:
    assert unordered("{{ a | difference(b(c)) | join(',') }}") == ["| difference(b(c))"]
    assert unordered("{{ a | union(b) | sort | join(',') }} {{ a|intersect(b)|length }}") == []
