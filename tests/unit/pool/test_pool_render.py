"""Node configurations from an inventory: what the node would refuse is refused here, all at once, as is any secret."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
from typer.testing import CliRunner

from image_builder.cli import pool as pool_commands
from image_builder.errors import DefinitionError, UsageError
from image_builder.node.join.config import parse
from image_builder.pool.plan.render import VARIABLES, Rendered, render
from tests.support.nodes import joins
from tests.support.shipped import filled, shipped

CA = joins.authority().certificate
GOOD = f"""
all:
  vars:
    join_generation: 3
    join_server: https://10.0.0.1:6443
    join_ca: |
{indent(CA, "      ")}
    join_credentials: {{kind: broker, url: "https://broker.example/token", resource: "api://node-broker"}}
    join_labels: {{node.example/pool: "{{{{ pool_name }}}}"}}
    join_max_pods: "{{{{ 16 * 2 - 1 }}}}"
  children:
    pool_a:
      vars: {{pool_name: a, join_hosts: 600}}
      hosts: {{a-0: , a-1: {{join_node_name: first}}}}
    pool_b:
      vars: {{pool_name: b}}
      hosts: {{b-0: }}
    nobody: {{hosts: {{}}}}
"""


def _inventory(tmp_path: Path, text: str) -> list[Path]:
    path = tmp_path / "hosts.yml"
    path.write_text(text)
    return [path]


def _problems(tmp_path: Path, text: str, *names: str) -> list[str]:
    with pytest.raises(DefinitionError) as refused:
        render(_inventory(tmp_path, text), names or ["all"])
    return [f"{problem.path}: {problem.reason}" for problem in refused.value.problems]


def _document(rendered: Rendered) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(rendered.text)
    return document


def test_what_is_rendered_is_what_a_node_takes(tmp_path: Path) -> None:
    rendered = render(_inventory(tmp_path, GOOD), ["pool_a", "b-0", "a-0"])
    assert [configuration.host for configuration in rendered] == ["a-0", "a-1", "b-0"]
    read = [parse(configuration.text.encode()) for configuration in rendered]
    assert [configuration.labels["node.example/pool"] for configuration in read] == ["a", "a", "b"]
    assert (read[0].max_pods, read[0].hosts, read[2].hosts, read[1].name) == (31, 600, 1, "first")
    assert _document(rendered[0])["cluster"]["ca"] == CA
    assert rendered[0].user_data_bytes % 4 == 0


def test_the_example_for_azure_is_what_its_nodes_take(tmp_path: Path) -> None:
    """The how-to's command, on the inventory that it names, whose images have the layer that takes its output."""
    example = filled("azure_vmss", tmp_path)
    rendered = render([example], ["vmss_h100_a", "vmss_cpu"])
    read = [parse(configuration.text.encode()) for configuration in rendered]
    assert [c.labels["node.example/pool"] for c in read] == ["worker_h100"] * 2 + ["worker_cpu"] * 2
    assert all(c.dns == ("10.0.0.10",) and c.credentials.kind == "broker" for c in read)
    images = shipped("azure_vmss")
    assert all(images.define(image).layers[-1] == "join" for image in images.images)


def test_each_variable_is_a_part_of_the_configuration(tmp_path: Path) -> None:
    from image_builder.node.join.config import json_schema

    parts = json_schema()["properties"]
    for path in VARIABLES.values():
        rules = parts[path[0]] if len(path) == 1 else parts[path[0]]["properties"][path[1]]
        assert "description" in rules or path == ("credentials",)


def test_everything_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    text = GOOD.replace("join_generation: 3", "join_generation: 0\n    join_lables: {}").replace(
        "{pool_name: b}", '{pool_name: b, join_taints: [{key: a}], join_rate: "{{ nothing }}"}'
    )
    problems = _problems(tmp_path, text)
    assert "join_generation: must be 1 or more: a-0, a-1, b-0" in problems
    assert "join_lables: unknown variable, did you mean `join_labels`?: a-0, a-1, b-0" in problems
    assert "join_taints[0].effect: is missing: b-0" in problems
    assert any(
        line.startswith("join_rate: ") and "nothing" in line and line.endswith(": b-0") for line in problems
    )
    assert len(problems) == 4


