"""Nodes for which the gate requests a reboot or reimage: real API server, simulated Azure, documented permissions."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Literal

import pytest

from image_builder.drain import fence
from image_builder.drain.lease import Leases
from image_builder.node.net.kube import Client
from image_builder.node.preflight import hold
from image_builder.pool.scale_set.client import HOLD_TAG
from tests.support.arm.model import Answer, Request, action_of, error
from tests.support.control_plane import workloads
from tests.support.control_plane.drains import asked
from tests.support.control_plane.gates import Cluster, manifests, wait_until
from tests.support.pools.repairs import (
    AGENT,
    FINDINGS,
    OFTEN,
    POLICY,
    RIGHTS,
    Clinic,
    Pool,
    actions,
    clinic,
)

pytestmark = pytest.mark.root

REBOOT, REIMAGE = "POST /virtualMachines/0/restart", "POST /virtualMachines/0/reimage"
EACH_REMEDY = pytest.mark.parametrize(
    ("remedy", "request_line"),
    [
        pytest.param("reboot", REBOOT, id="reboot", marks=pytest.mark.nightly),
        pytest.param("reimage", REIMAGE, id="reimage"),
    ],
)
Fault = Answer | Literal["drop", "lose"]
used: set[str] = set()


@pytest.fixture(scope="module")
def place(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clinic]:
    with clinic(cluster, tmp_path_factory.mktemp("repair")) as state:
        state.served.arm.observers.append(lambda request, _: used.add(request_action(request)))
        yield state


def request_action(request: Request) -> str:
    return action_of(request) if "/virtualMachineScaleSets/" in request.path else ""


@pytest.fixture
def pool(place: Clinic) -> Iterator[Pool]:
    pool = place.pool(1)
    yield pool
    place.plane.forget(pool.names)


def instead(effect: Fault) -> Callable[[Request], Fault | None]:
    """Return a fault for the requests that change something."""
    return lambda request: effect if request.method == "POST" else None


def comes_back(place: Clinic, name: str) -> None:
    """Let a node pass the preflight of its new boot, and the gate react to that."""
    place.plane.passes(name)
    place.plane.report(name, "True", "NodeIsHealthy")
    with place.plane.client() as client:
        place.plane.turn(client, [name], **POLICY)
    assert place.plane.is_clean(name) and not fence.is_cordoned(place.plane.document(name))


def test_from_the_ask_to_the_return(place: Clinic) -> None:
    pool = place.pool(4)
    rebooted, reimaged, bad, well = pool.names
    machines = [place.machines[name] for name in pool.names]
    boots = [place.plane.kubelets.nodes[name] for name in pool.names]
    assert pool.repair() == {}
    for name, remedy in ((rebooted, "reboot"), (reimaged, "reimage"), (bad, "hand-over")):
        pool.ask(name, remedy)
    place.plane.put_on(bad, "HOST9")

    waiting = pool.repair("--dry-run")
    assert [node["state"] for node in waiting.values()] == ["asked", "asked", "hand-over"]
    assert place.sent(pool) == [] and pool.stage(rebooted) == "asked"

    ended = pool.repair()
    assert {name: node["state"] for name, node in ended.items()} == {
        rebooted: "returned",
        reimaged: "returned",
        bad: "hand-over",
    }
    assert (ended[bad]["physical_host"], ended[bad]["provider_id"]) == (
        "HOST9",
        f"azure://{pool.path}/virtualMachines/2",
    )
    # Instances are named individually, and nothing is sent to the scale set: neither its model nor a tag changes.
    assert sorted(place.sent(pool)) == [
        "POST /virtualMachines/0/restart",
        "POST /virtualMachines/1/reimage",
    ]
    assert [(m.restarts, m.reimages) for m in machines] == [(1, 0), (0, 1), (0, 0), (0, 0)]
    assert [
        place.plane.kubelets.nodes[name] == boot for name, boot in zip(pool.names, boots, strict=True)
    ] == [
        *(False, False),
        *(True, True),
    ]
    assert place.plane.events(rebooted)[-1] == "RebootSent"
    assert place.plane.events(reimaged)[-1] == "ReimageSent"

    # Cordoned and out until the preflight has passed; a second run has nothing to do.
    again = pool.repair()
    assert [again[name]["state"] for name in (rebooted, reimaged)] == ["back", "back"]
    assert fence.is_cordoned(place.plane.document(rebooted)) and place.plane.is_out(reimaged)
    assert len(place.sent(pool)) == 2
    for name in (rebooted, reimaged):
        comes_back(place, name)
    assert set(pool.repair()) == {bad} and place.plane.is_clean(well)
    place.plane.forget(pool.names)


@EACH_REMEDY
def test_killed_before_its_request_leaves(place: Clinic, pool: Pool, remedy: str, request_line: str) -> None:
    """The next run finds no trace of the request, and sends nothing; it does so only when told to."""
    (name,) = pool.names
    pool.ask(name, remedy)
    pool.killed("drop")
    assert pool.stage(name) == "sent"
    ended = pool.repair(status=16)[name]
    assert ended["state"] == "unknown" and f"--again {name}" in ended["reason"]
    assert place.sent(pool) == [request_line]
    assert pool.repair("--again", name)[name]["state"] == "returned"
    assert place.sent(pool) == [request_line] * 2
    comes_back(place, name)


@EACH_REMEDY
def test_killed_before_its_answer_arrives(place: Clinic, pool: Pool, remedy: str, request_line: str) -> None:
    (name,) = pool.names
    pool.ask(name, remedy)
    pool.killed("lose")
    assert pool.repair()[name]["state"] in ("returned", "back")
    assert place.sent(pool) == [request_line]
    comes_back(place, name)


@pytest.mark.parametrize(("effect", "state", "status"), [("drop", "unknown", 16), ("lose", "returned", 0)])
def test_a_lost_answer_is_never_answered_by_sending_again(
    place: Clinic, pool: Pool, effect: Literal["drop", "lose"], state: str, status: int
) -> None:
    (name,) = pool.names
    pool.ask(name, "reboot")
    with pool.faulty(instead(effect)):
        assert pool.repair(status=status)[name]["state"] == state
    assert place.sent(pool) == [REBOOT]
    assert pool.repair(status=status)[name]["state"] == {"unknown": "unknown"}.get(state, "back")
    assert place.sent(pool) == [REBOOT]


def test_a_refused_request_is_asked_for_as_before(place: Clinic, pool: Pool) -> None:
    (name,) = pool.names
    pool.ask(name, "reimage")
    before = place.plane.record(name)
    for status in (403, 409, 429):
        refusal = error(status, "NotNow", "not now", Retry_After="1")
        with pool.faulty(instead(refusal)):
            ended = pool.repair(status=16)[name]
        assert ended["state"] == "refused" and "NotNow" in ended["reason"]
        assert place.plane.record(name) == before and "ReimageSent" not in place.plane.events(name)
    assert pool.repair()[name]["state"] == "returned"
    assert place.sent(pool) == [REIMAGE] * 4


def test_an_operation_that_fails_is_not_repeated(place: Clinic, pool: Pool) -> None:
    (name,) = pool.names
    pool.ask(name, "reimage")
    place.scale_sets.failures["0"] = ["OSProvisioningTimedOut"]
    ended = pool.repair(status=16)[name]
    place.scale_sets.failures.clear()
    assert ended["state"] == "failed" and "OSProvisioningTimedOut" in ended["reason"]
    assert pool.repair(status=16)[name]["state"] == "failed"
    assert place.sent(pool) == [REIMAGE]


@pytest.mark.nightly
def test_a_node_that_does_not_come_back_is_named(place: Clinic, pool: Pool) -> None:
    (name,) = pool.names
    pool.ask(name, "reboot")
    place.silent.add(name)
    ended = pool.repair(status=16)[name]
    assert ended["state"] == "failed" and "doesn't come back" in ended["reason"]


def test_a_pod_that_lands_before_the_last_look(place: Clinic, pool: Pool) -> None:
    """Between the mark and the request: nothing is sent, and the node's request stands as before."""
    (name,) = pool.names
    pool.ask(name, "reboot")
    admin = place.plane.admin
    space = workloads.namespace(admin, "lands")
    job = workloads.job("late", 1, [name])
    job["spec"]["template"]["spec"] |= {"nodeName": name}
    late = iter([job])

    def land(request: Request) -> None:
        if request.path.endswith("/virtualMachines") and (manifest := next(late, None)):
            assert pool.stage(name) == "sent"
            workloads.create(admin, space, manifest)
            workloads.await_running(admin, space, 1)

    with pool.faulty(land):
        ended = pool.repair(status=16)[name]
    assert ended["state"] == "skipped" and "lands/late" in ended["reason"]
    assert place.sent(pool) == [] and pool.stage(name) == "asked"
    # It isn't marked either if the pod is already there.
    assert pool.repair(status=16)[name]["state"] == "skipped" and place.sent(pool) == []
    (pod,) = workloads.pods_of(admin, space)
    place.plane.kubelets.finish(space, pod["metadata"]["name"])
    assert pool.repair()[name]["state"] == "returned"


