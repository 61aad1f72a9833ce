"""Admission of nodes, decided by a real API server, a real scheduler and the controller as a separate process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from image_builder.cluster.gate.model import ADMITTED
from image_builder.node import status
from image_builder.node.net.kube import JSON_PATCH
from image_builder.node.preflight import model, report
from image_builder.node.preflight.settings import Settings as PreflightSettings
from tests.support import slices_howto
from tests.support.control_plane.gates import (
    GATE,
    Cluster,
    Machine,
    controlled,
    give_rights,
    refusal,
    wait_until,
)
from tests.support.images.builds import REPO
from tests.support.images.programs import needs_programs

pytestmark = pytest.mark.root


@pytest.fixture(scope="module", autouse=True)
def _rights(cluster: Cluster) -> None:
    give_rights(cluster.admin)


@contextmanager
def documented(cluster: Cluster) -> Iterator[None]:
    """Run the controller as documented: through the command, with only its service account's permissions."""
    argv = [sys.executable, "-P", "-m", "image_builder.cli", "gate", "run", "--kubeconfig"]
    with (
        (cluster.work / "gate.log").open("a") as log,
        subprocess.Popen(
            [*argv, os.fspath(cluster.kubeconfig(GATE, "system:serviceaccounts"))],
            cwd=REPO,
            env={**os.environ, "PYTHONPATH": os.fspath(REPO)},
            stderr=log,
            text=True,
        ) as child,
    ):
        try:
            yield
        finally:
            child.send_signal(signal.SIGTERM)
            assert child.wait() == 0


@pytest.fixture
def machine(cluster: Cluster, tmp_path: Path, healthz: str) -> Callable[[], Machine]:
    return lambda: Machine(cluster, tmp_path, f"node-{uuid.uuid4().hex[:8]}", healthz)


def pod(cluster: Cluster, machine: Machine) -> str:
    """Create a pod that can only run on one machine."""
    name = f"pod-{uuid.uuid4().hex[:8]}"
    manifest = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "nodeSelector": {"machine": machine.name},
            "containers": [{"name": "a", "image": "pause"}],
            "terminationGracePeriodSeconds": 0,
        },
    }
    cluster.admin.request("POST", "/api/v1/namespaces/default/pods", manifest)
    return name


def scheduled(cluster: Cluster, name: str) -> tuple[str, str]:
    """Return the node that a pod was assigned to, and the scheduler's message if it wasn't assigned to any."""
    found = cluster.admin.request("GET", f"/api/v1/namespaces/default/pods/{name}")
    said = [
        c.get("message", "") for c in found["status"].get("conditions", []) if c["type"] == "PodScheduled"
    ]
    return found["spec"].get("nodeName", ""), " ".join(said)


def test_a_pod_runs_on_a_node_whose_boot_passed_and_waits_on_any_other(
    cluster: Cluster, machine: Callable[[], Machine]
) -> None:
    node = machine()
    with documented(cluster):
        node.start(is_known=False)
        first = pod(cluster, node)
        assert wait_until(lambda: "taint" in scheduled(cluster, first)[1])
        assert scheduled(cluster, first)[0] == "" and node.is_out()

        assert node.report(model.PASSED) == 0
        assert wait_until(lambda: not node.is_out())
        assert wait_until(lambda: scheduled(cluster, first)[0] == node.name)
        assert (node.condition()["status"], node.condition()["reason"]) == ("True", "Passed")
        assert model.boot_of(node.condition()["message"]) == node.boot

        # Rebooted: the condition still says True, but it belongs to another boot.
        node.start(is_known=True)
        assert wait_until(node.is_out)
        second = pod(cluster, node)
        assert wait_until(lambda: "taint" in scheduled(cluster, second)[1])
        assert scheduled(cluster, second)[0] == ""

        assert node.report(model.PASSED) == 0
        assert wait_until(lambda: scheduled(cluster, second)[0] == node.name)


