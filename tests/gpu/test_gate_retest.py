"""Retests of a node in service, with a real API server, scheduler and controller, and the documented rights.

Only the smoke test is a stand-in, for lack of a GPU: a program that exits as `node-agent gpu-smoke` does.
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from image_builder.cluster.gate.model import Rules, node_from
from image_builder.cluster.gate.retest import Limits, is_away
from image_builder.node.preflight import model, retest
from tests.support.control_plane.gates import (
    Cluster,
    Machine,
    controlled,
    give_rights,
    wait_until,
)

pytestmark = pytest.mark.root

ANSWERS = (model.GRANTED, model.REFUSED)
WEEK = 8 * 86400.0
PASS = {"status": "pass", "exit_code": 0, "summary": "8 GPUs"}
WRONG = {"status": "fail", "exit_code": 1, "reason_code": "kat.int", "summary": "kat.int: mismatch in SM 7"}
EAGER = Limits(share=1.0, least=50, period=86400)
BUSY = {"status": "inconclusive", "exit_code": 3, "reason_code": "procs.foreign", "summary": "procs: in use"}


@pytest.fixture(scope="module", autouse=True)
def _rights(cluster: Cluster) -> None:
    give_rights(cluster.admin)


class Node(Machine):
    """A working node with GPUs that was tested a week ago, and its retest."""

    def __init__(self, cluster: Cluster, directory: Path, healthz: str, verdict: dict[str, Any]) -> None:
        super().__init__(cluster, directory, f"node-{uuid.uuid4().hex[:8]}", healthz)
        self.document = verdict
        self.was_out: list[bool] = []
        self.start(is_known=False)
        assert self.report(model.PASSED) == 0
        settings = {"kubeconfig": os.fspath(self.kubeconfig), "healthz": healthz, "jitter_seconds": 0}
        (self.directory / "etc/preflight.json").write_text(json.dumps(settings))
        (self.directory / "etc/gpu.json").write_text("{}")

    def verdict(self, state: str, code: str = "", action: str = "none") -> dict[str, Any]:
        started = datetime.fromtimestamp(datetime.now(UTC).timestamp() - WEEK, UTC).isoformat()
        return {**super().verdict(state, code, action), "started": started}

    def _smoke(self, tier: str) -> Sequence[str]:
        assert tier == "periodic"
        self.was_out.append(self.is_out())
        said = json.dumps({"boot_id": self.boot, "verdict": self.document})
        return [sys.executable, "-c", f"print({said!r}); raise SystemExit({self.document['exit_code']})"]

    def retest(self, *, is_heard: bool = True) -> int:
        """Do what the timer starts; between two looks the gate has two turns, unless it answers."""

        def turns() -> int:
            return self.cluster.requests(agent="gate")["get", "configmaps"]

        def later(_seconds: float) -> None:
            last = turns() + 2
            assert not is_heard or wait_until(lambda: self.answer in ANSWERS or turns() >= last)

        return retest.run(
            retest.Places(
                self.directory / "run",
                self.directory / "etc",
                boot_id=self.directory / "boot_id",
                smoke=self._smoke,
                sleep=later,
            )
        )

    @property
    def answer(self) -> str:
        found = self.cluster.node(self.name).answer
        return found.state if found else ""


def pod_with_a_gpu(cluster: Cluster, node: Node) -> str:
    """Put a pod with a GPU on a node, in the state in which a scheduler that bound it leaves it."""
    name = f"pod-{uuid.uuid4().hex[:8]}"
    gpu = {"limits": {"nvidia.com/gpu": "1"}, "requests": {"nvidia.com/gpu": "1"}}
    spec = {"nodeName": node.name, "containers": [{"name": "a", "image": "pause", "resources": gpu}]}
    manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
    cluster.admin.request("POST", "/api/v1/namespaces/default/pods", manifest)
    return name


def test_an_idle_node_is_tested_again_out_of_service_and_comes_back(
    cluster: Cluster, healthz: str, tmp_path: Path
) -> None:
    with controlled(cluster, limits=EAGER):
        node = Node(cluster, tmp_path, healthz, PASS)
        assert wait_until(lambda: not node.is_out())
        before = cluster.requests(agent="node-agent")
        assert node.retest() == 0
        assert node.was_out == [True]
        assert wait_until(lambda: not node.is_out())
        asked = cluster.requests(agent="node-agent") - before
    assert model.retest_of(node.condition()["message"]) and node.condition()["status"] == "True"
    # One for the request, one for the report; there may be as many reads as it takes.
    assert {what: n for what, n in asked.items() if what[0] != "get"} == {
        ("patch", "nodes"): 1,
        ("patch", "nodes/status"): 1,
    }
    assert 1 <= asked["get", "nodes"] <= retest.LOOKS
    # It has only just been tested, so it requests nothing.
    assert node.retest() == 0 and len(node.was_out) == 1


def test_a_wrong_answer_keeps_the_node_out(cluster: Cluster, healthz: str, tmp_path: Path) -> None:
    with controlled(cluster, limits=EAGER):
        node, other = (Node(cluster, tmp_path, healthz, WRONG) for _ in range(2))
        assert wait_until(lambda: not node.is_out() and not other.is_out())
        assert node.retest() == 0
        assert wait_until(lambda: node.condition()["status"] == "False")
        # A later change has been processed, so this node's state is final.
        other.start(is_known=True)
        assert wait_until(other.is_out)
        assert node.is_out()
    assert node.condition()["reason"] == "KatInt" and "action: replace" in node.condition()["message"]


def test_gpus_in_use_are_not_tested(cluster: Cluster, healthz: str, tmp_path: Path) -> None:
    """GPUs count as in use if either the API server or the smoke test says so."""
    with controlled(cluster, limits=EAGER):
        node, used = Node(cluster, tmp_path, healthz, PASS), Node(cluster, tmp_path, healthz, BUSY)
        assert wait_until(lambda: not node.is_out() and not used.is_out())
        pod = pod_with_a_gpu(cluster, node)
        assert node.retest() == 0
        assert (node.was_out, node.answer) == ([], model.REFUSED) and not node.is_out()
        cluster.admin.request("DELETE", f"/api/v1/namespaces/default/pods/{pod}?gracePeriodSeconds=0")
        assert used.retest() == 0
        assert used.was_out == [True]
        assert wait_until(lambda: not used.is_out())
        assert used.condition()["status"] == "True"


def test_failed_nodes_keep_their_places_and_the_breaker_opens(
    cluster: Cluster, healthz: str, tmp_path: Path
) -> None:
    one, two, good, last = (
        Node(cluster, tmp_path, healthz, verdict) for verdict in (WRONG, WRONG, PASS, PASS)
    )
    fleet = [node_from(found, Rules()) for found in cluster.admin.request("GET", "/api/v1/nodes")["items"]]
    places = sum(is_away(node) for node in fleet) + 2
    with controlled(cluster, limits=replace(EAGER, share=(places + 0.5) / len(fleet))):
        assert wait_until(lambda: not any(node.is_out() for node in (one, two, good, last)))
        assert one.retest() == two.retest() == 0
        assert one.was_out == two.was_out == [True]
        # Both stay out and occupy all the slots: no other node is taken out of service.
        assert good.retest() == 0
        assert (good.was_out, good.answer) == ([], "") and not good.is_out()
    with controlled(cluster, limits=replace(EAGER, least=2)) as said:
        assert last.retest() == 0
        assert (last.was_out, last.answer) == ([], model.REFUSED) and not last.is_out()
        assert one.is_out() and two.is_out()
    assert f"{last.name}: re-test refused (boot {last.boot})" in said
