"""Half of a hundred nodes drained at once, killed midway: which are emptied, which are skipped, and at what cost."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from image_builder.drain import fence
from tests.support.control_plane import workloads
from tests.support.control_plane.drains import Fleet, asked, draining
from tests.support.control_plane.gates import Cluster, in_background
from tests.support.control_plane.workloads import budget, daemon_set, job, pod, replica_set

pytestmark = [pytest.mark.root, pytest.mark.slow]

HOSTS = [f"gpu-{number:02}" for number in range(100)]
DRAINED = HOSTS[:50]
# Jobs of five pods, each with all GPUs of its host: five end in the meantime, one never does, one extends beyond.
ENDING, ENDLESS, CROSSING = range(5), 5, HOSTS[48:53]
CORDONED = HOSTS[35:38]
STUBBORN = HOSTS[40]
BUDGETS = "/apis/policy/v1/namespaces/work/poddisruptionbudgets"


def fill(fleet: Fleet) -> None:
    """Run 400 pods: a DaemonSet's, 200 under 20 budgets, gangs with GPUs, and pods that are waited for."""
    admin = fleet.admin
    workloads.namespace(admin, "work")
    workloads.create(admin, "work", daemon_set("agent"))
    gangs = {number: HOSTS[5 * number : 5 * number + 5] for number in range(6)}
    gangs[6] = CROSSING
    gangs |= {number: HOSTS[5 * number + 20 : 5 * number + 25] for number in range(7, 12)}
    workloads.create(admin, "work", *(job(f"train-{n}", 5, hosts, gpus=True) for n, hosts in gangs.items()))
    workloads.create(admin, "work", *(pod(f"lone-{host}", host) for host in HOSTS[38:48] + HOSTS[60:70]))
    scratch: dict[str, Any] = {"volumes": [{"name": "scratch", "emptyDir": {}}]}
    workloads.create(admin, "work", replica_set("scratch", 20, HOSTS[70:], **scratch))
    for number in range(20):
        name = f"web-{number}"
        workloads.create(admin, "work", replica_set(name, 10, HOSTS), budget(name, name, 8))
    workloads.await_running(admin, "work", 400, seconds=240)
    for number in range(20):
        workloads.await_budget(admin, "work", f"web-{number}", 2)
    for host in CORDONED:
        fleet.cordon(host)


def violations(fleet: Fleet, stop: threading.Event, seen: list[str]) -> None:
    """Watch the budgets continuously: none may have fewer healthy pods than it wants."""
    client = fleet.cluster.client("watch", "system:masters", agent="violations")
    while not stop.wait(0.5):
        for item in client.request("GET", BUDGETS)["items"]:
            status = item["status"]
            if status["currentHealthy"] < status["desiredHealthy"]:
                seen.append(f"{item['metadata']['name']}: {status}")


def finish(fleet: Fleet, name: str) -> None:
    for item in workloads.pods_of(fleet.admin, "work", name):
        fleet.kubelets.finish("work", item["metadata"]["name"])


def test_half_a_fleet(cluster: Cluster, tmp_path: Path) -> None:
    broken: list[str] = []
    endless = set(HOSTS[25:30])
    with draining(cluster, HOSTS, tmp_path) as fleet:
        fill(fleet)
        with in_background(lambda stop: violations(fleet, stop, broken)):
            policy = {"poll_seconds": 1.0}
            busy = {STUBBORN, *endless}
            others = [name for name in DRAINED if name not in busy]
            process = fleet.start("drain", *others, "--mode", "evict", policy=policy)
            assert fleet.says("is evicted", 10)
            process.kill()
            process.communicate()
            process = fleet.start("drain", *others, "--mode", "evict", policy=policy)
            for number in ENDING:
                finish(fleet, f"train-{number}")
            for host in set(HOSTS[38:48]) - {STUBBORN}:
                finish(fleet, f"lone-{host}")
            drained = fleet.ended(process, 16)
            # Nothing ends there, so their patience is short.
            drained |= fleet.run("drain", *sorted(busy), "--mode", "evict", "--wait", "3", status=16)
        assert not broken

        skipped = {name for name, host in drained.items() if host["state"] == "skipped"}
        assert skipped == {*CORDONED, STUBBORN, *endless, *(set(CROSSING) & set(DRAINED))}
        assert {drained[name]["reason"] for name in CORDONED} == {"cordoned by somebody else"}
        assert f"work/Job train-{ENDLESS}" in {p["gang"] for n in endless for p in drained[n]["pods"]}
        assert [p["pod"] for p in drained[STUBBORN]["pods"]] == [f"work/lone-{STUBBORN}"]
        assert "also runs on gpu-50, gpu-51, gpu-52" in drained[HOSTS[48]]["reason"]

        emptied = set(DRAINED) - skipped
        left = [p for p in workloads.pods_of(fleet.admin, "work") if p["spec"]["nodeName"] in emptied]
        assert {p["metadata"]["labels"]["app"] for p in left} == {"agent"}
        ours = {name for name in HOSTS if not fleet.is_ours_nowhere(name)}
        assert ours == emptied
        fleet.run("free", *DRAINED)
        assert all(map(fleet.is_ours_nowhere, HOSTS))
        assert {name for name in HOSTS if fence.is_cordoned(fleet.node(name))} == set(CORDONED)

        # I7: which pods were evicted, and that nothing was deleted.
        requests = [asked(event) for event in fleet.audit()]
        evicted = {name for verb, resource, name in requests if resource == "pods/eviction"}
        assert evicted and all(name.startswith("web-") for name in evicted)
        assert not [verb for verb, _, _ in requests if verb.startswith("delete")]
        patched = {name for verb, resource, name in requests if (verb, resource) == ("patch", "nodes")}
        assert patched == emptied | {STUBBORN, *endless}
