"""An API server that goes away and comes back: the gate, a node's re-test and a pool's waves. It is only theirs."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from image_builder.cluster.gate.model import Rules
from image_builder.cluster.gate.watcher import watch_nodes
from image_builder.node.preflight import model
from image_builder.pool.steps.control_plane import SIGNER, Kubernetes
from tests.gpu.test_gate_retest import PASS, Node
from tests.support.control_plane.gates import (
    GATE,
    POOL_RIGHTS,
    Cluster,
    Machine,
    become_ready,
    controlled,
    deny_certificate,
    give_rights,
    in_background,
    new_node,
    request_certificate,
    running,
    wait_until,
)

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running() as found:
        give_rights(found.admin)
        yield found


def test_nothing_is_changed_in_the_end(cluster: Cluster, healthz: str, tmp_path: Path) -> None:
    nodes = [Machine(cluster, tmp_path, f"node-{uuid.uuid4().hex[:8]}", healthz) for _ in range(4)]
    waits: dict[str, int] = dict.fromkeys((node.name for node in nodes), 0)

    def report(node: Machine) -> None:
        def sleep(_seconds: float) -> None:
            waits[node.name] += 1
            time.sleep(0.1)

        node.report(model.PASSED, sleep=sleep)

    with controlled(cluster):
        for node in nodes[:2]:
            node.start(is_known=False)
            node.report(model.PASSED)
        assert wait_until(lambda: not any(node.is_out() for node in nodes[:2]))
        for node in nodes[2:]:
            node.start(is_known=False)
        reports = [threading.Thread(target=report, args=(node,), daemon=True) for node in nodes[2:]]
        cluster.stop_api()
        try:
            for thread in reports:
                thread.start()
            assert wait_until(lambda: all(waits[node.name] > 5 for node in nodes[2:]))
            assert all(thread.is_alive() for thread in reports)
        finally:
            cluster.start_api()
        for thread in reports:
            thread.join(120)
        assert not any(thread.is_alive() for thread in reports)
        assert wait_until(lambda: not any(node.is_out() for node in nodes))
        nodes[0].start(is_known=True)
        assert wait_until(nodes[0].is_out)


def test_a_node_whose_wish_nobody_hears_goes_on(cluster: Cluster, healthz: str, tmp_path: Path) -> None:
    """The API server is down, or there is no controller: nothing fails, and nothing is tested."""
    node = Node(cluster, tmp_path, healthz, PASS)
    cluster.stop_api()
    try:
        assert node.retest(is_heard=False) == 0
    finally:
        cluster.start_api()
    assert node.retest(is_heard=False) == 0
    wish = cluster.node(node.name).wish
    assert wish is not None and wish.boot_id == node.boot
    assert (node.was_out, node.answer) == ([], "")


def test_a_watch_from_a_forgotten_version_lists_again(cluster: Cluster, healthz: str, tmp_path: Path) -> None:
    said: list[str] = []
    seen: list[str] = []
    cluster.stop_api()
    cluster.start_api()
    client = cluster.client(GATE, agent="informer-410")
    informer = watch_nodes(client, Rules(), lambda node: seen.append(node.name), seen.append, said.append)
    informer._version = "1"  # older than anything that this API server has read
    with in_background(informer.run) as stop:
        node = Machine(cluster, tmp_path, "node-410", healthz)
        node.start(is_known=False)
        assert wait_until(lambda: node.name in seen)
        stop.set()
        informer.interrupt()
    asked = cluster.requests(agent="informer-410")
    assert asked["list", "nodes"] == 1 and informer.synced.is_set()


def test_the_waves_of_a_pool_read_a_control_plane(cluster: Cluster) -> None:
    """Counters, pending requests and nodes, as an API server returns them to a client that may read nothing else."""
    give_rights(cluster.admin, POOL_RIGHTS)
    ahead = 0.0
    with closing(Kubernetes(cluster.kubeconfig("somebody"), clock=time.time)) as other:
        assert "forbidden" in other.read().unread
        assert len(other.faults()) == 3, "each right that is missing"
    operator = cluster.kubeconfig("pool-operator")
    with (
        closing(Kubernetes(operator, clock=lambda: time.time() + ahead)) as plane,
        closing(Kubernetes(operator, joining_seconds=0.0)) as hasty,
    ):
        assert plane.faults() == []
        first = plane.read()
        assert (first.unread, first.requests, first.pending) == ("", 0, ())
        for _ in range(20):
            cluster.admin.request("GET", "/api/v1/namespaces")
        reading = plane.read()
        assert reading.requests >= 20 and reading.throttled == reading.errors == 0

        request_certificate(cluster, "pool-other", "example.com/nobody")
        ahead = 3600.0
        assert not plane.read().pending, "that it pends is nothing to a node that joins"
        path = request_certificate(cluster, "pool-pending", SIGNER)
        assert max(plane.read().pending) >= 3599
        deny_certificate(cluster, path)
        before = plane.read()
        assert not before.pending

        cluster.admin.request("POST", "/api/v1/nodes", new_node("pool-node"))
        assert wait_until(lambda: "pool-node" in hasty.read().fallen)
        assert plane.read().fallen == before.fallen, "a node that has just registered joins"
        become_ready(cluster.admin, "pool-node", "boot")
        assert wait_until(lambda: hasty.read().fallen == before.fallen)

        cluster.stop_api()
        try:
            assert plane.read().unread
        finally:
            cluster.start_api()
        again = plane.read()
        assert (again.unread, again.requests) == ("", 0), "its counters began anew: nothing is known"
