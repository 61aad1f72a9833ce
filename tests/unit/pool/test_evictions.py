"""A roll with a deadline: the jobs that it lists, and the confirmation that it requires."""

from __future__ import annotations

import pytest

from image_builder.errors import UsageError
from image_builder.pool.evictions import jobs, require_confirmation
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