def test_a_node_that_somebody_uncordons_is_left_alone(place: Clinic, pool: Pool) -> None:
    (name,) = pool.names
    pool.ask(name, "reboot")
    assert fence.free(place.plane.admin, name, "gate")
    ended = pool.repair(status=16)[name]
    assert (ended["state"], ended["reason"]) == ("skipped", "somebody uncordoned it")
    assert place.sent(pool) == []


def test_an_instance_that_is_another_machine_is_left_alone(place: Clinic, pool: Pool) -> None:
    (name,) = pool.names
    pool.ask(name, "reimage")
    machine = place.machines[name]
    vm_id, machine.vm_id = machine.vm_id, "00000000-0000-0000-0000-000000000000"
    assert "another machine" in pool.repair(status=16)[name]["reason"]
    machine.vm_id = vm_id
    assert place.sent(pool) == [] and pool.stage(name) == "asked"


def test_a_node_that_the_inventory_does_not_have_is_named(place: Clinic) -> None:
    pool = place.pool(2)
    first, second = pool.names
    pool.write([second])
    pool.ask(first, "reboot")
    assert "pool snapshot" in pool.repair(status=16)[first]["reason"]
    assert place.sent(pool) == []
    place.plane.forget(pool.names)


def test_a_set_that_a_roll_holds_is_skipped_and_named(place: Clinic, pool: Pool) -> None:
    """By its Lease, or by its tag if the roll belongs to another cluster."""
    (name,) = pool.names
    pool.ask(name, "reboot")
    access = place.plane.cluster.admin.access
    with Leases(lambda: Client(access, agent="roll"), "roll-7", OFTEN) as leases:
        leases.take(pool.path)
        ended = pool.repair(status=16)[name]
        assert ended["state"] == "skipped" and "held by roll-7" in ended["reason"]
    tags = place.scale_sets.sets[pool.path.lower()].content["tags"]
    tags[HOLD_TAG] = f"roll-8 until {datetime.fromtimestamp(time.time() + 600, UTC).isoformat()}"
    assert "driven by roll-8" in pool.repair(status=16)[name]["reason"]
    assert place.sent(pool) == [] and pool.stage(name) == "asked"
    del tags[HOLD_TAG]
    assert pool.repair()[name]["state"] == "returned"


