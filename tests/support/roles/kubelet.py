"""The role kubelet as a bake evaluates it: inventories of all kinds, and the role's result for each.

Variables are evaluated in a bake's order: role defaults, inventory, what the layer's playbook passes, the
role's vars.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from image_builder.definition import engine
from image_builder.definition.evaluate import role_variables
from image_builder.definition.roles import RoleBook

REPOSITORY = Path(__file__).resolve().parents[3]
ROLE = REPOSITORY / "roles" / "kubelet"

KNOWN = ("1.20", "1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37")

CRI_DOCKERD = {"version": "0.3.16", "url": "https://archive.test/cri-dockerd.tgz", "sha256": "ab" * 32}
PROVIDER = {
    "name": "acr-credential-provider",
    "match_images": ["*.azurecr.io"],
    "args": ["/etc/kubernetes/azure.json"],
    "url": "https://archive.test/acr-credential-provider",
    "sha256": "cd" * 32,
}
TAINT = {"key": "gpu", "value": "h100", "effect": "NoSchedule"}
# Options that not every known version has, by the first minor version that does without a feature gate.
_NEWER = {
    "kubelet_image_credential_providers": 24,
    "kubelet_image_credentials_allowlist": 35,
    "kubelet_image_credentials_policy": 35,
    "kubelet_image_maximum_gc_age": 29,
    "kubelet_seccomp_default": 25,
}


def minor_of(version: str) -> int:
    return int(version.split(".")[1])


@cache
def table(name: str = "__kubelet_versions") -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROLE / "vars" / "versions.yml").read_text(encoding="utf-8"))
    rows: dict[str, Any] = loaded[name]
    return rows


def fields_of(version: str, name: str = "__kubelet_fields") -> set[str]:
    """Return the fields that a table of fields by version has up to this version."""
    rows = table(name).items()
    return {field for since, new in rows if minor_of(since) <= minor_of(version) for field in new}


def containerd(version: str, **more: Any) -> dict[str, Any]:
    """Return an inventory with this Kubernetes version and a containerd that it works with."""
    return {
        "kubelet_version": version,
        "kubelet_source": {"type": "none"},
        "container_runtime_engine": "containerd",
        "container_runtime_containerd_version": "1.7" if version.startswith("1.20") else "2.2",
        **more,
    }


def docker(version: str, **more: Any) -> dict[str, Any]:
    return {"kubelet_version": version, "kubelet_source": {"type": "none"}, **more}


LAB = docker(
    "1.20.2", kubelet_mode="standalone", kubelet_source={"type": "debian_source", "suite": "bookworm"}
)
SCENARIOS: dict[str, dict[str, Any]] = {
    "1.20-docker": docker("1.20.2", kubelet_register_with_taints=[TAINT]),
    "1.20-docker-standalone": LAB,
    "1.20-containerd": containerd("1.20.2"),
    "1.31-containerd": containerd("1.31"),
    "1.33-containerd": containerd("1.33"),
    "1.34-containerd": containerd("1.34"),
    "1.34-cri-dockerd": docker("1.34", container_runtime_cri_dockerd=CRI_DOCKERD),
    "1.35-containerd": containerd("1.35"),
    "1.36-containerd": containerd("1.36"),
    "1.36-cri-dockerd": docker("1.36", container_runtime_cri_dockerd=CRI_DOCKERD),
    "1.36-containerd-standalone": containerd("1.36", kubelet_mode="standalone"),
    "1.37-containerd": containerd("1.37"),
    "1.36-every-option": containerd(
        "1.36.1",
        kubelet_cloud_provider="external",
        kubelet_cluster_dns=["10.0.0.10"],
        kubelet_config={"topologyManagerPolicy": "best-effort"},
        kubelet_eviction_hard={
            "imagefs.available": "5%",
            "memory.available": "1Gi",
            "nodefs.available": "10%",
        },
        kubelet_extra_args=["--v=2"],
        kubelet_feature_gates={"ImageMaximumGCAge": True},
        kubelet_image_credential_providers=[PROVIDER],
        kubelet_image_credentials_allowlist=["registry.test/team/*"],
        kubelet_image_credentials_policy="NeverVerifyAllowlistedImages",
        kubelet_image_maximum_gc_age="336h",
        kubelet_node_labels={"node.test/sku": "nd96", "node.test/fabric": "ib"},
        kubelet_register_with_taints=[TAINT],
        kubelet_seccomp_default=True,
        kubelet_server_tls_bootstrap=True,
    ),
}


def every_option(version: str) -> dict[str, Any]:
    """Return variables that set all of the role's options that a version has, whatever the runtime."""
    options = {
        name: value for name, value in SCENARIOS["1.36-every-option"].items() if name.startswith("kubelet_")
    }
    return {name: value for name, value in options.items() if _NEWER.get(name, 0) <= minor_of(version)}


class Rendered:
    """The role's variables for one inventory."""

    def __init__(self, inventory: dict[str, Any]) -> None:
        book = RoleBook((REPOSITORY,))
        layer = book.layer("kubernetes")
        use = next(use for use in layer.uses if use.name == "kubelet")
        known = {
            "target_booted": False,
            "target_archives": "/archives",
            "image_inputs": "/inputs",
            **inventory,
        }
        self.variables = role_variables(book, layer, use, known)
        self._evaluator = engine.Evaluator({**self.variables, "ansible_managed": "Ansible managed"})
        self._files: dict[str, str] = {}

    def value(self, name: str) -> Any:
        return self._evaluator.evaluate(self.variables[name])

    def file(self, template: str) -> str:
        """Return a template's text as ansible.builtin.template writes it."""
        if template not in self._files:
            rendered = self._evaluator.evaluate((ROLE / "templates" / template).read_text(encoding="utf-8"))
            assert isinstance(rendered, str)
            self._files[template] = rendered.rstrip("\n") + "\n"
        return self._files[template]

    @property
    def problems(self) -> list[str]:
        return [" ".join(text.split()) for text in self.value("__kubelet_problems")]

    @property
    def config(self) -> dict[str, Any]:
        """Return the configuration as a YAML parser reads it from the file."""
        parsed: dict[str, Any] = yaml.safe_load(self.file("kubelet.yaml.j2"))
        return parsed

    @property
    def command(self) -> list[str]:
        """Return what the unit runs, as systemd splits it."""
        start = re.search(r"^ExecStart=((?:.*\\\n)*.*)$", self.file("kubelet.service.j2"), re.MULTILINE)
        assert start
        return start[1].replace("\\\n", " ").split()

    @property
    def flags(self) -> dict[str, str]:
        pairs = (word[2:].partition("=") for word in self.command[1:] if word.startswith("--"))
        return {name: text for name, _, text in pairs}


@cache
def scenario(name: str) -> Rendered:
    return Rendered(SCENARIOS[name])
