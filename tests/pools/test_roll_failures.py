"""Failures during a roll, on a real control plane: each has the outcome that the failure matrix specifies.

The matrix is in tests/unit/pool/test_roll_failures.py. All tests share one control plane, and each has two scale sets
of its own; the invariants of a roll are checked after each.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from image_builder.drain import fence, taint
from image_builder.errors import PoolError
from image_builder.node.net.kube import MERGE_PATCH, STRATEGIC_MERGE, path_of_node
from image_builder.pool.plan.model import ended
from image_builder.pool.plan.plan import save
from image_builder.pool.run.records import Stopped, Turned
from image_builder.pool.run.state import Progress
from image_builder.pool.scale_set.client import HOLD_TAG
from image_builder.pool.show.report import counts, report
from image_builder.pool.steps.survey import NO_NODE, NOT_READY, missing_hosts
from tests.support.arm.fleet import BUILDS, NEW, OLD
from tests.support.arm.model import Answer, Fault, Request, error
from tests.support.arm.serving import found_by
from tests.support.control_plane import workloads
from tests.support.control_plane.gates import Cluster, in_background, wait_until
from tests.support.images.builds import REPO
from tests.support.pools import invariants
from tests.support.pools.rolls import GENEROUS, World, plan, world

pytestmark = pytest.mark.root

_SETS, _EACH, _TAKEN = 32, 3, 2
_HOSTS = _EACH * _TAKEN


@pytest.fixture(scope="module")
def whole(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(cluster, _SETS, _EACH, tmp_path_factory.mktemp("rolls")) as state:
        workloads.namespace(state.admin, "work")
        yield state


@pytest.fixture
def fleet(whole: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Yield two scale sets of the world that no test has used."""
    found_by(whole.served.environment, monkeypatch)
    hosts, whole.hosts = whole.hosts[:_HOSTS], whole.hosts[_HOSTS:]
    part = replace(whole, hosts=hosts, folder=tmp_path, began=time.time())
    faults = whole.served.arm.faults
    before = list(faults)
    faults.append(part.answer)
    yield part
    faults[:] = before


def first(part: str, effect: Answer | Literal["drop", "lose"], count: int = 1) -> Fault:
    """Return a fault for the first requests whose path ends like that."""
    numbers = iter(range(count))

    def fault(request: Request) -> Answer | Literal["drop", "lose"] | None:
        is_one = request.method != "GET" and request.path.endswith(part)
        return effect if is_one and next(numbers, None) is not None else None

    return fault


@contextmanager
def faulty(fleet: World, fault: Fault) -> Iterator[None]:
    # After the recorder, which sees everything.
    fleet.served.arm.faults.insert(1, fault)
    try:
        yield
    finally:
        fleet.served.arm.faults.remove(fault)


def require_ok(progress: Progress, but: int = 0) -> None:
    """Assert that every host of a roll has the new image, except for this number."""
    ends = {name: status.outcome for name, status in progress.hosts.items()}
    assert counts(progress.hosts.values())["ok"] == _HOSTS - but, ends


def at_first_reimage(fleet: World, act: Callable[[str], None]) -> Fault:
    """Return a fault that acts once, when the first host of a fleet is about to be reimaged, and lets it pass."""
    done: list[str] = []

    def fault(request: Request) -> None:
        if request.method == "POST" and request.path.endswith("/reimage") and not done:
            group, number = request.path.split("/")[-4], request.path.split("/")[-2]
            done.append(f"{group}-{number}")
            act(done[0])

    return fault


@pytest.mark.parametrize("effect", ["lose", pytest.param("drop", marks=pytest.mark.nightly)])
def test_lost_requests(fleet: World, effect: Literal["drop", "lose"]) -> None:
    """R5, R6: one was accepted, one never arrived; each host gets its image once."""
    rolled = plan(fleet, **GENEROUS)
    with faulty(fleet, first("/reimage", effect)):
        progress = fleet.drive(rolled)
    require_ok(progress)
    assert [fleet.machine(host).reimages for host in fleet.hosts] == [1] * _HOSTS
    fleet.require_invariants(rolled)


@pytest.mark.nightly
def test_azure_is_throttled_and_away(fleet: World) -> None:
    """R4, R20: hosts wait empty and cordoned, and then continue."""
    rolled = plan(fleet, **GENEROUS)
    since = time.monotonic()
    throttled = error(429, "OperationNotAllowed", "The request is being throttled.", Retry_After="0")

    def away(request: Request) -> Answer | Literal["drop"] | None:
        if request.method == "POST" and request.path.endswith("/reimage") and time.monotonic() < since + 15:
            return throttled
        is_roll = request.path.startswith("/subscriptions/") and "/virtualMachineScaleSets/" in request.path
        return "drop" if is_roll and since + 15 <= time.monotonic() < since + 25 else None

    with faulty(fleet, away):
        progress = fleet.drive(rolled)
    require_ok(progress)
    fleet.require_invariants(rolled)


