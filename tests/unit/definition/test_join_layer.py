"""The join layer: what it must know about other layers, and its position among them."""

from __future__ import annotations

import re
from typing import Any

import yaml

from image_builder.canonical import JSON
from image_builder.definition import engine, resolved_variables
from image_builder.definition.evaluate import role_variables
from image_builder.definition.roles import RoleBook
from image_builder.settings import REPO_ROOT
from tests.support.shipped import shipped

LAYER = REPO_ROOT / "playbooks" / "layers" / "join.yml"


def test_playbook_repeats_the_other_roles_defaults() -> None:
    roles = LAYER.read_text(encoding="utf-8").partition("\n  roles:\n")[2]
    assumed = dict(re.findall(r"(\w+) \| default\('([^']*)'\)", roles))
    defaults: dict[str, object] = {}
    for role in ("container_runtime", "kubelet"):
        path = REPO_ROOT / "roles" / role / "defaults" / "main.yml"
        defaults |= yaml.safe_load(path.read_text(encoding="utf-8"))
    assert assumed == {name: defaults[name] for name in assumed}
    assert set(assumed) == {
        "container_runtime_engine",
        "container_runtime_cni_conf_dir",
        "kubelet_cni",
        "kubelet_kubeconfig",
        "kubelet_bootstrap_kubeconfig",
        "kubelet_client_ca_file",
    }


def test_a_kubelet_that_looks_elsewhere_than_joining_writes_is_refused() -> None:
    """Its node would wait until the timeout for a certificate that the kubelet keeps in another place."""
    book = RoleBook((REPO_ROOT,))
    layer = book.layer("join")
    use = next(use for use in layer.uses if use.name == "node_join")

    def problems(**inventory: JSON) -> Any:
        known = {"image_layers": ["kubernetes", "join"], **inventory}
        return engine.Evaluator(role_variables(book, layer, use, known)).evaluate(
            "{{ __node_join_problems }}"
        )

    assert problems() == []
    (found,) = problems(kubelet_kubeconfig="/var/lib/kubelet/kubeconfig")
    assert "the kubelet looks for /var/lib/kubelet/kubeconfig, but joining writes /etc/kubernetes/" in found
    (found,) = problems(node_join_kubernetes="/srv/k")
    assert "/etc/kubernetes/node.env" in found and "/etc/kubernetes/pki/ca.crt" in found
    assert problems(node_join_kubernetes="/srv/k", image_layers=["join"]) == []


def test_agent_comes_before_what_it_is_told() -> None:
    (play,) = yaml.safe_load(LAYER.read_text(encoding="utf-8"))
    assert [entry["role"] for entry in play["roles"]] == ["node_agent", "node_join"]


def test_the_labs_image_belongs_to_no_cluster_and_waits_for_one() -> None:
    definition = shipped("lab").define("worker_join")
    found = resolved_variables(definition)
    assert definition.layers[-2:] == ("gate", "join") and found["kubelet_mode"] == "cluster"
    assert (found["node_join_engine"], found["gpu_preflight_engine"]) == ("docker", "docker")
    assert found["node_join_kubernetes"] == "/etc/kubernetes"
    assert found["gpu_preflight_kubeconfig"] == "/etc/kubernetes/kubelet.conf"
