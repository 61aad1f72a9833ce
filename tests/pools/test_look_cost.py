"""What a look at a host costs the API server: objects that it reads from etcd, by its own counter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from image_builder.drain import taint
from image_builder.drain.handover import Handover
from image_builder.drain.observe import CURRENT, Cordoned, Looker, version_of
from image_builder.drain.policy import Policy
from image_builder.drain.run import Drain
from image_builder.node.net.kube import MERGE_PATCH, Client, path_of_node, path_of_pod
from tests.support.control_plane import workloads
from tests.support.control_plane.gates import Cluster, new_node, wait_until

pytestmark = pytest.mark.root

_AT_ONCE = 4
_READ = re.compile(
    r'^apiserver_storage_list_fetched_objects_total\{[^}]*"/?(pods|nodes)"[^}]*\} (\S+)$', re.MULTILINE
)
HOST, OTHER, SPACE = "look-0", "look-1", "looks"


def read_objects(client: Client) -> dict[str, int]:
    """Return how many pods and nodes the API server has read from etcd for lists since it started."""
    counts = {"pods": 0, "nodes": 0}
    for kind, number in _READ.findall(client.text("/metrics")):
        counts[kind] += int(float(number))
    return counts


@pytest.fixture(
    scope="module", params=[2_000, pytest.param(45_000, marks=pytest.mark.slow)], ids=["2000", "45000"]
)
def pods(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[int]:
    """Fill the cluster with pods, three of which are on one host; return how many."""
    if "apiserver_storage_list_fetched_objects_total" not in cluster.admin.text("/metrics"):
        pytest.skip("IMAGE_BUILDER_PROGRAMS names no directory of today's programs")
    number: int = request.param
    for host in (HOST, OTHER):
        cluster.admin.request("POST", "/api/v1/nodes", new_node(host))
    workloads.namespace(cluster.admin, SPACE)
    clients = [cluster.client("lab:admin", "system:masters") for _ in range(_AT_ONCE)]

    def create(part: int) -> None:
        for each in range(part, number, _AT_ONCE):
            pod = workloads.pod(f"pod-{each}", HOST if each < 3 else OTHER)
            workloads.create(clients[part], SPACE, pod)

    with ThreadPoolExecutor(_AT_ONCE) as threads:
        list(threads.map(create, range(_AT_ONCE)))
    yield number
    for path in (f"/api/v1/namespaces/{SPACE}", path_of_node(HOST), path_of_node(OTHER)):
        cluster.admin.request("DELETE", path)


def test_only_a_last_look_may_make_the_api_server_read_all_pods(pods: int, cluster: Cluster) -> None:
    client = cluster.admin
    looker = Looker(client, Policy())
    seen = len(looker.tenants(HOST, 0.0, CURRENT))
    assert seen == 3
    assert wait_until(lambda: len(looker.tenants(HOST, 0.0)) == 3)

    before = read_objects(client)
    for _ in range(5):
        assert len(looker.tenants(HOST, 0.0)) == 3
    cordoned = Cordoned()
    for _ in range(5):
        assert cordoned.node(client, HOST)
    handover = Handover(client, "roll", Policy(), 1)
    handover.add([HOST, OTHER])
    assert list(handover.turn()) == []
    drain = Drain(client, "drain", Policy(), lambda _: None, cordoned=cordoned)
    drain.add([HOST])
    drain.turn()
    assert read_objects(client) == before

    # Where pods change, the server remembers them as of a version that is newer than the taint's.
    barred = version_of(taint.bar(client, HOST, "roll"))
    labels = {"metadata": {"labels": {"changed": "yes"}}}
    changed = client.request("PATCH", path_of_pod(SPACE, "pod-0"), labels, MERGE_PATCH)
    assert int(version_of(changed)) > int(barred)
    path = f"/api/v1/namespaces/{SPACE}/pods?fieldSelector=metadata.name%3Dpod-0&resourceVersion=0"
    assert wait_until(lambda: int(client.each(path, lambda _: None)) > int(barred))
    before = read_objects(client)
    assert len(looker.tenants(HOST, 0.0, barred)) == 3
    assert (looker.full_reads, read_objects(client)) == (0, before)

    # Where none has changed since, it is asked once for what is there now; some etcds let it answer from memory.
    taint.lift(client, HOST)
    barred = version_of(taint.bar(client, HOST, "roll"))
    client.request("DELETE", f"{path_of_pod(SPACE, 'pod-0')}?gracePeriodSeconds=0")
    looker.tenants(HOST, 0.0, str(int(barred) + 10**6))
    read = read_objects(client)["pods"] - before["pods"]
    assert looker.full_reads == 1 and read <= pods + 100
