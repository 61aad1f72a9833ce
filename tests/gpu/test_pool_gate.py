"""The gate for a pool's waves against a real API server: what it reads there, with the permissions it says it needs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from image_builder.pool.steps.control_plane import SIGNER, Kubernetes
from tests.support.control_plane.gates import (
    POOL_RIGHTS,
    Cluster,
    become_ready,
    deny_certificate,
    give_rights,
    new_node,
    request_certificate,
    running,
    wait_until,
)

pytestmark = [pytest.mark.root, pytest.mark.process, pytest.mark.image("control_plane")]

_JOINING = 3.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running() as found:
        yield found


def test_the_waves_of_a_pool_read_a_control_plane(cluster: Cluster) -> None:
    """Counters, pending requests and nodes, as an API server returns them to a client that may read nothing else."""
    give_rights(cluster.admin, POOL_RIGHTS)
    ahead = 0.0
    with closing(Kubernetes(cluster.kubeconfig("somebody"), clock=time.time)) as other:
        assert "forbidden" in other.read().unread
        assert len(other.faults()) == 3, "each right that is missing"
    with closing(
        Kubernetes(
            cluster.kubeconfig("pool-operator"), clock=lambda: time.time() + ahead, joining_seconds=_JOINING
        )
    ) as plane:
        assert plane.faults() == []
        first = plane.read()
        assert (first.unread, first.requests, first.csr_seconds) == ("", 0, 0.0)
        for _ in range(20):
            cluster.admin.request("GET", "/api/v1/namespaces")
        reading = plane.read()
        assert reading.requests >= 20 and reading.throttled == reading.errors == 0

        request_certificate(cluster, "pool-other", "example.com/nobody")
        ahead = 3600.0
        assert plane.read().csr_seconds == 0.0, "that it pends is nothing to a node that joins"
        path = request_certificate(cluster, "pool-pending", SIGNER)
        assert plane.read().csr_seconds >= 3599
        deny_certificate(cluster, path)
        before = plane.read()
        assert before.csr_seconds == 0.0

        cluster.admin.request("POST", "/api/v1/nodes", new_node("pool-node"))
        assert plane.read().not_ready == before.not_ready, "a node that has just registered joins"
        assert wait_until(lambda: plane.read().not_ready == before.not_ready + 1)
        become_ready(cluster.admin, "pool-node", "boot")
        assert wait_until(lambda: plane.read().not_ready == before.not_ready)

        cluster.stop_api()
        try:
            assert plane.read().unread
        finally:
            cluster.start_api()
        again = plane.read()
        assert (again.unread, again.requests) == ("", 0), "its counters began anew: nothing is known"
