"""Admitting a node by hand while others change it, and the overview of a large fleet."""

from __future__ import annotations

import json
from typing import Any

import pytest

from image_builder.cluster.gate.admit import admit, overview
from image_builder.cluster.gate.impact import impacts
from image_builder.cluster.gate.model import ADMITTED, Rules, node_from
from image_builder.errors import ImageBuilderError
from image_builder.node.net.kube import Client, KubeError
from image_builder.node.net.kubeconfig import Access, Pem
from tests.unit.drain.manifests import PATCH_FAILED

BOOT = "11111111-2222-3333-4444-555555555555"
RULES = Rules()


def node(name: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "uid": "1", "annotations": {"a": "b"}},
        "spec": {"taints": [{"key": RULES.taint, "effect": "NoSchedule"}]},
        "status": {"nodeInfo": {"bootID": BOOT}},
    }


class Server(Client):
    """Nodes; the first ``changes`` patches come after another controller has changed the node's taints."""

    def __init__(self, *names: str, changes: int = 0) -> None:
        super().__init__(Access("https://lab", Pem(text="")))
        self.nodes = {name: node(name) for name in names}
        self.changes, self.patches = changes, list[list[dict[str, Any]]]()

    def request(self, method: str, path: str, body: Any = None, *_: Any) -> dict[str, Any]:
        """Answer, but for a list of all nodes: after 15 s it would break off."""
        name = path.rpartition("/")[2]
        if name not in self.nodes:
            raise KubeError(f"{method} {path}: 404 not found", 404)
        taints = self.nodes[name]["spec"]["taints"]
        if method == "PATCH":
            if self.changes:
                self.changes -= 1
                taints.append({"key": f"other-{self.changes}", "effect": "NoSchedule"})
            if any(step["op"] == "test" and step["value"] not in (taints, BOOT) for step in body):
                raise KubeError(PATCH_FAILED, 422)
            self.patches.append(body)
        return dict(json.loads(json.dumps(self.nodes[name])))

    def text(self, *_: str) -> str:
        listed = {"metadata": {"resourceVersion": "1"}, "items": [*self.nodes.values()]}
        return json.dumps(listed, separators=(",", ":"))


def test_a_node_that_changes_meanwhile_is_admitted_as_it_is_then() -> None:
    server = Server("gpu-1", changes=2)
    assert admit(server, "gpu-1", RULES, who="me", reason="r").name == "gpu-1"
    (patch,) = server.patches
    values = {step["path"].rpartition("/")[2]: step["value"] for step in patch if step["op"] == "add"}
    assert [taint["key"] for taint in values["taints"]] == ["other-1", "other-0"]
    assert json.loads(values[ADMITTED.replace("/", "~1")])["boot_id"] == BOOT


def test_an_admission_names_the_findings_that_it_is_about() -> None:
    server = Server("gpu-1")
    message = f"2 findings: clock.off: 2 s off; gpu.lost: GPU 3 (boot {BOOT})"
    ill = {"type": "NodeHealthy", "status": "False", "reason": "ClockOff", "message": message}
    server.nodes["gpu-1"]["status"]["conditions"] = [ill]
    admit(server, "gpu-1", RULES, who="me", reason="r")
    (text,) = (step["value"] for step in server.patches[0] if step["path"].endswith("admitted"))
    server.nodes["gpu-1"]["metadata"]["annotations"][ADMITTED] = text
    assert node_from(server.nodes["gpu-1"], RULES).admitted == {"ClockOff", "GpuLost"}


def test_a_node_that_never_rests_is_named() -> None:
    server = Server("gpu-1", changes=99)
    with pytest.raises(ImageBuilderError, match="gpu-1 changed meanwhile, 5 times"):
        admit(server, "gpu-1", RULES, who="me", reason="r")
    assert server.changes == 94


def test_a_list_of_all_nodes_may_take_its_time() -> None:
    server = Server("gpu-2", "gpu-1")
    assert [line["node"] for line in overview(server, RULES)] == ["gpu-1", "gpu-2"]
    assert impacts(server, RULES, (), "", 0.0) == ([], {})