@pytest.mark.parametrize("state", [model.FAILED, model.INCONCLUSIVE])
def test_a_node_that_did_not_pass_stays_out(
    cluster: Cluster, machine: Callable[[], Machine], state: str
) -> None:
    bad, good = machine(), machine()
    with controlled(cluster):
        bad.start(is_known=False)
        good.start(is_known=False)
        bad.report(state, "gpu.kat.int", "replace")
        good.report(model.PASSED)
        # A later report has been processed, so the other node's state is final.
        assert wait_until(lambda: not good.is_out())
        assert bad.is_out()
    condition = bad.condition()
    assert condition["status"] == model.condition_status(state) != "True"
    assert condition["reason"] == "GpuKatInt"
    assert "gpu.kat.int" in condition["message"] and "action: replace" in condition["message"]
    labels = cluster.admin.request("GET", f"/api/v1/nodes/{bad.name}")["metadata"]["labels"]
    assert labels[status.PREFLIGHT_LABEL] == status.FAILED


def test_a_known_node_that_fails_is_out_before_its_kubelet_starts(
    cluster: Cluster, machine: Callable[[], Machine]
) -> None:
    node = machine()
    with controlled(cluster):
        node.start(is_known=False)
        node.report(model.PASSED)
        assert wait_until(lambda: not node.is_out())
        # The next boot fails. Its kubelet hasn't reported anything yet: the boot ID is still the old one.
        before = node.boot
        node.boot = str(uuid.uuid4())
        (node.directory / model.FILE).write_text(
            json.dumps(node.verdict(model.FAILED, "gpu.bw.h2d", "replace"))
        )
        report.try_now(PreflightSettings(kubeconfig=os.fspath(node.kubeconfig)), node.directory)
        assert wait_until(node.is_out)
        assert cluster.node(node.name).boot_id == before


def test_a_report_is_sent_once(cluster: Cluster, machine: Callable[[], Machine]) -> None:
    node = machine()
    node.start(is_known=False)
    before = cluster.requests(agent="node-agent")
    assert node.report(model.PASSED) == 0
    assert node.report(model.PASSED) == 0
    asked = cluster.requests(agent="node-agent") - before
    # The second one only looks whether the Node still has it.
    assert dict(asked) == {("patch", "nodes/status"): 1, ("get", "nodes"): 1}


def test_a_node_can_neither_let_itself_in_nor_speak_for_another(
    cluster: Cluster, machine: Callable[[], Machine]
) -> None:
    one, other = machine(), machine()
    one.start(is_known=False)
    other.start(is_known=False)
    untaint = [{"op": "replace", "path": "/spec/taints", "value": []}]
    path = f"/api/v1/nodes/{one.name}"
    refused = refusal(lambda: one.kubelet.request("PATCH", path, untaint, JSON_PATCH))
    assert refused["status"] == 403 and "taints" in refused["message"]
    refused = refusal(
        lambda: one.kubelet.patch_condition(other.name, model.CONDITION, "True", "Passed", "boot=")
    )
    assert refused["status"] == 403
    assert one.is_out() and other.condition() == {}


