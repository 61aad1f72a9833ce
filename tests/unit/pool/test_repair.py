"""The repair of a node without a control plane: whatever becomes of its one request, it is never sent twice."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from typer.testing import CliRunner

from image_builder.cli.main import app
from image_builder.drain import fence, quarantine
from image_builder.drain.quarantine import Record
from image_builder.node.net.kube import path_of_node
from image_builder.node.preflight import hold
from image_builder.pool import repair
from image_builder.pool.repair import Case, Outcome, Repairs
from image_builder.pool.scale_set.client import HOLD_TAG
from image_builder.pool.scale_set.client import Client as Azure
from image_builder.pool.scale_set.roll import Patience
from tests.support.arm.direct import Direct
from tests.support.arm.fleet import Fleet, fleet
from tests.support.arm.model import Answer, Request, error
from tests.unit.drain.manifests import pod_object
from tests.unit.pool.cluster import Cluster, applied
from tests.unit.pool.test_scale_set_target import hosts

ASKED = Record("NodeHealthy", "GpuLost", "gpu 3", "reboot", 1.0, "b-1", 0.0, stage="asked")


class Pool:
    """A scale set of one machine, whose node the gate has drained and wants rebooted."""

    def __init__(self) -> None:
        self.machines: Fleet = fleet(1)
        self.machines.arm.actions = ["*"]
        self.machines.group.services["AutomaticRepairs"] = "Suspended"
        (self.host,) = hosts(self.machines)
        self.path = path_of_node(self.host.name)
        self.cluster, self.over = Cluster(), threading.Event()
        self.cluster.add(self.host.name, quarantine.RUN)
        node = self.cluster.objects[self.path]
        self.cluster.objects[self.path] = applied(node, quarantine.take_out(node, ASKED))
        self.boot("b-1")
        self.machines.scale_sets.restarted = lambda *_: self.boot("b-2")

    def boot(self, boot_id: str) -> None:
        status = {"nodeInfo": {"bootID": boot_id}, "conditions": [{"type": "Ready", "status": "True"}]}
        self.cluster.objects[self.path]["status"] = status

    @property
    def stage(self) -> str:
        record = quarantine.record_of(self.cluster.objects[self.path])
        return record.stage if record else ""

    @property
    def case(self) -> Case:
        (case,) = repair.waiting(self.cluster, [self.host])
        return case

    def repair(self, **more: Any) -> tuple[str, str]:
        """Run the repairs once, with a clock of their own; return how the node's case ended, and why."""
        moments = itertools.count()
        # Each look at the clock takes a tenth of a second: the last check lasts less than its two.
        azure = Azure(Direct(self.machines.arm), now=lambda: 1.8e9 + next(moments) / 10)
        patience = Patience(look=0.0, settle=1.0, boot=5.0, minute=0.0)
        repairs = Repairs(lambda: self.cluster, azure, patience=patience, over=self.over, **more)
        (outcome,) = repairs.run([self.case], 1)
        return outcome.state, outcome.reason

    def when(self, method: str, act: Callable[[], object]) -> None:
        """Act whenever such a request was answered."""

        def look(request: Request, _: Answer | None) -> None:
            if request.method == method:
                act()

        self.machines.arm.observers.append(look)

    def instead(self, effect: Answer | Literal["drop", "lose"] | None) -> list[Request]:
        """Apply a fault to the requests that change something; return where they are noted."""
        sent: list[Request] = []

        def fault(request: Request) -> Answer | Literal["drop", "lose"] | None:
            if request.method == "GET":
                return None
            sent.append(request)
            return effect

        self.machines.arm.faults.append(fault)
        return sent

    @property
    def restarts(self) -> int:
        return self.machines.machine("0").restarts


@pytest.fixture
def pool() -> Pool:
    return Pool()


def test_nothing_is_sent_while_azure_may_replace_the_machine(pool: Pool) -> None:
    pool.machines.group.services["AutomaticRepairs"] = "Running"
    state, reason = pool.repair()
    assert state == "skipped" and "AutomaticRepairs" in reason and (pool.restarts, pool.stage) == (0, "asked")
    pool.machines.group.services["AutomaticRepairs"] = "NotRunning"
    assert pool.repair()[0] == "returned" and pool.restarts == 1


def test_a_node_returns_with_another_boot(pool: Pool) -> None:
    assert pool.repair()[0] == "returned"
    assert (pool.stage, pool.restarts, pool.cluster.events) == ("sent", 1, ["RebootSent"])
    assert repair.outcome_of(pool.case).state == "back"


def test_interrupted_before_its_request_it_is_asked_for_as_before(pool: Pool) -> None:
    pool.over.set()
    assert pool.repair()[0] == "asked"
    assert (pool.stage, pool.restarts) == ("asked", 0)


def test_interrupted_after_its_request_the_next_run_waits_for_the_node(pool: Pool) -> None:
    pool.when("POST", pool.over.set)
    assert pool.repair()[0] == "sent"
    assert pool.stage == "sent"
    pool.over.clear()
    assert pool.repair()[0] in ("returned", "back")
    assert pool.restarts == 1


def test_a_node_that_does_not_come_back_has_failed(pool: Pool) -> None:
    pool.machines.scale_sets.restarted = lambda *_: None
    state, reason = pool.repair()
    assert state == "failed" and f"--again {pool.host.name}" in reason
    assert (pool.stage, pool.restarts) == ("sent", 1)