def test_what_the_breaker_holds_is_not_sent(place: Clinic, pool: Pool) -> None:
    """It was requested before so many nodes had failed for the same reason that the nodes can't be at fault."""
    (name,) = pool.names
    pool.ask(name, "reboot")
    held = hold.Hold(FINDINGS["reboot"], "pool", "", failed=12, of=100, since=int(time.time()))
    admin = place.plane.admin

    def breaker(entry: hold.Hold) -> dict[str, Any]:
        return {"metadata": {"name": hold.NAME}, "data": {entry.key: entry.text()}}

    admin.request("POST", hold.COLLECTION, breaker(held))
    ended = pool.repair(status=16)[name]
    assert ended["state"] == "skipped" and "12 of 100 nodes failed alike" in ended["reason"]
    assert place.sent(pool) == [] and pool.stage(name) == "asked"
    admin.request("PUT", hold.PATH, breaker(replace(held, state=hold.RELEASED)))
    assert pool.repair()[name]["state"] == "returned"
    admin.request("DELETE", hold.PATH)


@pytest.mark.nightly
def test_a_second_run_at_the_same_time_sends_nothing(place: Clinic, pool: Pool) -> None:
    (name,) = pool.names
    pool.ask(name, "reboot")
    place.scale_sets.seconds["restart"] = 15.0
    first = pool.start()
    assert wait_until(lambda: place.sent(pool) == [REBOOT], 60)
    ended = pool.repair(status=16)[name]
    place.scale_sets.seconds["restart"] = 0.5
    assert ended["state"] == "skipped" and "held by repair-" in ended["reason"]
    assert pool.ended(first, 0)[name]["state"] == "returned"
    assert place.sent(pool) == [REBOOT]


@pytest.mark.nightly
def test_a_run_that_is_terminated_leaves_the_rest_to_the_next(place: Clinic, pool: Pool) -> None:
    (name,) = pool.names
    pool.ask(name, "reboot")
    place.scale_sets.seconds["restart"] = 15.0
    process = pool.start()
    assert wait_until(lambda: place.sent(pool) == [REBOOT], 60)
    process.send_signal(signal.SIGTERM)
    ended = pool.ended(process, 130)[name]
    place.scale_sets.seconds["restart"] = 0.5
    assert ended["state"] == "sent" and pool.stage(name) == "sent"
    assert pool.repair()[name]["state"] == "returned"
    assert place.sent(pool) == [REBOOT]


def test_only_what_was_sent_is_sent_again(pool: Pool) -> None:
    process = pool.start("--again", pool.names[0])
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and "nothing was sent for" in err


def test_the_rights_are_enough_and_no_more(place: Clinic) -> None:
    """After all tests above: what was used, in the cluster and in Azure, is exactly what is documented."""
    lines = (place.plane.cluster.work / "audit.log").read_text().splitlines()
    events: list[dict[str, Any]] = [json.loads(line) for line in lines]
    done = [e for e in events if e.get("userAgent") == AGENT and e["stage"] == "ResponseComplete"]
    assert [event for event in done if event["responseStatus"]["code"] == 403] == []
    rules = [rule for m in manifests(RIGHTS) if m["kind"].endswith("Role") for rule in m["rules"]]
    allowed = {(verb, name) for rule in rules for name in rule["resources"] for verb in rule["verbs"]}
    assert {asked(event)[:2] for event in done if event.get("objectRef")} == allowed
    assert {action.lower() for action in used - {""}} == {action.lower() for action in actions()}
