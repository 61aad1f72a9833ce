"""Drains with the real API server, scheduler and controllers, simulated kubelets and the documented permissions."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from image_builder.drain import fence
from image_builder.drain.ask import CHECKPOINT
from image_builder.node.net.kube import MERGE_PATCH, path_of_pod
from tests.support.control_plane import workloads
from tests.support.control_plane.drains import (
    RIGHTS,
    Fleet,
    asked,
    draining,
)
from tests.support.control_plane.gates import Cluster, manifests, running, wait_until

pytestmark = pytest.mark.root

HOSTS = [f"gpu-{number}" for number in range(64)]


@pytest.fixture(scope="module")
def fleet(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with draining(cluster, HOSTS, tmp_path_factory.mktemp("drain")) as made:
        yield made


@pytest.fixture
def hosts(fleet: Fleet) -> Iterator[list[str]]:
    """Yield four hosts that no other test uses; nothing of ours may be left on them in the end."""
    names = [fleet.unused.pop() for _ in range(4)]
    yield names
    fleet.run("free", *names)
    assert all(fleet.is_ours_nowhere(name) for name in names)


@pytest.fixture
def space(fleet: Fleet, request: pytest.FixtureRequest) -> str:
    name = request.node.name.removeprefix("test_").replace("_", "-")[:40].strip("-")
    return workloads.namespace(fleet.admin, name)


def test_idle_hosts_are_cordoned_and_freed(fleet: Fleet, hosts: list[str]) -> None:
    drained = fleet.run("drain", *hosts)
    assert {host["state"] for host in drained.values()} == {"empty"}
    assert all(map(fleet.is_fenced, hosts))
    assert fleet.node(hosts[0])["metadata"]["annotations"][fence.SCALE_DOWN] == "true"
    assert {host["state"] for host in fleet.run("free", *hosts).values()} == {"freed"}
    assert all(map(fleet.is_clean, hosts))
    # Read, cordoned, read again once it has settled, its pods a last time, and given back. If its kubelet changes the
    # Node in between, the cordon is refused, and the Node is read again.
    assert {host: fleet.requests(host) - 3 * fleet.refusals(host) for host in hosts} == dict.fromkeys(
        hosts, 8
    )


def test_a_foreign_cordon_is_never_taken_away(fleet: Fleet, hosts: list[str]) -> None:
    """R17."""
    fleet.cordon(hosts[0])
    drained = fleet.run("drain", *hosts[:2], status=16)
    assert (drained[hosts[0]]["state"], drained[hosts[1]]["state"]) == ("skipped", "empty")
    assert drained[hosts[0]]["reason"] == "cordoned by somebody else"
    assert fleet.run("free", hosts[0])[hosts[0]]["state"] == "not ours"
    taken = fleet.run("drain", hosts[0], "--take-cordoned")
    assert taken[hosts[0]]["state"] == "empty"
    fleet.run("free", hosts[0])
    assert fence.is_cordoned(fleet.node(hosts[0])) and fleet.is_ours_nowhere(hosts[0])


def test_a_host_that_a_human_uncordons(fleet: Fleet, hosts: list[str], space: str) -> None:
    """R16."""
    workloads.create(fleet.admin, space, workloads.pod("lone", hosts[0]))
    workloads.await_running(fleet.admin, space, 1)
    process = fleet.start("drain", *hosts[:2])
    assert wait_until(lambda: fleet.is_fenced(hosts[0]))
    fleet.cordon(hosts[0], on=False)
    drained = fleet.ended(process, 16)
    assert drained[hosts[0]]["reason"] == "somebody uncordoned it"
    assert drained[hosts[1]]["state"] == "empty"
    assert fleet.is_clean(hosts[0])


def test_a_budget_that_never_allows_it(fleet: Fleet, hosts: list[str], space: str) -> None:
    """R12: the host is skipped and uncordoned, and the budget is named; another host continues."""
    held, other = workloads.replica_set("held", 2, hosts[:1]), workloads.replica_set("other", 2, hosts[1:2])
    workloads.create(fleet.admin, space, held, other, workloads.budget("keep", "held", 2))
    workloads.await_running(fleet.admin, space, 4)
    workloads.await_budget(fleet.admin, space, "keep", 0)
    waited = fleet.run("why", *hosts[:2])
    assert {pod["class"] for host in waited.values() for pod in host["pods"]} == {"evict"}
    assert all("keep" in pod["budget"] for pod in waited[hosts[0]]["pods"])
    assert all(pod["budget"] == "" for pod in waited[hosts[1]]["pods"])
    assert len(workloads.pods_of(fleet.admin, space)) == 4

    drained = fleet.run("drain", *hosts[:2], "--mode", "evict", "--wait", "6", status=16)
    assert (drained[hosts[0]]["state"], drained[hosts[1]]["state"]) == ("skipped", "empty")
    assert [pod["owner"] for pod in drained[hosts[0]]["pods"]] == ["ReplicaSet held"] * 2
    assert all("keep" in pod["budget"] for pod in drained[hosts[0]]["pods"])
    assert fleet.is_clean(hosts[0]) and fleet.is_fenced(hosts[1])
    assert len(workloads.pods_of(fleet.admin, space, "held")) == 2


def test_evictions_that_are_refused(fleet: Fleet, hosts: list[str], space: str) -> None:
    """R13: a pod with two budgets is refused at once; one that tolerates cordons comes back, and is named."""
    twice = workloads.replica_set("twice", 1, hosts[:1])
    tolerations = [{"key": "node.kubernetes.io/unschedulable", "operator": "Exists", "effect": "NoSchedule"}]
    back = workloads.replica_set("back", 1, hosts[1:2], tolerations=tolerations)
    budgets = [workloads.budget(name, "twice", 0) for name in ("first", "second")]
    workloads.create(fleet.admin, space, twice, back, *budgets)
    workloads.await_running(fleet.admin, space, 2)
    drained = fleet.run("drain", *hosts[:2], "--mode", "evict", "--wait", "300", status=16)
    assert "several PodDisruptionBudgets" in drained[hosts[0]]["reason"]
    assert "it tolerates cordons" in drained[hosts[1]]["reason"]
    assert f"{space}/back-" in drained[hosts[1]]["reason"]
    assert all(map(fleet.is_clean, hosts[:2]))


def test_a_namespace_that_is_deleted_is_waited_for(fleet: Fleet, hosts: list[str], space: str) -> None:
    """R13: there, 403 doesn't mean a missing permission."""
    stuck = workloads.replica_set("stuck", 1, hosts[:1])
    stuck["spec"]["template"]["metadata"]["finalizers"] = ["example.com/hold"]
    workloads.create(fleet.admin, space, stuck)
    (pod,) = workloads.await_running(fleet.admin, space, 1)
    fleet.admin.request("DELETE", f"/api/v1/namespaces/{space}")
    process = fleet.start("drain", hosts[0], "--mode", "evict", "--wait", "120")
    assert wait_until(lambda: fleet.is_fenced(hosts[0]))
    path = path_of_pod(space, pod["metadata"]["name"])
    fleet.admin.request("PATCH", path, {"metadata": {"finalizers": None}}, MERGE_PATCH)
    assert fleet.ended(process)[hosts[0]]["state"] == "empty"


