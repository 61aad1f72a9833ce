"""The report on the pods that keep a host busy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from image_builder.drain.hosts import BadHost
from image_builder.drain.ladder import Tenant
from image_builder.drain.observe import Looker
from image_builder.drain.pods import Class, Verdict, pod_from
from image_builder.drain.policy import Policy
from image_builder.drain.why import HEAD, bad_hosts, entry, explain, rows
from image_builder.node.net.kube import KubeError
from image_builder.node.status import PHYSICAL_HOST
from tests.unit.drain.manifests import pod_object

TENANT = Tenant(pod_from(pod_object()), Verdict(Class.EVICT, "its controller recreates it"), "work/Job x")


def test_a_pod_that_a_budget_holds() -> None:
    held = entry(replace(TENANT, blocked="The disruption budget keep needs 2 healthy pods"))
    ((*_, why, ends),) = rows("gpu-1", [held])
    assert (why, ends) == ("The disruption budget keep needs 2 healthy pods", "unknown")
    assert len(rows("gpu-1", [held])[0]) == len(HEAD)


def test_a_pod_that_ends_by_itself() -> None:
    pod = replace(TENANT.pod, deadline=0.0, is_leaving=True)
    said = entry(replace(TENANT, pod=pod))
    assert (said["class"], said["ends"], said["owner"]) == ("ending", "1970-01-01T00:00:00Z", "ReplicaSet x")


class Server:
    """A Node on a physical host, and the answer to the query for bad hosts."""

    def __init__(self, answer: dict[str, Any] | KubeError | None) -> None:
        self.answer = answer

    def find(self, path: str) -> dict[str, Any] | None:
        if "/nodes/" in path:
            return {"metadata": {"name": "gpu-1", "annotations": {PHYSICAL_HOST: "HOST1"}}, "spec": {}}
        if isinstance(self.answer, KubeError):
            raise self.answer
        return self.answer

    def each(self, *_: Any) -> str:
        return ""


@pytest.mark.parametrize(
    ("answer", "host"),
    [
        (None, "on HOST1"),
        ({"data": {"HOST2": "{}"}}, "on HOST1"),
        (
            {"data": {"HOST1": BadHost("HOST1", "gpu-9", "GpuLost", "", 0.0).text()}},
            "HOST1 is known as bad: gpu-9",
        ),
        # A user who may drain needn't be allowed to read what the gate keeps.
        (KubeError("no", 403), "on HOST1"),
    ],
)
def test_a_nodes_physical_host(answer: dict[str, Any] | KubeError | None, host: str) -> None:
    client: Any = Server(answer)
    state = explain(client, Looker(client, Policy()), "gpu-1", 0.0, bad_hosts(client))["state"]
    assert state.startswith("schedulable; ") and host in state


def test_what_the_server_can_not_say_is_no_silence() -> None:
    client: Any = Server(KubeError("later", 503))
    with pytest.raises(KubeError):
        bad_hosts(client)
