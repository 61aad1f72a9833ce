"""`gate report`: from the Nodes of a real API server to the requests that Azure's Guest Health Reporting accepts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from image_builder import errors
from image_builder.cli.main import app
from image_builder.node.net.kube import MERGE_PATCH, path_of_node
from tests.support.arm.impacts import Impacts
from tests.support.arm.model import SUBSCRIPTION
from tests.support.arm.serving import found_by, served
from tests.support.control_plane.gates import Cluster
from tests.support.control_plane.servers import ADMINISTRATORS
from tests.support.control_plane.wards import Ward, ward

pytestmark = pytest.mark.root

SET = f"/subscriptions/{SUBSCRIPTION}/resourceGroups/pools/providers/Microsoft.Compute/virtualMachineScaleSets/gpu-0"


@pytest.fixture(scope="module")
def plane(cluster: Cluster) -> Iterator[Ward]:
    with ward(cluster) as state:
        yield state


def place(plane: Ward, name: str, number: int, host: str) -> None:
    """Set where in Azure a node is."""
    plane.put_on(name, host)
    changes = {"spec": {"providerID": f"azure://{SET}/virtualMachines/{number}"}}
    plane.admin.request("PATCH", path_of_node(name), changes, MERGE_PATCH)


def test_bad_machines_are_reported_once(plane: Ward, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost, nowhere, _well = plane.nodes(3)
    place(plane, lost, 7, "GGBB90904476")
    place(plane, nowhere, 8, "")
    for name in (lost, nowhere):
        plane.report(name, "False", "GpuLost")
    access = ["--kubeconfig", str(plane.cluster.kubeconfig("operator", ADMINISTRATORS))]

    def report(*arguments: str) -> tuple[int, Any]:
        done = CliRunner().invoke(app, ["gate", "report", "--json", *access, *arguments])
        return done.exit_code, json.loads(done.stdout)

    status, shown = report()
    ((impact,), (problem,)) = shown["impacts"], shown["problems"]
    assert status == 1 and (impact["node"], problem["node"]) == (lost, nowhere)
    assert "physical host" in problem["problem"]
    refused, _ = report("--send")
    assert refused == errors.UsageError.exit_code, "all bad nodes at once are not sent"
    with served(Impacts(), tmp_path) as service:
        found_by(service.environment, monkeypatch)
        assert isinstance(service.arm, Impacts)
        assert report(lost, "--send", "--endpoint", service.url)[0] == 0
        (name, body) = next(iter(service.arm.reported.items()))
        assert body == impact["body"] and f"/{name}?" in impact["url"]
        assert body["properties"]["impactedResourceId"] == f"{SET}/virtualMachines/7"
        again, shown = report(lost, "--send", "--endpoint", service.url)
        assert again == 1 and "Conflict" in shown["problems"][0]["problem"]
        assert len(service.arm.reported) == 1