def test_a_gang_is_fenced_whole_or_not_at_all(fleet: Fleet, hosts: list[str], space: str) -> None:
    """R14: a Job with GPUs on three hosts. None of its pods is evicted, and its hosts become free together."""
    workloads.create(fleet.admin, space, workloads.job("train", 3, hosts[:3], gpus=True, seconds=86400))
    pods = workloads.await_running(fleet.admin, space, 3)
    drained = fleet.run("drain", hosts[0], "--mode", "evict", status=16)
    assert f"{space}/Job train also runs on {hosts[1]}, {hosts[2]}" in drained[hosts[0]]["reason"] or (
        f"{space}/Job train also runs on {hosts[2]}, {hosts[1]}" in drained[hosts[0]]["reason"]
    )
    assert all(map(fleet.is_clean, hosts))

    waited = fleet.run("why", hosts[0])[hosts[0]]["pods"]
    assert [(pod["owner"], pod["class"], pod["gang"]) for pod in waited] == [
        ("Job train", "wait", f"{space}/Job train")
    ]
    assert waited[0]["ends"]

    process = fleet.start("drain", hosts[0], "--mode", "evict", "--whole-gangs")
    assert wait_until(lambda: all(map(fleet.is_fenced, hosts[:3])))
    assert len(workloads.pods_of(fleet.admin, space)) == 3
    for pod in pods:
        fleet.kubelets.finish(space, pod["metadata"]["name"])
    assert {n: h["state"] for n, h in fleet.ended(process).items()} == dict.fromkeys(hosts[:3], "empty")


def test_owners_are_asked_to_save_their_work(fleet: Fleet, hosts: list[str], space: str) -> None:
    workloads.create(fleet.admin, space, workloads.job("train", 1, hosts[:1], gpus=True))
    (pod,) = workloads.await_running(fleet.admin, space, 1)
    name = pod["metadata"]["name"]
    process = fleet.start("drain", hosts[0], "--mode", "ask", "--wait", "600")

    def annotations() -> Mapping[str, str]:
        found: Mapping[str, str] = fleet.admin.request("GET", path_of_pod(space, name))["metadata"].get(
            "annotations", {}
        )
        return found

    assert wait_until(lambda: CHECKPOINT in annotations())
    events = fleet.admin.request("GET", f"/api/v1/namespaces/{space}/events")["items"]
    asked = [event for event in events if event["reason"] == "CheckpointRequested"]
    assert [event["involvedObject"]["kind"] for event in asked] == ["Job"]
    assert annotations()[CHECKPOINT] in asked[0]["message"]
    fleet.kubelets.finish(space, name)
    assert fleet.ended(process)[hosts[0]]["state"] == "empty"