@pytest.mark.nightly
def test_three_hosts_of_a_later_wave_fail_alike(fleet: World) -> None:
    """R27: the run stops, models go back first, then the hosts that failed; the canaries keep the new image."""
    # All in one zone, of which half is three hosts.
    fleet.hosts = tuple(host.model_copy(update={"zone": ""}) for host in fleet.hosts)
    rolled = plan(fleet, wave_budget="100%", budget="100%", same_least=3, same_share="1%")
    canaries = rolled.waves[0].hosts
    fleet.broken |= {host.name for host in fleet.hosts} - {*canaries}
    progress = fleet.drive(rolled)
    assert progress.stopped.endswith("failed alike: failed verify 101"), progress.stopped
    assert fleet.models_of(rolled) == {OLD}
    news = {host.name for host in fleet.hosts if fleet.build(host.name) == BUILDS[NEW]}
    assert news == {*canaries}
    log = fleet.log(rolled)
    stopped = next(record.at for record in log.run if isinstance(record, Stopped))
    assert any(isinstance(record, Turned) and record.at - stopped < 30 for record in log.run)
    invariants.require(log)


@pytest.mark.nightly
def test_a_node_that_never_comes_back_is_quarantined(fleet: World) -> None:
    """R9, R28: its machine gets the old image back, which doesn't help; it is left cordoned and named."""
    rolled = plan(fleet)
    canary = rolled.waves[0].hosts[0]
    fleet.silent.add(canary)
    # The old image doesn't come up either.
    fleet.boots_never.add(canary)
    try:
        progress = fleet.drive(rolled)
    finally:
        fleet.boots_never.clear()
    status = progress.hosts[canary]
    assert progress.stopped and status.restored is False and status.outcome and status.outcome.is_failure
    assert fleet.is_ours(canary)
    assert fleet.models_of(rolled) == {OLD}
    fleet.require_invariants(rolled)


@pytest.mark.nightly
def test_a_host_that_failed_and_has_a_pod_does_not_go_back(fleet: World) -> None:
    """I2 also holds during the rollback: a pod that tolerates everything runs on a host that failed, and isn't lost."""
    rolled = plan(fleet)
    canary = rolled.waves[0].hosts[0]
    fleet.broken.add(canary)
    pods: list[str] = []

    def bind(request: Request) -> None:
        if request.method == "PATCH" and NEW in fleet.models_of(rolled) and fleet.stopped() and not pods:
            tolerant = workloads.pod("tolerant", canary, tolerations=[{"operator": "Exists"}])
            workloads.create(fleet.admin, "work", tolerant)
            pods.append("tolerant")

    with faulty(fleet, bind):
        progress = fleet.drive(rolled)
    assert pods and progress.hosts[canary].restored is False
    assert fleet.build(canary) == BUILDS[NEW]
    fleet.require_invariants(rolled)


@pytest.mark.nightly
def test_a_pod_that_is_bound_after_the_last_look_never_starts(fleet: World) -> None:
    """R15: the taint keeps it off the empty host, so nothing is lost with the disk."""
    rolled = plan(fleet, **GENEROUS)
    bound: list[str] = []

    def bind(name: str) -> None:
        workloads.create(fleet.admin, "work", workloads.pod(f"late-{name}", name))
        bound.append(name)
        # By now, it has been noticed.
        assert wait_until(lambda: not runs(f"late-{name}"), 5)
        time.sleep(0.5)

    def runs(name: str) -> bool:
        return any(pod["metadata"]["name"] == name for pod in workloads.pods_of(fleet.admin, "work"))

    with faulty(fleet, at_first_reimage(fleet, bind)):
        progress = fleet.drive(rolled)
    require_ok(progress)
    assert bound
    assert invariants.lost_jobs(fleet.log(rolled)) == []
    fleet.require_invariants(rolled)


@pytest.mark.nightly
def test_the_api_server_is_away_while_hosts_are_reimaged(fleet: World) -> None:
    """R18: operations in progress are waited for, and the run continues."""
    rolled = plan(fleet, **GENEROUS)
    away: list[str] = []

    def interrupt(stop: object) -> None:
        assert wait_until(lambda: bool(away), 60)
        fleet.cluster.stop_api()
        time.sleep(5)
        fleet.cluster.start_api()

    with in_background(interrupt), faulty(fleet, at_first_reimage(fleet, away.append)):
        progress = fleet.drive(rolled)
    require_ok(progress)
    fleet.require_invariants(rolled)


