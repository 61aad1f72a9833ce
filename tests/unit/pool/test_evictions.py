"""A roll with a deadline: the jobs that it lists, and the confirmation that it requires."""

from __future__ import annotations

from typing import Any

import pytest

from image_builder.errors import UsageError
from image_builder.pool.evictions import jobs, never_empty, require_confirmation
from image_builder.pool.plan.policy import WaveDrain
from tests.support.pools.simulated.rolls import plan
from tests.unit.drain.manifests import pod_object
from tests.unit.drain.test_drain_run import Server

DEADLINE = "2026-01-02T00:00:00Z"


def test_only_jobs_of_its_hosts_are_listed() -> None:
    rolled = plan(3, deadline=DEADLINE)
    name = rolled.hosts[0].name
    server = Server()
    server.pods = {host: [pod_object(spec={"nodeName": host}, owner="")] for host in (name, "elsewhere")}
    assert [(job.name, job.hosts) for job in jobs(server, rolled, 0.0)] == [("work/a", (name,))]


def test_it_begins_only_where_it_is_named() -> None:
    rolled = plan(3, deadline=DEADLINE)
    require_confirmation(rolled, rolled.run)
    for confirmed in ("", "roll-000000000000", "yes"):
        with pytest.raises(UsageError, match=DEADLINE) as caught:
            require_confirmation(rolled, confirmed)
        assert caught.value.hint and f"--evict {rolled.run}" in caught.value.hint


def test_a_roll_without_a_deadline_takes_no_confirmation() -> None:
    require_confirmation(plan(3), "")
    with pytest.raises(UsageError, match="none"):
        require_confirmation(plan(3), plan(3).run)


def test_another_deadline_is_another_run() -> None:
    """The name derives from the plan's digest, so a deadline that was changed since can't be confirmed."""
    runs = {plan(3, deadline=deadline).run for deadline in (DEADLINE, "2026-01-03T00:00:00Z", "")}
    assert len(runs) == 3


GPUS = {"name": "main", "resources": {"limits": {"nvidia.com/gpu": "8"}}}


@pytest.mark.parametrize(
    ("parts", "stuck"),
    [
        # (in the default mode, in mode `evict`, after a deadline)
        ({}, (True, False, False)),
        ({"owner": "StatefulSet"}, (True, False, False)),
        ({"spec": {"containers": [GPUS]}}, (True, True, False)),
        ({"annotations": {"image-builder/drain": "wait"}}, (True, True, False)),
        ({"owner": ""}, (True, True, False)),
        ({"owner": "Job", "spec": {"restartPolicy": "Never", "containers": [GPUS]}}, (False,) * 3),
        ({"spec": {"activeDeadlineSeconds": 60}}, (False,) * 3),
        ({"meta": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}, (False,) * 3),
        ({"owner": "DaemonSet"}, (False,) * 3),
        ({"owner": "DaemonSet", "spec": {"containers": [GPUS]}}, (True, True, False)),
    ],
)
def test_hosts_that_a_roll_can_never_empty_are_found(parts: dict[str, Any], stuck: tuple[bool, ...]) -> None:
    policies: list[dict[str, Any]] = [{}, {"drain": WaveDrain(mode="evict")}, {"deadline": DEADLINE}]
    for is_stuck, policy in zip(stuck, policies, strict=True):
        rolled = plan(3, **policy)
        name = rolled.hosts[0].name
        server = Server()
        spec = {"nodeName": name, **parts.get("spec", {})}
        server.pods = {host: [pod_object(**{**parts, "spec": spec})] for host in (name, "elsewhere")}
        found = never_empty(server, rolled, 0.0)
        assert list(found) == [name] * is_stuck and all("work/a" in reason for reason in found.values())
