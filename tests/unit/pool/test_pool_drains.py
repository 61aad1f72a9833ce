"""The drains of a roll, with an API server that answers from a dictionary: final answers, and what a deadline does."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytest

from image_builder.drain.fence import is_cordoned
from image_builder.drain.policy import Policy
from image_builder.node.errors import NodeError
from image_builder.node.net.kube import KubeError
from image_builder.pool.plan.model import OK, Outcome
from image_builder.pool.run.records import Emptied
from image_builder.pool.steps import drains as drains_module
from image_builder.pool.steps.drains import Drains, Key, is_final
from tests.unit.drain.manifests import node_object, pod_object
from tests.unit.drain.test_drain_run import Server

Reports = SimpleQueue[tuple[Key, Outcome, Emptied]]
HOSTS = ("gpu-1", "gpu-2")


@pytest.mark.parametrize(
    ("status", "failures", "final"),
    [(0, 99, False), (500, 99, False), (403, 0, False), (403, 5, True), (401, 5, True), (422, 0, True)],
)
def test_an_api_server_that_knows_no_rights_yet_is_asked_again(
    status: int, failures: int, *, final: bool
) -> None:
    """A server that has just started refuses everybody for some seconds."""
    assert is_final(KubeError("it says no", status), failures) is final


class Cluster(Server):
    """A gang with GPUs on two hosts; a pod that is evicted is gone."""

    def __init__(self) -> None:
        super().__init__()
        limits = {"resources": {"limits": {"nvidia.com/gpu": "8"}}}
        for host in HOSTS:
            spec = {"nodeName": host, "containers": [{"name": "main", **limits}]}
            node = node_object({"a": "b"})
            self.nodes[host] = {**node, "status": {"allocatable": {"nvidia.com/gpu": "8", "cpu": "96"}}}
            self.pods[host] = [pod_object(f"on-{host}", owner="Job", spec=spec)]

    def evict(self, namespace: str, name: str, uid: str, *, dry_run: bool = False) -> None:
        super().evict(namespace, name, uid, dry_run=dry_run)
        self.pods[name.removeprefix("on-")] = []


def _report(reports: Reports, key: Key, outcome: Outcome, emptied: Emptied) -> None:
    reports.put((key, outcome, emptied))


@contextmanager
def at_work(
    cluster: Server, reports: Reports, deadline: float, *, whole_gangs: bool = False
) -> Iterator[Drains]:
    """Yield running drains; an error that ends their thread is raised afterwards."""
    crashes: list[Exception] = []
    policy = Policy(
        poll_seconds=0.01,
        looks_per_second=1000.0,
        settle_seconds=0.0,
        max_wait_seconds=60.0,
        whole_gangs=whole_gangs,
    )
    report = partial(_report, reports)
    drains = Drains(lambda: cluster, "roll", policy, 0, report, crashes.append, deadline)
    drains.start()
    try:
        yield drains
    finally:
        drains.end()
    for error in crashes:
        raise error


def test_hosts_at_work_are_due_after_the_deadline_and_emptied() -> None:
    cluster, reports = Cluster(), Reports()
    with at_work(cluster, reports, deadline=0.0) as drains:
        drains.wait_for({(host, "await", 1): time.time() + 60 for host in HOSTS})
        due = [reports.get(timeout=30) for _ in HOSTS]
        assert sorted(due, key=lambda report: report[0]) == [
            ((host, "await", 1), OK, Emptied(unit=HOSTS)) for host in HOSTS
        ]
        drains.add([(host, "drain", 1) for host in HOSTS])
        ends = {
            key[0]: (outcome, emptied) for key, outcome, emptied in (reports.get(timeout=30) for _ in HOSTS)
        }
    assert ends == {host: (OK, Emptied(evicted=(f"work/on-{host}",), gpus=8)) for host in HOSTS}


def test_before_the_deadline_they_are_awaited() -> None:
    cluster, reports = Cluster(), Reports()
    with at_work(cluster, reports, deadline=time.time() + 3600) as drains:
        drains.wait_for({(host, "await", 1): time.time() for host in HOSTS})
        outcomes = [reports.get(timeout=30)[1] for _ in HOSTS]
    assert {outcome.kind for outcome in outcomes} == {"busy"} and cluster.evicted == []


@pytest.mark.parametrize("asked", [HOSTS, HOSTS[:1]])
def test_a_partner_of_a_gang_is_freed_again_unless_the_roll_wants_it_empty(asked: tuple[str, ...]) -> None:
    cluster, reports = Cluster(), Reports()
    with at_work(cluster, reports, deadline=0.0, whole_gangs=True) as drains:
        for host in asked:
            drains.add([(host, "drain", 1)])
        assert {reports.get(timeout=30)[0][0] for _ in asked} == {*asked}
        partners = [host for host in HOSTS if host not in asked]
        end = time.monotonic() + 30
        while any(is_cordoned(cluster.nodes[host]) for host in partners) and time.monotonic() < end:
            time.sleep(0.01)
    assert sorted(cluster.evicted) == [f"on-{host}" for host in HOSTS]
    assert [host for host in HOSTS if is_cordoned(cluster.nodes[host])] == [*asked]


def test_a_busy_host_whose_cordon_is_denied_is_skipped_and_not_awaited() -> None:
    cluster, reports = Cluster(), Reports()
    cluster.pods[HOSTS[1]], cluster.denied = [], {HOSTS[0]}
    with at_work(cluster, reports, deadline=0.0) as drains:
        drains.add([(HOSTS[0], "drain", 1)])
        _, outcome, _ = reports.get(timeout=30)
    assert outcome.kind == "skipped" and "denied" in outcome.detail and f"on-{HOSTS[0]}" in outcome.detail


def test_a_busy_host_that_a_person_uncordoned_is_skipped_even_if_our_mark_stays_on_it() -> None:
    cluster, reports = Cluster(), Reports()
    cluster.pods[HOSTS[1]] = []
    with at_work(cluster, reports, deadline=math.inf) as drains:
        drains.add([(HOSTS[0], "drain", 1)])
        while not is_cordoned(cluster.nodes[HOSTS[0]]) and reports.empty():
            time.sleep(0.01)
        cluster.denied = {HOSTS[0]}
        del cluster.nodes[HOSTS[0]]["spec"]["unschedulable"]
        _, outcome, _ = reports.get(timeout=30)
    assert outcome.kind == "skipped"
    assert outcome.detail.startswith("somebody uncordoned it; its cordon stays: ")


class Troubled(Cluster):
    """An API server whose first answers are errors."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__()
        self.errors = list(errors)

    def request(self, method: str, path: str, body: Any = None, content_type: str = "") -> dict[str, Any]:
        if self.errors:
            raise self.errors.pop()
        return super().request(method, path, body, content_type)