@pytest.mark.parametrize(("effect", "state"), [("drop", "unknown"), ("lose", "returned")])
def test_a_lost_answer_is_never_answered_by_sending_again(
    pool: Pool, effect: Literal["drop", "lose"], state: str
) -> None:
    sent = pool.instead(effect)
    assert pool.repair()[0] == state
    if state == "unknown":
        assert pool.repair()[0] == "unknown"
        assert pool.repair(again=[pool.host.name])[0] == "unknown" and len(sent) == 2
    else:
        assert len(sent) == pool.restarts == 1


@pytest.mark.parametrize("status", [403, 409, 429])
def test_a_refused_request_is_asked_for_as_before(pool: Pool, status: int) -> None:
    before = pool.case.record
    pool.instead(error(status, "NotNow", "not now", Retry_After="0"))
    state, reason = pool.repair()
    assert state == "refused" and "NotNow" in reason
    assert pool.case.record == before and pool.cluster.events == []
    pool.machines.arm.faults.clear()
    assert pool.repair()[0] == "returned"


def test_an_operation_that_fails_is_not_repeated(pool: Pool) -> None:
    sent = pool.instead(None)
    pool.machines.scale_sets.failures["0"] = ["OSProvisioningTimedOut"]
    for _ in range(2):
        state, reason = pool.repair()
        assert state == "failed" and "OSProvisioningTimedOut" in reason
    assert len(sent) == 1


def test_a_pod_that_is_there_or_lands_before_the_last_look_keeps_its_node(pool: Pool) -> None:
    """Between the mark and the request: nothing is sent, and the node's request stands as before."""
    pod = pod_object("late", owner="Job", spec={"nodeName": pool.host.name})

    def land() -> None:
        if pool.stage == "sent":
            pool.cluster.objects["/api/v1/pods/late"] = pod

    pool.when("GET", land)
    for _ in range(2):
        state, reason = pool.repair()
        assert state == "skipped" and "work/late" in reason
        assert (pool.stage, pool.restarts) == ("asked", 0)


def test_a_node_that_somebody_uncordons_is_left_alone(pool: Pool) -> None:
    assert fence.free(pool.cluster, pool.host.name, quarantine.RUN)
    assert pool.repair() == ("skipped", "somebody uncordoned it")
    assert pool.restarts == 0


def test_an_instance_that_is_another_machine_is_left_alone(pool: Pool) -> None:
    pool.machines.machine("0").vm_id = "00000000-0000-0000-0000-000000000000"
    assert "another machine" in pool.repair()[1]
    assert (pool.stage, pool.restarts) == ("asked", 0)


def test_a_set_that_a_roll_of_another_cluster_holds_is_skipped(pool: Pool) -> None:
    tags = pool.machines.group.content["tags"]
    tags[HOLD_TAG] = "roll-8 until 2099-01-01T00:00:00+00:00"
    assert "driven by roll-8" in pool.repair()[1]
    assert (pool.stage, pool.restarts) == ("asked", 0)
    del tags[HOLD_TAG]
    assert pool.repair()[0] == "returned"


def test_what_the_breaker_holds_is_not_sent(pool: Pool) -> None:
    """It was requested before so many nodes had failed for the same reason that the nodes can't be at fault."""
    held = hold.Hold(ASKED.reason, "pool", "", failed=12, of=100, since=1)
    pool.cluster.objects[hold.PATH] = {"data": {held.key: held.text()}}
    state, reason = pool.repair()
    assert state == "skipped" and "12 of 100 nodes failed alike" in reason
    assert (pool.stage, pool.restarts) == ("asked", 0)
    pool.cluster.objects[hold.PATH] = {"data": {held.key: replace(held, state=hold.RELEASED).text()}}
    assert pool.repair()[0] == "returned"


def test_a_node_that_the_inventory_does_not_have_is_named(pool: Pool) -> None:
    pool.cluster.objects[pool.path]["spec"]["providerID"] = f"azure://{pool.machines.path}/virtualMachines/0"
    other = pool.host.model_copy(update={"name": "another"})
    pool.host, name = other, pool.host.name
    assert pool.case.node == name
    state, reason = pool.repair()
    assert state == "skipped" and "pool snapshot" in reason
    assert (pool.stage, pool.restarts) == ("asked", 0)


def test_a_run_that_is_terminated_leaves_the_rest_to_the_next(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def opened(*_: object, **__: object) -> Iterator[Azure]:
        yield Azure(Direct(pool.machines.arm))

    def run(self: Repairs, cases: Iterable[Case], at_once: int) -> list[Outcome]:
        os.kill(os.getpid(), signal.SIGTERM)
        self.over.wait(10)
        return finish(self, cases, at_once)

    signal.signal(signal.SIGTERM, lambda *_: None)  # restored after each test
    finish = Repairs.run
    monkeypatch.setattr(Repairs, "run", run)
    read = SimpleNamespace(hosts=[pool.host], warnings=())
    monkeypatch.setattr("image_builder.pool.plan.inventory.read_fleet", lambda *_: read)
    monkeypatch.setattr("image_builder.pool.scale_set.client.open_client", opened)
    monkeypatch.setattr("image_builder.cli.pool.repair.connect", lambda *_: pool.cluster)
    answer = CliRunner().invoke(app, ["pool", "repair", "gpu", "-i", os.fspath(tmp_path)])
    assert (answer.exit_code, pool.stage, pool.restarts) == (130, "asked", 0)
