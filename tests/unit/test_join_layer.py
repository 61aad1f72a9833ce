"""The layer of joining: what it must know of other layers, and where it stands."""

from __future__ import annotations

import re

import yaml

from image_builder.definition import load_inventory, resolved_variables
from image_builder.settings import REPO_ROOT

LAYER = REPO_ROOT / "playbooks" / "layers" / "join.yml"


def test_playbook_repeats_the_other_roles_default() -> None:
    assumed = dict(re.findall(r"(\w+) \| default\('([^']*)'\)", LAYER.read_text(encoding="utf-8")))
    role = REPO_ROOT / "roles" / "container_runtime" / "defaults" / "main.yml"
    defaults = yaml.safe_load(role.read_text(encoding="utf-8"))
    assert assumed == {"container_runtime_engine": defaults["container_runtime_engine"]}


def test_agent_comes_before_what_it_is_told() -> None:
    (play,) = yaml.safe_load(LAYER.read_text(encoding="utf-8"))
    assert [entry["role"] for entry in play["roles"]] == ["node_agent", "node_join"]


def test_the_labs_image_belongs_to_no_cluster_and_waits_for_one() -> None:
    definition = load_inventory([REPO_ROOT / "inventories/lab"]).define("worker_join")
    found = resolved_variables(definition)
    assert definition.layers[-2:] == ("gate", "join") and found["kubelet_mode"] == "cluster"
    assert (found["node_join_engine"], found["gpu_preflight_engine"]) == ("docker", "docker")
    assert found["node_join_kubernetes"] == "/etc/kubernetes"
    assert found["gpu_preflight_kubeconfig"] == "/etc/kubernetes/kubelet.conf"
