"""What is said of the pods that keep a host busy."""

from __future__ import annotations

from dataclasses import replace

from image_builder.drain.ladder import Tenant
from image_builder.drain.pods import Class, Verdict, pod_from
from image_builder.drain.why import HEAD, entry, rows
from tests.unit.drain.manifests import pod_object

TENANT = Tenant(pod_from(pod_object()), Verdict(Class.EVICT, "its controller makes another"), "work/Job x")


def test_a_pod_that_a_budget_holds() -> None:
    held = entry(replace(TENANT, blocked="The disruption budget keep needs 2 healthy pods"))
    ((*_, why, ends),) = rows("gpu-1", [held])
    assert (why, ends) == ("The disruption budget keep needs 2 healthy pods", "unknown")
    assert len(rows("gpu-1", [held])[0]) == len(HEAD)


def test_a_pod_that_ends_by_itself() -> None:
    pod = replace(TENANT.pod, deadline=0.0, is_leaving=True)
    said = entry(replace(TENANT, pod=pod))
    assert (said["class"], said["ends"], said["owner"]) == ("ending", "1970-01-01T00:00:00Z", "ReplicaSet x")
