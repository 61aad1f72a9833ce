"""Nodes for which the gate requests a reboot or reimage: real API server, simulated Azure, documented permissions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from image_builder.drain import fence
from image_builder.drain.lease import Leases
from image_builder.node.net.kube import Client
from tests.support.arm.model import Request, action_of
from tests.support.control_plane import workloads
from tests.support.control_plane.drains import asked
from tests.support.control_plane.gates import Cluster, manifests
from tests.support.pools.repairs import (
    AGENT,
    OFTEN,
    POLICY,
    RIGHTS,
    Clinic,
    Pool,
    actions,
    clinic,
)

pytestmark = pytest.mark.root

REIMAGE = "POST /virtualMachines/0/reimage"
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


def test_killed_before_its_request_leaves(place: Clinic, pool: Pool) -> None:
    """The next run finds no trace of the request, and sends nothing; it does so only when told to."""
    (name,) = pool.names
    pool.ask(name, "reimage")
    pool.killed("drop")
    assert pool.stage(name) == "sent"
    ended = pool.repair(status=16)[name]
    assert ended["state"] == "unknown" and f"--again {name}" in ended["reason"]
    assert place.sent(pool) == [REIMAGE]
    assert pool.repair("--again", name)[name]["state"] == "returned"
    assert place.sent(pool) == [REIMAGE] * 2
    comes_back(place, name)


def test_killed_before_its_answer_arrives(place: Clinic, pool: Pool) -> None:
    (name,) = pool.names
    pool.ask(name, "reimage")
    pool.killed("lose")
    assert pool.repair()[name]["state"] in ("returned", "back")
    assert place.sent(pool) == [REIMAGE]
    comes_back(place, name)


def test_a_node_with_a_job_is_skipped_and_named(place: Clinic, pool: Pool) -> None:
    (name,) = pool.names
    pool.ask(name, "reboot")
    admin = place.plane.admin
    space = workloads.namespace(admin, "lands")
    job = workloads.job("late", 1, [name])
    job["spec"]["template"]["spec"] |= {"nodeName": name}
    workloads.create(admin, space, job)
    (pod,) = workloads.await_running(admin, space, 1)
    ended = pool.repair(status=16)[name]
    assert ended["state"] == "skipped" and "lands/late" in ended["reason"]
    assert place.sent(pool) == [] and pool.stage(name) == "asked"
    place.plane.kubelets.finish(space, pod["metadata"]["name"])
    assert pool.repair()[name]["state"] == "returned"


def test_a_set_whose_lease_a_roll_holds_is_skipped_and_named(place: Clinic, pool: Pool) -> None:
    (name,) = pool.names
    pool.ask(name, "reboot")
    access = place.plane.cluster.admin.access
    with Leases(lambda: Client(access, agent="roll"), "roll-7", OFTEN) as leases:
        leases.take(pool.path)
        ended = pool.repair(status=16)[name]
    assert ended["state"] == "skipped" and "held by roll-7" in ended["reason"]
    assert place.sent(pool) == [] and pool.stage(name) == "asked"
    assert pool.repair()[name]["state"] == "returned"


def test_only_what_was_sent_is_sent_again(pool: Pool) -> None:
    process = pool.start("--again", pool.names[0])
    _, err = process.communicate(timeout=600)
    assert process.returncode == 2 and "nothing was sent for" in err


def test_the_rights_are_enough_and_no_more(place: Clinic) -> None:
    """After all tests above: what was used, in the cluster and in Azure, is exactly what is documented."""
    done = [
        e
        for e in place.plane.cluster.audit()
        if e.get("userAgent") == AGENT and e["stage"] == "ResponseComplete"
    ]
    assert [event for event in done if event["responseStatus"]["code"] == 403] == []
    rules = [rule for m in manifests(RIGHTS) if m["kind"].endswith("Role") for rule in m["rules"]]
    allowed = {(verb, name) for rule in rules for name in rule["resources"] for verb in rule["verbs"]}
    assert {asked(event)[:2] for event in done if event.get("objectRef")} == allowed
    assert {action.lower() for action in used - {""}} == {action.lower() for action in actions()}
