"""The jobs that would be evicted: by gang or controller, with their GPUs, hosts and age."""

from __future__ import annotations

from typing import Any

from image_builder.drain.jobs import Job, evicted_jobs, table
from image_builder.drain.observe import Looker
from image_builder.drain.policy import Policy, Rule
from tests.unit.drain.manifests import pod_object
from tests.unit.drain.test_drain_run import Server

START = 1_767_225_600.0


def member(name: str, host: str, **parts: Any) -> dict[str, Any]:
    container = {"name": "main", "resources": {"limits": {"nvidia.com/gpu": "8"}}}
    return pod_object(name, spec={"nodeName": host, "containers": [container]}, **parts)


def looked_at(pods: list[dict[str, Any]], *rules: Rule) -> list[Job]:
    server = Server()
    server.pods = {pod["spec"]["nodeName"]: [] for pod in pods}
    for pod in pods:
        server.pods[pod["spec"]["nodeName"]].append(pod)
    server.pods["elsewhere"] = [member("x", "elsewhere")]
    looker = Looker(server, Policy(rules=rules), overrules=True)
    return evicted_jobs(looker.tenants_of({"gpu-1", "gpu-2"}, START))


def test_pods_are_listed_by_what_they_belong_to() -> None:
    gang = {"labels": {"kueue.x-k8s.io/pod-group-name": "train"}}
    jobs = looked_at(
        [
            member("a", "gpu-1", **gang),
            member("b", "gpu-2", **gang),
            pod_object("web-1"),
            pod_object("web-2"),
            pod_object("alone", owner=""),
            pod_object("agent", owner="DaemonSet"),
        ]
    )
    assert [(job.name, job.pods, job.gpus, job.hosts) for job in jobs] == [
        ("work/PodGroup train", 2, 16, ("gpu-1", "gpu-2")),
        ("work/ReplicaSet x", 2, 0, ("gpu-1",)),
        ("work/alone", 1, 0, ("gpu-1",)),
    ]
    assert {job.started for job in jobs} == {START}


def test_what_stays_is_not_listed() -> None:
    """A pod that stays is protected by a rule, or already terminating."""
    leaving = pod_object("going", meta={"deletionTimestamp": "2026-01-01T00:00:00Z"})
    assert looked_at([member("a", "gpu-1", labels={"app": "keep"})], Rule(action="wait")) == []
    assert looked_at([leaving]) == []


def test_the_table_says_how_long_they_run() -> None:
    hosts = tuple(f"gpu-{number}" for number in range(7))
    job = Job("work/Job train", 7, 56, START, "has GPUs", hosts)
    lines = table([job, Job("work/x", 1, 0, None, "", hosts[:1])], START + 7200).splitlines()
    assert "2:00:00 h" in lines[1] and lines[1].endswith("gpu-4 and 2 more") and "unknown" in lines[2]
