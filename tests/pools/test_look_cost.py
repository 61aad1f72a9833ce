"""What a look at a host costs the API server: objects that it reads from etcd, by its own counter."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from image_builder.drain import taint
from image_builder.drain.handover import Handover
from image_builder.drain.observe import CURRENT, Cordoned, Looker, version_of
from image_builder.drain.policy import Policy
from image_builder.drain.run import Drain
from image_builder.node.net.kube import MERGE_PATCH, Client, path_of_pod
from tests.support.control_plane import workloads
from tests.support.control_plane.gates import Cluster, new_node, wait_until

pytestmark = pytest.mark.root

_AT_ONCE = 4
_READ = re.compile(
    r'^apiserver_storage_list_fetched_objects_total\{[^}]*"/?(pods|nodes)"[^}]*\} (\S+)$', re.MULTILINE
)


def _names(number: int) -> tuple[str, str, str]:
    """Return two hosts and a namespace."""
    return f"look-{number}", f"look-{number}-other", f"looks-{number}"


def read_objects(client: Client) -> dict[str, int]:
    """Return how many pods and nodes the API server has read from etcd for lists since it started."""
    counts = {"pods": 0, "nodes": 0}
    for kind, number in _READ.findall(client.text("/metrics")):
        counts[kind] += int(float(number))
    return counts


@pytest.fixture(
    scope="module", params=[2_000, pytest.param(45_000, marks=pytest.mark.slow)], ids=["2000", "45000"]
)
def pods(request: pytest.FixtureRequest, cluster: Cluster) -> int:
    """Fill the cluster with pods, three of which are on one host; return how many."""
    if "apiserver_storage_list_fetched_objects_total" not in cluster.admin.text("/metrics"):
        pytest.skip("IMAGE_BUILDER_PROGRAMS names no directory of today's programs")
    number: int = request.param
    host, other, space = _names(number)
    for name in (host, other):
        cluster.admin.request("POST", "/api/v1/nodes", new_node(name))
    workloads.namespace(cluster.admin, space)
    clients = [cluster.client("lab:admin", "system:masters") for _ in range(_AT_ONCE)]

    def create(part: int) -> None:
        for each in range(part, number, _AT_ONCE):
            pod = workloads.pod(f"pod-{each}", host if each < 3 else other)
            workloads.create(clients[part], space, pod)

    with ThreadPoolExecutor(_AT_ONCE) as threads:
        list(threads.map(create, range(_AT_ONCE)))
    return number


def test_only_a_last_look_may_make_the_api_server_read_all_pods(pods: int, cluster: Cluster) -> None:
    client, (host, other, space) = cluster.admin, _names(pods)
    looker = Looker(client, Policy())
    seen = len(looker.tenants(host, 0.0, CURRENT))
    assert seen == 3
    assert wait_until(lambda: len(looker.tenants(host, 0.0)) == 3)

    before = read_objects(client)
    for _ in range(5):
        assert len(looker.tenants(host, 0.0)) == 3
    cordoned = Cordoned()
    for _ in range(5):
        assert cordoned.node(client, host)
    handover = Handover(client, "roll", Policy(), 1)
    handover.add([host, other])
    assert list(handover.turn()) == []
    drain = Drain(client, "drain", Policy(), lambda _: None, cordoned=cordoned)
    drain.add([host])
    drain.turn()
    assert read_objects(client) == before

    # Where pods change, the server remembers them as of a version that is newer than the taint's.
    barred = version_of(taint.bar(client, host, "roll"))
    labels = {"metadata": {"labels": {"changed": "yes"}}}
    changed = client.request("PATCH", path_of_pod(space, "pod-0"), labels, MERGE_PATCH)
    assert int(version_of(changed)) > int(barred)
    path = f"/api/v1/namespaces/{space}/pods?fieldSelector=metadata.name%3Dpod-0&resourceVersion=0"
    assert wait_until(lambda: int(client.each(path, lambda _: None)) > int(barred))
    before = read_objects(client)
    assert len(looker.tenants(host, 0.0, barred)) == 3
    assert (looker.full_reads, read_objects(client)) == (0, before)

    # Where none has changed since, it is asked once for what is there now; some etcds let it answer from memory.
    taint.lift(client, host)
    barred = version_of(taint.bar(client, host, "roll"))
    client.request("DELETE", f"{path_of_pod(space, 'pod-0')}?gracePeriodSeconds=0")
    looker.tenants(host, 0.0, str(int(barred) + 10**6))
    read = read_objects(client)["pods"] - before["pods"]
    assert looker.full_reads == 1 and read <= pods + 100
