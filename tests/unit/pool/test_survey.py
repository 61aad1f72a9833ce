"""Looks at a roll's hosts before any is taken out of work: which are missing, which are idle."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from image_builder.drain import fence, quarantine
from image_builder.drain.observe import Looker
from image_builder.drain.policy import Policy
from image_builder.drain.quarantine import Record
from image_builder.errors import PoolError
from image_builder.node.net.kube import KubeError
from image_builder.pool.steps import survey
from image_builder.pool.steps.survey import (
    IN_QUARANTINE,
    NO_NODE,
    NOT_READY,
    idle_hosts,
    missing_hosts,
    quarantined_hosts,
)
from tests.support.pools.simulated.rolls import plan
from tests.unit.drain.manifests import pod_object
from tests.unit.drain.test_drain_run import Server

RUN = "roll-1"


class Table:
    """An API server that shows its nodes as a table; ``runs`` have cordoned some, ``trouble`` are its first errors."""

    def __init__(self, nodes: dict[str, str], runs: dict[str, str], *trouble: KubeError) -> None:
        self.nodes, self.runs, self.trouble = nodes, runs, list(trouble)

    def text(self, _path: str, _accept: str) -> str:
        if self.trouble:
            raise self.trouble.pop(0)
        columns = [{"name": name} for name in ("Name", "Status", "Age")]
        rows = [{"cells": [name, status, "3d"]} for name, status in self.nodes.items()]
        return json.dumps({"kind": "Table", "columnDefinitions": columns, "rows": rows})

    def each_page(self, _path: str, query: dict[str, str], take: Callable[[dict[str, Any]], None]) -> None:
        assert query == {"fieldSelector": "spec.unschedulable=true"}
        for name, run in self.runs.items():
            mark = {fence.CORDON: fence.Record(run, 1.0).text()} if run else {}
            take({"metadata": {"name": name, "annotations": mark}})


NODES = {
    "well": "Ready",
    "cordoned": "Ready,SchedulingDisabled",
    "empty": "Ready,SchedulingDisabled",
    "down": "NotReady",
    "unknown": "Unknown",
    "in work": "NotReady,SchedulingDisabled",
    "of another": "NotReady,SchedulingDisabled",
    "bad": "Ready,SchedulingDisabled",
}
RUNS = {
    "cordoned": "",
    "empty": RUN,
    "in work": RUN,
    "of another": "roll-2",
    "bad": "gate",
    "of no plan": RUN,
}


def test_who_is_not_ready_or_has_no_node_is_missing() -> None:
    """A cordon says nothing about a host, except the roll's own, which has it in work, and the gate's."""
    server: Any = Table(NODES, RUNS)
    missing = missing_hosts(server, [*NODES, "gone"], RUN, threading.Event())
    assert missing == dict.fromkeys(("down", "unknown", "of another"), NOT_READY) | {
        "gone": NO_NODE,
        "bad": IN_QUARANTINE,
    }


def test_a_cluster_that_is_away_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "backoff", lambda *_, **__: 0.0)
    server: Any = Table(NODES, RUNS, KubeError("away"), KubeError("busy", 503))
    assert "down" in missing_hosts(server, [*NODES], RUN, threading.Event())
    over = threading.Event()
    over.set()
    assert missing_hosts(server, [*NODES], RUN, over) == {}


def test_missing_rights_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "backoff", lambda *_, **__: 0.0)
    server: Any = Table(NODES, RUNS, *[KubeError("no rights", 403) for _ in range(9)])
    with pytest.raises(PoolError, match="no rights"):
        missing_hosts(server, [*NODES], RUN, threading.Event())


def test_so_many_of_each_cell_are_idle() -> None:
    hosts = plan(4).hosts
    server = Server()
    for host in hosts:
        server.nodes[host.name] = {"metadata": {"name": host.name, "uid": host.name}, "spec": {}}
    server.nodes[hosts[0].name]["spec"]["unschedulable"] = True
    server.pods = {hosts[1].name: [pod_object(spec={"nodeName": hosts[1].name}, owner="")]}
    looker = Looker(server, Policy())
    assert idle_hosts(looker, [hosts], 1, threading.Event()) == [hosts[2].name]
    assert idle_hosts(looker, [hosts[:2], hosts[2:]], 5, threading.Event()) == [
        host.name for host in hosts[2:]
    ]


def test_hosts_in_quarantine_say_why() -> None:
    record = Record("NodeHealthy", "GpuLost", "GPU 3", "reboot", 0.0, "boot", 0.0, "asked")
    marks = {"bad": {quarantine.MARK: record.text()}, "strange": {quarantine.MARK: record.text()}, "well": {}}

    class Nodes:
        def each_page(self, _path: str, _query: object, take: Callable[[dict[str, Any]], None]) -> None:
            for name, mark in marks.items():
                take({"metadata": {"name": name, "annotations": mark}})

    server: Any = Nodes()
    words = quarantined_hosts(server, {"bad", "well"})
    assert list(words) == ["bad"] and "GpuLost" in words["bad"] and "reboot it" in words["bad"]
