"""Rolls that nobody drives, told from those that somebody does by the Leases of their scale sets."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from typer.testing import CliRunner

from image_builder.cli import gate as commands
from image_builder.cli.main import app
from image_builder.cluster.gate.abandoned import PATIENCE, Watch, marks
from image_builder.cluster.gate.health import Health
from image_builder.cluster.gate.model import Node
from image_builder.drain import event, fence
from image_builder.drain.lease import NAMESPACE, lease_of, leases_path
from image_builder.node.net.kube import Client, KubeError
from image_builder.node.net.kubeconfig import Access, Pem
from image_builder.text import stamp

SETS = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/virtualMachineScaleSets"
SET, RUN = f"{SETS}/gpu-0", "roll-1f0c7a9b2e44"
NOW = 1_700_000_000.0


def node(name: str, scale_set: str = SET, **health: Any) -> Node:
    return Node(name, health=Health(scale_set=scale_set.lower(), **health))


def test_whose_marks_are_on_which_nodes() -> None:
    nodes = [
        node("b", cordon=RUN),
        node("a", cordon=RUN, barred_by=RUN),
        node("c", f"{SETS}/gpu-1", barred_by="roll-2"),
        node("d"),
        node("e", cordon="drain-1"),
        node("f", cordon="gate"),
        node("g", "", cordon=RUN),
    ]
    found = [(mark.run, mark.scale_set, mark.nodes) for mark in marks(nodes)]
    assert found == [(RUN, SET.lower(), ("a", "b")), ("roll-2", f"{SETS}/gpu-1".lower(), ("c",))]


@dataclass
class Server(Client):
    """Leases, Events and nodes with a roll's cordon. ``holder`` renews the Lease at each look."""

    holder: str = ""
    renewed: float = NOW
    events: list[dict[str, Any]] = field(default_factory=list)
    is_away: bool = False

    def __post_init__(self) -> None:
        super().__init__(Access("https://lab", Pem(text="")))

    def request(self, method: str, path: str, body: Any = None, *_: Any) -> dict[str, Any]:
        if method == "POST" and path == event.PATH:
            self.events.append(body)
            return {}
        if not path.endswith("/gpu-0"):
            raise KubeError("404 not found", 404)
        return {"metadata": {"name": "gpu-0", "uid": "u"}}

    def text(self, path: str, *_: str) -> str:
        if self.is_away:
            raise KubeError("503", 503)
        items: list[dict[str, Any]] = []
        if path.startswith(leases_path(NAMESPACE)) and self.holder is not None:
            spec = {
                "holderIdentity": self.holder,
                "renewTime": stamp(self.renewed),
                "leaseDurationSeconds": 120,
            }
            items = [{"metadata": {"name": lease_of(SET)}, "spec": spec}]
        elif "/nodes" in path:
            record = fence.Record(RUN, NOW).text()
            meta = {"name": "gpu-0", "uid": "u", "annotations": {fence.CORDON: record}}
            spec = {"providerID": f"azure://{SET}/virtualMachines/0", "unschedulable": True}
            items = [{"metadata": meta, "spec": spec, "status": {}}]
        return json.dumps({"metadata": {"resourceVersion": "1"}, "items": items}, separators=(",", ":"))


def watched(
    server: Server, seconds: float, nodes: list[Node] | None = None, *, advises: bool = False
) -> list[str]:
    """Watch for this long, every half a minute; return the log."""
    log: list[str] = []
    at = [0.0]
    watch = Watch(server, log.append, lambda: at[0])
    while at[0] <= seconds:
        if server.holder:
            server.renewed += 30.0
        watch.turn(
            nodes or [node("gpu-1", cordon=RUN), node("gpu-0", cordon=RUN)], NOW + at[0], advises=advises
        )
        at[0] += 30.0
    return log


@pytest.mark.parametrize(
    ("holder", "seconds", "reports"),
    [
        ("", PATIENCE - 30, 0),
        ("", PATIENCE, 1),
        ("", PATIENCE + 3570, 1),
        # Its Events are kept for an hour.
        ("", PATIENCE + 3600, 2),
        ("roll-1/somebody", 4 * PATIENCE, 0),
    ],
)
def test_the_controller_reports_a_roll_that_nobody_drives(holder: str, seconds: float, reports: int) -> None:
    server = Server(holder)
    log = watched(server, seconds)
    assert len(log) == len(server.events) == reports
    for posted in server.events:
        assert (posted["reason"], posted["type"]) == ("RollAbandoned", "Warning")
        assert posted["involvedObject"]["name"] == "gpu-0" and "2 nodes of gpu-0" in posted["message"]
        assert f"pool abort --run {RUN}" in posted["message"]


def test_a_driver_that_is_killed_is_missed_once_its_lease_has_run_out() -> None:
    """Nobody renews the Lease any more, but its holder is still in it."""
    server = Server("roll-1/dead")
    log: list[str] = []
    at = [0.0]
    watch = Watch(server, log.append, lambda: at[0])
    while not log and at[0] < 9000:
        watch.turn([node("gpu-0", cordon=RUN)], NOW)
        at[0] += 30.0
    assert 120 + PATIENCE <= at[0] - 30 <= 120 + PATIENCE + 60


def test_what_can_not_be_read_or_is_gone_is_not_reported() -> None:
    server = Server("", is_away=True)
    assert {*watched(server, 2 * PATIENCE)} == {"the leases of scale sets: 503"} and not server.events
    server = Server("")
    assert watched(server, 2 * PATIENCE, [node("gpu-0")]) == []
    assert len(watched(server, PATIENCE, advises=True)) == 1 and not server.events


@pytest.mark.parametrize(("age", "found"), [(60.0, 0), (PATIENCE + 60, 1)])
def test_the_status_of_the_gate_has_a_line_of_it(
    monkeypatch: pytest.MonkeyPatch, age: float, found: int
) -> None:
    server = Server("roll-1/dead", renewed=NOW - age)
    monkeypatch.setattr(commands, "connect", lambda *_: server)
    monkeypatch.setattr("image_builder.cluster.gate.admit.time.time", lambda: NOW)
    shown = json.loads(CliRunner().invoke(app, ["gate", "status", "--json"]).stdout)
    assert [(entry["run"], entry["nodes"]) for entry in shown["abandoned"]] == [(RUN, ["gpu-0"])] * found
    text = CliRunner().invoke(app, ["gate", "status"]).stdout
    assert text.count(f"pool abort --run {RUN}") == found