def test_a_drain_that_is_terminated_gives_back_what_is_not_empty(
    fleet: Fleet, hosts: list[str], space: str
) -> None:
    workloads.create(fleet.admin, space, workloads.pod("lone", hosts[0]))
    workloads.await_running(fleet.admin, space, 1)
    process = fleet.start("drain", *hosts[:2])
    assert fleet.says(f"{hosts[1]}: empty")
    process.send_signal(signal.SIGTERM)
    drained = fleet.ended(process, 130)
    assert {name: host["state"] for name, host in drained.items()} == {hosts[0]: "skipped", hosts[1]: "empty"}
    assert drained[hosts[0]]["reason"] == "the drain was interrupted"
    assert fleet.is_clean(hosts[0]) and fleet.is_fenced(hosts[1])


def test_a_drain_that_is_killed_goes_on_or_is_undone(fleet: Fleet, hosts: list[str], space: str) -> None:
    workloads.create(fleet.admin, space, *(workloads.pod(f"lone-{host}", host) for host in hosts[:2]))
    workloads.await_running(fleet.admin, space, 2)
    process = fleet.start("drain", *hosts[:2])
    assert wait_until(lambda: all(map(fleet.is_fenced, hosts[:2])))
    process.kill()
    process.communicate()
    record = fence.record_of(fleet.node(hosts[0]))
    fleet.run("free", hosts[1])
    assert fleet.is_clean(hosts[1])
    process = fleet.start("drain", hosts[0])
    assert fleet.says(f"{hosts[0]}: its drain continues")
    fleet.kubelets.finish(space, f"lone-{hosts[0]}")
    assert fleet.ended(process)[hosts[0]]["state"] == "empty"
    assert fence.record_of(fleet.node(hosts[0])) == record


def test_nothing_is_left_of_a_drain_that_is_killed(fleet: Fleet, hosts: list[str], space: str) -> None:
    """I8: a foreign cordon stays, and ours is gone everywhere after `free`."""
    fleet.cordon(hosts[3])
    workloads.create(fleet.admin, space, workloads.pod("lone", hosts[0]))
    workloads.await_running(fleet.admin, space, 1)
    for text, times in (("cordoned", 1), ("cordoned", 3), ("empty", 2)):
        process = fleet.start("drain", *hosts, "--take-cordoned", "--mode", "evict")
        assert fleet.says(text, times)
        process.kill()
        process.communicate()
        fleet.run("free", *hosts)
        assert all(map(fleet.is_clean, hosts[:3])) and fleet.is_ours_nowhere(hosts[3])
        assert fence.is_cordoned(fleet.node(hosts[3]))


def test_a_host_of_another_run_is_left_alone(fleet: Fleet, hosts: list[str]) -> None:
    fleet.run("drain", hosts[0], "--run", "roll-7")
    drained = fleet.run("drain", hosts[0], status=16)
    assert drained[hosts[0]]["reason"] == "it is held by roll-7"
    assert fleet.run("free", hosts[0])[hosts[0]]["state"] == "not ours"
    assert fleet.run("free", hosts[0], "--run", "roll-7")[hosts[0]]["state"] == "freed"


def test_the_rights_are_enough_and_no_more(fleet: Fleet) -> None:
    """After all tests above: the requests are exactly what the roles allow, and no pod was deleted."""
    used = {(verb, resource) for verb, resource, _ in map(asked, fleet.audit()) if resource}
    rules = [rule for m in manifests(RIGHTS) if m["kind"].endswith("Role") for rule in m["rules"]]
    allowed = {(verb, name) for rule in rules for name in rule["resources"] for verb in rule["verbs"]}
    assert used == allowed
    assert ("delete", "pods") not in used


@pytest.mark.slow
def test_an_api_server_that_is_away(tmp_path: Path) -> None:
    """R18, with a control plane of its own."""
    with running(controllers=True) as cluster, draining(cluster, HOSTS[:1], tmp_path) as fleet:
        space = workloads.namespace(fleet.admin, "away")
        workloads.create(fleet.admin, space, workloads.pod("lone", HOSTS[0]))
        workloads.await_running(fleet.admin, space, 1)
        process = fleet.start("drain", HOSTS[0])
        assert wait_until(lambda: fleet.is_fenced(HOSTS[0]))
        cluster.stop_api()
        assert fleet.says("; again in")
        assert process.poll() is None
        cluster.start_api()
        fleet.kubelets.finish(space, "lone")
        assert fleet.ended(process)[HOSTS[0]]["state"] == "empty"