def test_a_certificate_that_cannot_be_read_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The certificate is being renewed: for a moment its key belongs to another one."""
    monkeypatch.setattr(drains_module, "backoff", lambda *_, **__: 0.01)
    cluster, reports = Troubled(*[NodeError("kube.config", "no key")] * 8), Reports()
    with at_work(cluster, reports, deadline=0.0) as drains:
        drains.add([(host, "drain", 1) for host in HOSTS])
        assert {reports.get(timeout=30)[1].kind for _ in HOSTS} == {"ok"}
    assert cluster.errors == []


def test_what_ends_its_thread_is_told() -> None:
    with pytest.raises(ZeroDivisionError):
        _drained_by(Troubled(ZeroDivisionError()))


def _drained_by(cluster: Cluster) -> None:
    with at_work(cluster, Reports(), deadline=0.0) as drains:
        drains.add([(HOSTS[0], "drain", 1)])
        drains._thread.join(30)


def test_a_partner_whose_cordon_may_not_be_removed_fails_no_drain_and_has_an_event() -> None:
    cluster, reports = Cluster(), Reports()
    with at_work(cluster, reports, deadline=0.0, whole_gangs=True) as drains:
        drains.add([(HOSTS[0], "drain", 1)])
        while not cluster.evicted:
            time.sleep(0.01)
        cluster.denied = {HOSTS[1]}
        assert reports.get(timeout=30)[1].kind == "ok"
        cluster.nodes["gpu-3"], cluster.pods["gpu-3"] = node_object({"a": "b"}), []
        drains.add([("gpu-3", "drain", 1)])
        assert reports.get(timeout=30)[1].kind == "ok"
    assert cluster.events.count("CordonStays") == 1