def _run(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, which ends with its connections."""
    argv = [sys.executable, "-P", "-m", "image_builder.cli", *words]
    return subprocess.run(
        argv, env={**os.environ, "PYTHONPATH": os.fspath(REPO)}, capture_output=True, text=True
    )


def test_break_glass_lets_one_boot_in_without_the_controller(
    cluster: Cluster, machine: Callable[[], Machine]
) -> None:
    node, marker = machine(), machine()
    node.start(is_known=False)
    node.report(model.FAILED, "gpu.config", "config")
    admin = os.fspath(cluster.kubeconfig("lab:admin", "system:masters"))
    access = ["--kubeconfig", admin, "--json"]
    admit = ["gate", "admit", node.name, "--reason", "INC-1", "--by", "someone"]
    done = _run([*admit, *access])
    assert done.returncode == 0, done.stderr
    assert "gpu.config" in json.loads(done.stdout)["was"]
    assert not node.is_out()
    found = cluster.admin.request("GET", f"/api/v1/nodes/{node.name}")["metadata"]["annotations"][ADMITTED]
    record = json.loads(found)
    assert (record["by"], record["reason"], record["boot_id"]) == ("someone", "INC-1", node.boot)
    assert record["at"].endswith("Z")
    with controlled(cluster):
        marker.start(is_known=False)
        marker.report(model.PASSED)
        assert wait_until(lambda: not marker.is_out())
        assert not node.is_out()  # the controller honors it
        node.start(is_known=True)
        assert wait_until(node.is_out)  # only for that boot
    shown = _run(["gate", "status", *access])
    lines = {line["node"]: line for line in json.loads(shown.stdout)["nodes"]}
    assert lines[marker.name] == {**lines[marker.name], "gate": "in", "may_work": "yes"}
    assert lines[node.name]["why"] == "the report is from another boot"


def test_without_the_controller_nodes_stay_out_and_its_start_settles_them(
    cluster: Cluster, machine: Callable[[], Machine]
) -> None:
    passed, failed = machine(), machine()
    for node in (passed, failed):
        node.start(is_known=False)
    passed.report(model.PASSED)
    failed.report(model.FAILED, "gpu.kat.int", "replace")
    assert passed.is_out() and failed.is_out()
    with controlled(cluster):
        assert wait_until(lambda: not passed.is_out())
        assert failed.is_out()


def test_one_of_two_controllers_acts_and_the_other_takes_over(
    cluster: Cluster, machine: Callable[[], Machine]
) -> None:
    def leads(name: str) -> bool:
        lease = cluster.admin.find(
            "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/image-builder-gate"
        )
        return lease is not None and lease["spec"]["holderIdentity"] == name

    with ExitStack() as second, ExitStack() as first:
        first.enter_context(controlled(cluster, identity="gate-one"))
        assert wait_until(lambda: leads("gate-one"))
        second.enter_context(controlled(cluster, identity="gate-two"))
        node = machine()
        node.start(is_known=False)
        node.report(model.PASSED)
        assert wait_until(lambda: not node.is_out())
        assert leads("gate-one")
        first.close()
        assert wait_until(lambda: leads("gate-two"))
        node.start(is_known=True)
        assert wait_until(node.is_out)
        patches = [cluster.requests(agent=f"gate-{n}")["patch", "nodes"] for n in ("one", "two")]
        assert patches == [1, 1]


def test_rights_are_no_more_than_it_needs(cluster: Cluster) -> None:
    client = cluster.client(GATE)
    assert refusal(lambda: client.request("GET", "/api/v1/namespaces/kube-system/secrets"))["status"] == 403
    assert refusal(lambda: client.request("DELETE", "/api/v1/nodes/any"))["status"] == 403


@needs_programs
def test_the_documented_job_of_slices_is_one(cluster: Cluster) -> None:
    """From docs/how-to/run-slices-elsewhere.md: the API server keeps every field, and accepts it only with numbers."""
    job, path = yaml.safe_load(slices_howto.manifest()), "/apis/batch/v1/namespaces/default/jobs"
    assert "completions" in refusal(lambda: cluster.admin.request("POST", path, job))["message"]
    job = yaml.safe_load(slices_howto.manifest().replace("SLICES", "2"))
    made = cluster.admin.request("POST", path, job)
    assert lost(job["spec"], made["spec"]) == []
    job["metadata"]["name"], job["spec"]["template"]["spec"]["restartPolicy"] = "wrong", "Always"
    assert "restartPolicy" in refusal(lambda: cluster.admin.request("POST", path, job))["message"]


def lost(wanted: Any, found: Any, path: str = "spec") -> list[str]:
    """Return the paths where ``found`` lacks something wanted; it may contain more."""
    if isinstance(wanted, dict):
        return [
            place
            for key, value in wanted.items()
            for place in (lost(value, found[key], f"{path}.{key}") if key in found else [f"{path}.{key}"])
        ]
    if isinstance(wanted, list):
        pairs = zip(wanted, found, strict=True)
        return [place for n, (a, b) in enumerate(pairs) for place in lost(a, b, f"{path}[{n}]")]
    return [] if wanted == found else [path]