@pytest.mark.nightly
def test_a_human_uncordons_a_host_that_is_drained(fleet: World) -> None:
    """R16: it isn't cordoned again, and keeps its image."""
    name = fleet.hosts[0].name
    workloads.create(fleet.admin, "work", workloads.job("uncordoned", 1, [name], gpus=True))
    workloads.await_running(fleet.admin, "work", 1, "uncordoned")
    rolled = plan(fleet, **GENEROUS)

    def uncordon(stop: object) -> None:
        assert wait_until(lambda: fleet.is_ours(name), 60)
        fleet.admin.request("PATCH", path_of_node(name), {"spec": {"unschedulable": None}}, MERGE_PATCH)

    with in_background(uncordon):
        progress = fleet.drive(rolled)
    outcome = progress.hosts[name].outcome
    assert outcome and outcome.detail.startswith("somebody uncordoned it: work/uncordoned")
    assert fleet.build(name) == BUILDS[OLD]
    require_ok(progress, but=1)
    fleet.require_invariants(rolled)


def test_a_driver_that_is_lost_with_its_journal(fleet: World) -> None:
    """R22: the plan is enough. What the lost driver cordoned and suspended is taken over; no disk is replaced twice."""
    rolled = plan(fleet, **GENEROUS)
    save(rolled, fleet.folder / "plan.json")
    arguments = [os.fspath(fleet.folder), fleet.served.url, os.fspath(fleet.account()), "0"]
    command = [sys.executable, "-m", "tests.support.pools.rolls", *arguments]
    with (
        subprocess.Popen(command, cwd=REPO) as driver,
        faulty(fleet, at_first_reimage(fleet, lambda _: driver.kill())),
    ):
        assert driver.wait(240) == -signal.SIGKILL
    for journal in ("run.jsonl", "requests.jsonl"):
        (fleet.folder / journal).unlink()
    assert any(fleet.is_ours(host.name) for host in fleet.hosts)
    assert "Suspended" in {
        state for services in fleet.log(rolled).services.values() for state in services.values()
    }
    fleet.began = time.time()
    require_ok(fleet.drive(rolled))
    assert [fleet.machine(host).reimages for host in fleet.hosts] == [1] * _HOSTS
    assert not any(fleet.is_ours(host.name) for host in fleet.hosts)
    # A host that the lost driver emptied counts when its turn comes.
    invariants.require(fleet.log(rolled), but="I1")


@pytest.mark.nightly
def test_a_host_that_a_lost_roll_left_with_the_new_image_takes_pods_again(fleet: World) -> None:
    """Its plan is lost, too: another roll finds the host with the new version, under a cordon with the other name."""
    host = fleet.hosts[0]
    fleet.machine(host).version = fleet.machine(host).disk = NEW
    _, patch = fence.cordon(fleet.node(host.name), "roll-lost", time.time())
    assert fence.send(fleet.admin, host.name, patch) and taint.bar(fleet.admin, host.name, "roll-lost")
    rolled = plan(fleet, **GENEROUS)
    require_ok(fleet.drive(rolled))
    assert fleet.machine(host).reimages == 0
    assert not any(fleet.is_ours(each.name) for each in fleet.hosts)


@pytest.mark.nightly
def test_hosts_that_were_missing_before_are_left_alone(fleet: World) -> None:
    """R34, I1: one is NotReady, one has no Node; so only one more of three may be unavailable, and they are named."""
    # All in one zone, of which half is three hosts.
    fleet.hosts = tuple(host.model_copy(update={"zone": ""}) for host in fleet.hosts)
    down, absent = fleet.hosts[0].name, fleet.hosts[-1].name
    for name in (down, absent):
        del fleet.kubelets.nodes[name]
    status = {"conditions": [{"type": "Ready", "status": "False", "reason": "KubeletNotReady"}]}
    fleet.admin.request("PATCH", f"{path_of_node(down)}/status", {"status": status}, STRATEGIC_MERGE)
    fleet.admin.request("DELETE", path_of_node(absent))
    rolled = plan(fleet, **GENEROUS)
    assert rolled.max_unavailable == 3
    names, going = [host.name for host in fleet.hosts], threading.Event()
    assert wait_until(lambda: len(missing_hosts(fleet.admin, names, rolled.run, going)) == 2)
    progress = fleet.drive(rolled)
    require_ok(progress, but=2)
    ends = {name: progress.hosts[name].outcome for name in (down, absent)}
    assert {name: (end.kind, end.detail) for name, end in ends.items() if end} == {
        down: ("skipped", NOT_READY),
        absent: ("skipped", NO_NODE),
    }
    assert progress.unavailable == 2 and not fleet.is_ours(down)
    assert [fleet.build(name) for name in (down, absent)] == [BUILDS[OLD]] * 2
    fleet.require_invariants(rolled)


