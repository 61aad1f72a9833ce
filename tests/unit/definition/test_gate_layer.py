"""The gate layer: what it must know about other layers, and about those that an image doesn't have."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from image_builder.definition import load_inventory, resolved_variables
from image_builder.settings import REPO_ROOT
from tests.support.shipped import shipped

LAYER = REPO_ROOT / "playbooks" / "layers" / "gate.yml"


def variables(inventory: str, image: str) -> Any:
    return resolved_variables(shipped(inventory).define(image))


def defaults(variable: str) -> Any:
    """Return a variable's default from the only role that has it."""
    found = [
        loaded[variable]
        for path in sorted(Path(REPO_ROOT, "roles").glob("*/defaults/main.yml"))
        if variable in (loaded := yaml.safe_load(path.read_text(encoding="utf-8")) or {})
    ]
    assert len(found) == 1, variable
    return found[0]


def test_playbook_repeats_the_other_roles_defaults() -> None:
    roles = LAYER.read_text(encoding="utf-8").partition("\n  roles:\n")[2]
    assumed = dict(re.findall(r"(\w+) \| default\('([^']*)'\)", roles))
    assert len(assumed) >= 4
    assert assumed == {name: defaults(name) for name in assumed}


def test_agent_comes_before_what_it_is_told() -> None:
    (play,) = yaml.safe_load(LAYER.read_text(encoding="utf-8"))
    assert [entry["role"] for entry in play["roles"]] == ["node_agent", "gpu_preflight", "node_health"]


@pytest.mark.parametrize(
    ("inventory", "image", "engine", "kubeconfig"),
    [
        ("lab", "worker_gpu", "docker", ""),
        ("azure_vmss", "worker_h100", "containerd", "/etc/kubernetes/kubelet.conf"),
    ],
)
def test_what_an_image_does_not_have_is_not_asked(
    inventory: str, image: str, engine: str, kubeconfig: str
) -> None:
    found = variables(inventory, image)
    assert found["gpu_preflight_engine"] == engine
    assert found["gpu_preflight_kubeconfig"] == found["node_health_kubeconfig"] == kubeconfig


def test_an_image_without_a_container_engine_is_asked_for_none(tmp_path: Path) -> None:
    (tmp_path / "hosts.yml").write_text("images: {hosts: {worker_gpu: }}\n", encoding="utf-8")
    (tmp_path / "host_vars").mkdir()
    (tmp_path / "host_vars/worker_gpu.yml").write_text(
        "image_layers: [system, gpu, gate]\n", encoding="utf-8"
    )
    inventory = load_inventory([REPO_ROOT / "inventories" / "lab", tmp_path])
    assert resolved_variables(inventory.define("worker_gpu"))["gpu_preflight_engine"] == ""
