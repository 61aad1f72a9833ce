"""Admitting a node by hand while others change it, and the overview of a large fleet."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from image_builder.cli import gate as commands
from image_builder.cli.main import app
from image_builder.cluster.gate.admit import admit, overview
from image_builder.cluster.gate.impact import impacts
from image_builder.cluster.gate.model import ADMITTED, Rules, node_from
from image_builder.errors import ImageBuilderError, UsageError
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
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True

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
    lines, left = overview(server, RULES)
    assert [line["node"] for line in lines] == ["gpu-1", "gpu-2"] and left == []
    assert impacts(server, RULES, (), "", 0.0) == ([], {})


def failed(server: Server, name: str, code: str, pool: str) -> None:
    """Have a node fail its preflight with this code."""
    message = f"boot={BOOT} image=i failed in 9 s: {code}: it is wrong (action: inspect)"
    condition = {"type": RULES.condition, "status": "False", "message": message}
    server.nodes[name]["metadata"]["labels"] = {"pool": pool}
    server.nodes[name]["status"]["conditions"] = [condition]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    """Three nodes of a pool that a wrong test keeps out, one of another, one for another reason, and one that is in."""
    server = Server("gpu-3", "gpu-2", "gpu-1", "cpu-1", "gpu-4", "gpu-5")
    for name in ("gpu-1", "gpu-2", "gpu-3", "gpu-5"):
        failed(server, name, "gpu.ecc", "h100")
    failed(server, "cpu-1", "gpu.ecc", "a100")
    failed(server, "gpu-4", "disk.missing", "h100")
    server.nodes["gpu-5"]["spec"]["taints"] = []
    monkeypatch.setattr(commands, "connect", lambda *_: server)
    return server


def run(*arguments: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(app, ["gate", *arguments, "--json"])
    return done.exit_code, json.loads(done.stdout)


@pytest.mark.parametrize("now", ["disk.missing", "gpu.lost"])
def test_a_node_that_fails_with_another_code_meanwhile_is_not_admitted(server: Server, now: str) -> None:
    failed(server, "gpu-1", now, "h100")
    with pytest.raises(UsageError, match=rf"gpu-1 .*gpu\.ecc.*{now}"):
        admit(server, "gpu-1", RULES, who="me", reason="r", code="gpu.ecc")
    assert server.patches == []


@pytest.mark.parametrize(
    ("options", "names", "left"),
    [
        (["--pool", "h100"], ["gpu-1", "gpu-2", "gpu-3"], 0),
        (["--pool", "h100", "--limit", "2"], ["gpu-1", "gpu-2"], 1),
        (["--pool", "a100"], ["cpu-1"], 0),
    ],
)
def test_nodes_that_a_code_keeps_out_are_admitted_together(
    server: Server, options: list[str], names: list[str], left: int
) -> None:
    """First seen with --dry-run, which changes nothing, and then done."""
    command = ["admit", "--code", "gpu.ecc", *options]
    for more in (["--dry-run"], ["--reason", "INC-1"]):
        status, result = run(*command, *more)
        assert (status, [line["node"] for line in result["nodes"]], result["left"]) == (0, names, left)
        assert result["problems"] == {} and server.is_closed
        assert len(server.patches) == (0 if more == ["--dry-run"] else len(names))
    assert all(any(step["path"].endswith("admitted") for step in patch) for patch in server.patches)


def test_a_node_of_several_that_can_not_be_admitted_is_named(server: Server) -> None:
    server.changes = 5
    status, result = run("admit", "--code", "gpu.ecc", "--pool", "h100", "--reason", "INC-1")
    assert (status, list(result["problems"])) == (1, ["gpu-1"])
    assert [line["node"] for line in result["nodes"]] == ["gpu-2", "gpu-3"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "NODE or a --code"),
        (["gpu-1", "--code", "gpu.ecc", "--reason", "r"], "NODE or a --code"),
        (["gpu-1", "--limit", "2", "--reason", "r"], "need --code"),
        (["gpu-1"], "--reason is required"),
        (["--code", "gpu.ecc", "--pool", "h100"], "--reason is required"),
        (["--code", "gpu.ecc", "--dry-run"], "'a100', 'h100'"),
        (["--code", "gpu.none", "--pool", "h100", "--dry-run"], "no node of pool h100 is out"),
    ],
)
def test_whom_to_admit_has_to_be_clear(server: Server, options: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["gate", "admit", *options])
    assert done.exit_code == UsageError.exit_code and said in done.stderr and not server.patches


@pytest.mark.parametrize(
    "command", [["status"], ["admit", "gpu-1", "--reason", "r"], ["release", "x", "--reason", "r"]]
)
def test_no_connection_is_left_open(server: Server, command: list[str]) -> None:
    CliRunner().invoke(app, ["gate", *command])
    assert server.is_closed
