"""Repairs that send nothing: the breaker's nodes, and those of a run that is interrupted."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from math import inf
from typing import Any

import pytest

from image_builder.drain import fence, quarantine
from image_builder.node.preflight import hold
from image_builder.node.preflight.hold import Hold
from image_builder.pool.repair import Case, Repairs
from image_builder.pool.scale_set.client import Client
from image_builder.pool.scale_set.roll import Drive, NoJournal, Patience
from tests.support.arm.direct import Direct
from tests.support.arm.fleet import fleet
from tests.unit.drain.manifests import node_object
from tests.unit.drain.test_drain_quarantine import RECORD, applied
from tests.unit.drain.test_drain_run import Server
from tests.unit.pool.test_scale_set_target import hosts

ASKED = replace(RECORD, stage="asked")
SENT = replace(RECORD, stage="sent", sent_at=1.0, sent_boot="boot")


class Cluster(Server):
    """A node whose remedy is requested, and the breaker's holds."""

    def __init__(self, *holds: Hold) -> None:
        super().__init__()
        self.patched = 0
        self.config_map = {"data": {entry.key: json.dumps(asdict(entry)) for entry in holds}}
        node = node_object()
        node = applied(node, fence.cordon(node, quarantine.RUN, 1.0)[1])
        self.nodes["gpu-0"] = applied(node, quarantine.take_out(node, ASKED))

    def request(self, method: str, path: str, body: Any = None, content_type: str = "") -> dict[str, Any]:
        if path == hold.PATH:
            return self.config_map
        self.patched += method == "PATCH"
        return super().request(method, path, body, content_type)


def _case(record: quarantine.Record) -> tuple[Case, Client]:
    machines = fleet(1)
    machines.group.services["AutomaticRepairs"] = "Suspended"
    machines.machine("0").state = "Updating"  # what is in work gets no request
    return Case("gpu-0", record, "boot", hosts(machines)[0]), Client(Direct(machines.arm))


@pytest.mark.parametrize(("state", "patches"), [(hold.OPEN, 0), (hold.RELEASED, 2), (None, 2)])
def test_a_node_that_the_breaker_holds_is_not_even_marked(state: str | None, patches: int) -> None:
    """Another one is marked, and unmarked when its instance turns out to be in work."""
    case, azure = _case(ASKED)
    cluster = Cluster(*([Hold(RECORD.reason, "", "", 3, 4, 0, state)] if state else []))
    drive = Drive(azure, case.known.scale_set_id, "us", NoJournal(), Patience(), azure.wait, held_until=inf)
    outcome = Repairs(lambda: cluster, azure)._send(cluster, drive, case)
    assert outcome and (outcome.state, cluster.patched) == ("skipped", patches)


@pytest.mark.parametrize(("record", "state"), [(ASKED, "asked"), (SENT, "sent")])
def test_an_interrupted_run_leaves_each_node_to_the_next(record: quarantine.Record, state: str) -> None:
    case, azure = _case(record)
    cluster = Cluster()
    repairs = Repairs(lambda: cluster, azure)
    repairs.over.set()
    assert [outcome.state for outcome in repairs.run([case], 1)] == [state] and not cluster.patched