@pytest.mark.nightly
def test_a_node_that_says_itself_that_it_works_is_left_alone(fleet: World) -> None:
    """No pod shows it: a lease, or a container that was started by hand. Either it ends, or the host is named."""
    passing, lasting = fleet.hosts[0].name, fleet.hosts[-1].name
    fleet.works |= {passing: "its node says: lease a", lasting: "its node says: lease b"}
    rolled = plan(fleet, **GENEROUS)

    def end(_stop: object) -> None:
        # It was about to be reimaged, and was released.
        assert wait_until(lambda: fleet.is_ours(passing), 60)
        assert wait_until(lambda: not fleet.is_ours(passing), 60)
        del fleet.works[passing]

    try:
        with in_background(end):
            progress = fleet.drive(rolled)
    finally:
        fleet.works.clear()
    require_ok(progress, but=1)
    assert progress.hosts[lasting].outcome == ended("skipped", "its node says: lease b")
    assert fleet.machine(fleet.host(lasting)).reimages == 0
    fleet.require_invariants(rolled)


def test_a_second_roll_of_a_set_is_refused(fleet: World) -> None:
    """R23: the mark on the set names its driver; nothing is sent, no host is cordoned; it continues later."""
    rolled = plan(fleet, **GENEROUS)
    path = fleet.hosts[0].scale_set_id.lower()
    group = fleet.scale_sets.sets[path]
    group.content["tags"] = {HOLD_TAG: "roll-of-another until 2099-01-01T00:00:00+00:00"}
    group.touch()
    with pytest.raises(PoolError, match="is driven by roll-of-another"):
        fleet.drive(rolled)
    assert not any(fleet.is_ours(host.name) for host in fleet.hosts)
    assert fleet.reimages_of(rolled) == 0
    group.content["tags"] = {}
    group.touch()
    assert fleet.drive(rolled).finished
    fleet.require_invariants(rolled)


@pytest.mark.nightly
def test_instances_that_are_scaled_out_meanwhile_are_named(fleet: World) -> None:
    """R24: one before the model changed, one after; the first has the old version, and doesn't count as a success."""
    rolled = plan(fleet, **GENEROUS)

    def scale_out(name: str) -> str:
        path = fleet.host(name).scale_set_id
        group = fleet.scale_sets.sets[path.lower()]
        before = {*group.machines}
        fleet.scale_sets._scale(group, len(before) + 1)
        (number,) = {*group.machines} - before
        return f"{path}/virtualMachines/{number}"

    new: list[str] = []
    old = scale_out(fleet.hosts[0].name)
    with faulty(fleet, at_first_reimage(fleet, lambda name: new.append(scale_out(name)))):
        progress = fleet.drive(rolled)
    require_ok(progress)
    document = report(progress, fleet.log(rolled).run)
    assert document["unplanned"] == {old: OLD, new[0]: NEW}
    assert document["outdated"] == [old]
    fleet.require_invariants(rolled)


@pytest.mark.nightly
def test_a_host_in_work_is_scaled_in(fleet: World) -> None:
    """R11, R25: it is gone, and nothing of it is left."""
    rolled = plan(fleet, **{**GENEROUS, "wave_budget": "100%"})
    host = fleet.host(rolled.waves[-1].hosts[0])
    gone: list[str] = []

    def scale_in(request: Request) -> None:
        is_its = request.path == f"{host.scale_set_id}/manualupgrade"
        if is_its and host.instance in (request.body or {}).get("instanceIds", ()) and not gone:
            gone.append(host.name)
            fleet.scale_sets.remove(host.scale_set_id, host.instance)
            fleet.kubelets.nodes.pop(host.name)
            fleet.admin.request("DELETE", path_of_node(host.name))

    with faulty(fleet, scale_in):
        progress = fleet.drive(rolled)
    assert gone
    require_ok(progress, but=1)
    outcome = progress.hosts[host.name].outcome
    assert outcome and outcome.is_failure
    fleet.require_invariants(rolled)


@pytest.mark.nightly
def test_the_way_back_is_gone_when_it_is_needed(fleet: World) -> None:
    """R29: the run says so and ends; services are running, and what failed stays cordoned."""
    rolled = plan(fleet)
    fleet.broken.add(rolled.waves[0].hosts[0])
    versions = fleet.served.arm.resources
    before = versions[OLD.lower()]

    def lose_old(request: Request) -> None:
        if request.path.endswith("/reimage"):
            versions.pop(OLD.lower(), None)

    with faulty(fleet, lose_old):
        try:
            with pytest.raises(PoolError, match="GalleryImageNotFound"):
                fleet.drive(rolled)
        finally:
            versions[OLD.lower()] = before
    # The run ended during its first wave, so what it held there may still be ours; nothing else is violated.
    hosts = rolled.waves[0].hosts
    assert fleet.is_ours(hosts[0])
    broken = invariants.violations(fleet.log(rolled))
    held = tuple(f"I8: {name} is still ours" for name in hosts)
    assert len(broken) <= len(hosts) and all(text.startswith(held) for text in broken), broken
