"""Rollouts on real hosts that aren't told to join, and those that a real API server holds up."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from image_builder.pool.steps.control_plane import SIGNER
from tests.support.control_plane.gates import (
    POOL_RIGHTS,
    Cluster,
    deny_certificate,
    give_rights,
    request_certificate,
)
from tests.support.images.builds import Workplace
from tests.support.pools.fleet import Fleet, fleet
from tests.support.pools.rollouts import Rollout, install, intents, signature, wait

pytestmark = [pytest.mark.root, pytest.mark.hosts]

# As an image's unit does on first boot.
JOIN = "node-agent join"


@pytest.fixture(scope="module")
def pool(minimal: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet(minimal, tmp_path_factory.mktemp("fleet"), 4) as hosts:
        install(hosts, range(4))
        yield hosts


@pytest.fixture(scope="module", autouse=True)
def _rights(cluster: Cluster) -> None:
    give_rights(cluster.admin, POOL_RIGHTS)


def test_where_the_image_does_it_all_nobody_is_told(rollout: Callable[..., Rollout]) -> None:
    """A host that joined on its own is up, one still joining is waited for, one that does neither has failed."""
    deadlines = {"probe": 15, "bootstrap": 6, "verify": 60}
    policy = {"mode": "verify", "waves": ["100%"], "verify": "100%", "deadlines": deadlines}
    run = rollout(0, 1, 2, policy=policy, agent="seconds=4\n")
    run.pool.run(0, "sh", "-ec", f"mkdir /run/node; {JOIN}")
    run.pool.run(1, "sh", "-ec", f"mkdir /run/node; setsid {JOIN} >/dev/null 2>&1 &")
    report = run.finish()
    signatures = {name: signature(result["outcome"]) for name, result in report["results"].items()}
    assert signatures == {"host-0": "ok", "host-1": "ok", "host-2": "failed bootstrap 5"}, report["results"]
    assert "its image should have made it a member" in report["results"]["host-2"]["outcome"]["detail"]
    assert intents(run.records, "bootstrap") == 0
    assert run.joins() == {0: 1, 1: 1, 2: 0}
    assert run.left() == []


@pytest.mark.nightly
def test_a_control_plane_that_falls_behind_holds_the_next_wave(
    rollout: Callable[..., Rollout], cluster: Cluster
) -> None:
    """A node's certificate request is pending: after the policy's patience, the run stops, touching no other host."""
    kubeconfig = str(cluster.kubeconfig("pool-operator"))
    gate = {"csr_seconds": 1, "interval_seconds": 0.5, "patience_seconds": 3}
    run = rollout(0, 1, 2, 3, policy={"waves": ["100%"], "gate": gate}, agent="seconds=3\n")
    with run.start(kubeconfig=kubeconfig) as child:
        wait(lambda: any(run.joins().values()))
        path = request_certificate(cluster, "pool-pending", SIGNER)
        out, err = child.communicate(timeout=120)
    assert child.returncode == 1, err
    report = json.loads(out)
    assert report["state"] == "stopped" and "a certificate request has been pending for" in report["reason"]
    (canary,) = (n for n, times in run.joins().items() if times)
    assert signature(report["results"][f"host-{canary}"]["outcome"]) == "ok"
    assert intents(run.records, "probe") == 1

    deny_certificate(cluster, path)
    report = run.finish(is_resumed=True, kubeconfig=kubeconfig)
    assert report["counts"]["ok"] == 4
    assert run.joins() == dict.fromkeys(range(4), 1)
    assert run.left() == []