def test_what_belongs_to_one_node_is_refused_for_several(tmp_path: Path) -> None:
    """Thousands of kubelets with one name would fight over one Node object."""
    text = GOOD.replace(
        "join_generation: 3",
        "join_generation: 3\n    join_node_name: gpu\n    join_node_ip: platform\n    join_provider_id: azure:///a",
    )
    assert _problems(tmp_path, text) == [
        "join_node_name: gpu can belong to only one node: a-0, b-0",
        "join_provider_id: azure:///a can belong to only one node: a-0, a-1, b-0",
    ]


def test_a_host_whose_file_would_lie_elsewhere_is_refused(tmp_path: Path) -> None:
    problems = _problems(tmp_path, GOOD.replace("{b-0: }", '{"../b-0": }'), "pool_b")
    assert problems == ["inventory_hostname: can't be the name of a file: ../b-0"]


def test_what_is_missing_is_named_by_its_variable(tmp_path: Path) -> None:
    problems = _problems(tmp_path, "all: {hosts: {a: }}")
    assert problems == [
        "join_ca: is missing: a",
        "join_credentials: is missing: a",
        "join_generation: is missing: a",
        "join_server: is missing: a",
    ]


@pytest.mark.parametrize(
    ("secret", "kind"),
    [(joins.TOKEN, "a bootstrap token"), ("Bearer abcdefgh12345678", "credentials of HTTP")],
)
def test_a_secret_is_refused_and_not_told(tmp_path: Path, secret: str, kind: str) -> None:
    problems = _problems(tmp_path, GOOD.replace("{pool_name: b}", f"{{pool_name: {secret}}}"))
    assert f"join_labels.node.example/pool: {kind} must not be in user data: b-0" in problems
    assert not any(secret in line for line in problems)


def test_a_vaulted_value_is_refused(tmp_path: Path) -> None:
    from ansible.parsing.vault import VaultLib, VaultSecret

    secret = VaultSecret(b"password")
    vaulted = VaultLib([("default", secret)]).encrypt("https://10.0.0.1:6443", secret=secret).decode()
    text = GOOD.replace(
        "join_server: https://10.0.0.1:6443", "join_server: !vault |\n" + indent(vaulted, "      ")
    )
    assert _problems(tmp_path, text, "b-0") == [
        "join_server: a vaulted value must not be in user data: b-0",
        "join_server: is missing: b-0",
    ]


def test_names_that_nothing_has(tmp_path: Path) -> None:
    assert _problems(tmp_path, GOOD, "pool_c", "nobody") == [
        "nobody: no host in this group",
        "pool: unknown group or host `pool_c`, did you mean `pool_b`?",
    ]
    with pytest.raises(UsageError):
        render([], ["pool_a"])
    with pytest.raises(DefinitionError):
        render([tmp_path / "missing.yml"], ["pool_a"])


def test_the_command_writes_a_file_for_each_host_and_nothing_where_one_is_wrong(tmp_path: Path) -> None:
    (path,) = _inventory(tmp_path, GOOD)
    out = tmp_path / "out"
    call = ["render", "-i", str(path), "--out", str(out), "--json"]
    done = CliRunner().invoke(pool_commands.app, [*call, "pool_a"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["configurations"] == 2
    assert sorted(file.name for file in out.iterdir()) == ["a-0.json", "a-1.json"]
    for pool, total in (
        ("pool_a", "2 hosts, 2 different configurations"),
        ("pool_b", "1 host, 1 configuration"),
    ):
        done = CliRunner().invoke(pool_commands.app, [*call[:-1], pool])
        assert done.stdout.endswith(f"\n{total}, in {out}\n")
    path.write_text(GOOD.replace("join_generation: 3", "join_generation: x"))
    out = tmp_path / "other"
    done = CliRunner().invoke(pool_commands.app, [*call[:4], str(out), "pool_b"])
    assert done.exit_code == 3 and not out.exists()
