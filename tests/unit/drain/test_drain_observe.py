"""The facts that a Job adds to its pods; how Nodes with many readers are read."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any, cast

import pytest

from image_builder.drain.observe import CURRENT, REMEMBERED, Cordoned, Job, Looker, job_from
from image_builder.drain.pods import Owner, pod_from
from image_builder.drain.policy import Policy
from image_builder.node.net.kube import Client
from tests.unit.drain.manifests import pod_object
from tests.unit.drain.test_drain_run import Server as Pods

START = "2026-01-01T00:00:00Z"


def job(**parts: Any) -> Job:
    return job_from({"metadata": {"name": "train", **parts.pop("meta", {})}, **parts})


def test_when_a_job_must_have_ended() -> None:
    ends = job(spec={"activeDeadlineSeconds": 60}, status={"startTime": START}).deadline
    assert ends == datetime.fromisoformat(START).timestamp() + 60
    assert job(spec={}, status={"startTime": START}).deadline is None
    assert job(spec={"activeDeadlineSeconds": 60}).deadline is None


def test_who_controls_a_job() -> None:
    reference = {"apiVersion": "jobset.x-k8s.io/v1", "kind": "JobSet", "name": "big", "uid": "u"}
    assert job(meta={"ownerReferences": [reference]}).parent is None
    parent = job(meta={"ownerReferences": [{**reference, "controller": True}]}).parent
    assert str(parent) == "JobSet big"


@pytest.mark.parametrize(
    ("api", "kind", "deadline"),
    [("batch/v1", "Job", 1767225660.0), ("apps/v1", "Job", None), ("batch/v1", "X", None)],
)
def test_a_pod_of_a_job_ends_with_it(api: str, kind: str, deadline: float | None) -> None:
    class Jobs:
        def find(self, path: str) -> dict[str, Any]:
            assert path == "/apis/batch/v1/namespaces/work/jobs/x"
            return {"metadata": {}, "spec": {"activeDeadlineSeconds": 60}, "status": {"startTime": START}}

    pod = pod_from(pod_object())
    pod = replace(pod, owner=Owner(api, kind, "x", "uid"))
    tenant = Looker(cast(Client, Jobs()), Policy())._tenant(pod, 0.0)
    assert tenant.pod.deadline == deadline


class Server:
    """An API server with Nodes by name, which lists the cordoned ones and records its requests."""

    def __init__(self, names: list[str], cordoned: set[str]) -> None:
        self.names, self.cordoned = names, cordoned
        self.asked: list[str] = []

    def find(self, path: str) -> dict[str, Any] | None:
        self.asked.append(name := path.rpartition("/")[2])
        return self._node(name) if name in self.names else None

    def each(self, path: str, take: Any) -> str:
        assert path == "/api/v1/nodes?fieldSelector=spec.unschedulable%3Dtrue&resourceVersion=0"
        self.asked.append("all")
        for name in self.names:
            if name in self.cordoned:
                take(self._node(name))
        return "7"

    def _node(self, name: str) -> dict[str, Any]:
        return {
            "metadata": {"name": name, "resourceVersion": "7"},
            "spec": {"unschedulable": name in self.cordoned},
        }


def read(cordoned: Cordoned, server: Server, name: str) -> dict[str, Any] | None:
    return cordoned.node(cast(Client, server), name)


def test_many_that_look_in_the_same_moment_look_once() -> None:
    moment = [0.0]
    names = [f"gpu-{number}" for number in range(20)]
    server, cordoned = Server(names, set(names)), Cordoned(lambda: moment[0])
    for name in names:
        assert read(cordoned, server, name) == server._node(name)
    assert server.asked == ["gpu-0", "all"]
    # A moment later the list no longer counts, and one node is too few for a new list.
    moment[0] += 1
    server.cordoned = set()
    assert read(cordoned, server, "gpu-0") == server._node("gpu-0")
    assert server.asked[2:] == ["gpu-0"]


def test_a_node_that_has_been_changed_since_is_read_by_itself() -> None:
    """What the API server remembers may be from before a change of ours."""
    server, cordoned = Server(["gpu-0"], {"gpu-0"}), Cordoned(lambda: 0.0)
    for since, asked in (("6", 1), ("6", 0), ("7", 0), ("8", 1), ("", 1)):
        before = server.asked.count("gpu-0")
        assert cordoned.node(cast(Client, server), "gpu-0", since) == server._node("gpu-0")
        assert server.asked.count("gpu-0") == before + asked, since


GPU = {"containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "8"}}}]}


@pytest.mark.parametrize(
    ("since", "version", "asked", "reads"),
    [
        (REMEMBERED, 100, ["0"], 0),
        ("100", 100, ["0"], 0),
        ("99", 100, ["0"], 0),
        # By number, not by letter.
        ("99", 9, ["0", ""], 1),
        ("101", 100, ["0", ""], 1),
        ("unknown", 100, ["0", ""], 1),
        (CURRENT, 100, [""], 0),
    ],
)
def test_a_last_look_reads_everything_only_if_the_api_server_remembers_too_little(
    since: str, version: int, asked: list[str], reads: int
) -> None:
    server = Pods()
    server.version, server.remembered = version, {}
    server.pods["gpu-1"] = [pod_object(spec=GPU)]
    looker = Looker(server, Policy())
    assert bool(looker.tenants("gpu-1", 0.0, since)) is ("" in asked)
    assert server.lists == asked and looker.full_reads == reads


def test_where_gangs_run_is_read_from_memory() -> None:
    server = Pods()
    server.pods["gpu-1"] = [pod_object(owner="Job")]
    assert Looker(server, Policy()).spread(["work", "work"]) == {"work/Job x": {"gpu-1"}}
    assert server.lists == ["0"]


def test_a_node_that_is_not_cordoned_or_gone_is_read_by_itself() -> None:
    server, cordoned = Server(["gpu-0", "gpu-1"], {"gpu-0"}), Cordoned(lambda: 0.0)
    for _ in range(2):
        read(cordoned, server, "gpu-0")
    assert read(cordoned, server, "gpu-1") == server._node("gpu-1")
    assert read(cordoned, server, "gpu-9") is None
    assert server.asked == ["gpu-0", "all", "gpu-1", "gpu-9"]
