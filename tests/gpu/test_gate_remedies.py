"""Nodes that go bad in service, with a real API server, scheduler and controllers, and the gate's documented rights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from image_builder.cluster.gate.admit import admit, overview
from image_builder.cluster.gate.model import Rules
from image_builder.drain import fence, hosts, quarantine
from image_builder.drain.lease import NAMESPACE, Leases, Settings
from image_builder.drain.observe import Looker
from image_builder.drain.pods import MARK
from image_builder.drain.policy import Policy as DrainPolicy
from image_builder.drain.why import bad_hosts, explain
from image_builder.node.net.kube import MERGE_PATCH, Client, path_of_node
from tests.support.control_plane import workloads
from tests.support.control_plane.drains import asked
from tests.support.control_plane.gates import Cluster, manifests, wait_until
from tests.support.control_plane.wards import DRAIN_RIGHTS, Ward, ward

pytestmark = pytest.mark.root

SICK = "GpuLost"
DRAIN = {"settle_seconds": 0.3, "poll_seconds": 0.1, "max_wait_seconds": 60.0}


@pytest.fixture(scope="module")
def plane(cluster: Cluster) -> Iterator[Ward]:
    with ward(cluster) as state:
        yield state


@pytest.fixture
def nodes(plane: Ward) -> Iterator[Callable[..., list[str]]]:
    """Register nodes that are removed after the test: a share is calculated from all nodes that exist."""
    names: list[str] = []

    def register(count: int, **labels: str) -> list[str]:
        names.extend(fresh := plane.nodes(count, **labels))
        return fresh

    yield register
    plane.forget(names)


def rule(remedy: str, reason: str = "Gpu*") -> dict[str, Any]:
    return {"rules": [{"reason": reason, "remedy": remedy}], "drain": DRAIN}


def test_a_lasting_finding_takes_a_node_out_until_it_passes_its_preflight(
    plane: Ward, nodes: Callable[..., list[str]]
) -> None:
    sick, well = nodes(2)
    with plane.controlled(lasting_seconds=600.0):
        plane.report(sick, "False", SICK, ago=3600)
        assert wait_until(lambda: plane.is_out(sick))
        record = plane.record(sick)
        assert record and (record.condition, record.reason, record.remedy) == ("NodeHealthy", SICK, "taint")
        assert wait_until(lambda: plane.events(sick) == ["NodeQuarantined"])
        # Its pods stay, and no new ones are scheduled.
        assert not fence.is_cordoned(plane.document(sick)) and plane.is_clean(well)
        lines = {line["node"]: line for line in overview(plane.admin, Rules())[0]}
        assert (lines[sick]["gate"], lines[sick]["may_work"]) == ("out", "no") and SICK in lines[sick]["why"]

        plane.report(sick, "True", "NodeIsHealthy")
        plane.report(well, "False", SICK, ago=3600)
        assert wait_until(lambda: plane.is_out(well))
        assert plane.is_out(sick), "health alone brings nobody back"
        plane.kubelets.boot(sick)
        plane.passes(sick)
        plane.report(sick, "True", "NodeIsHealthy")
        assert wait_until(lambda: plane.is_clean(sick))
        assert plane.events(sick) == ["NodeQuarantined", "NodeReturned"]


def test_a_finding_that_has_not_lasted_is_left_alone(plane: Ward, nodes: Callable[..., list[str]]) -> None:
    brief, lasting = nodes(2)
    with plane.controlled(lasting_seconds=600.0):
        plane.report(brief, "False", SICK)
        plane.report(lasting, "False", SICK, ago=3600)
        assert wait_until(lambda: plane.is_out(lasting))
        assert plane.is_clean(brief) and plane.events(brief) == []


def test_a_person_lets_a_node_in_that_is_not_well(plane: Ward, nodes: Callable[..., list[str]]) -> None:
    (sick,) = nodes(1)
    with plane.controlled():
        plane.report(sick, "False", SICK)
        assert wait_until(lambda: plane.is_out(sick))
    admit(plane.admin, sick, Rules(), who="me", reason="its last job")
    assert plane.is_clean(sick)
    with plane.controlled():
        (other,) = nodes(1)
        plane.report(other, "False", SICK)
        assert wait_until(lambda: plane.is_out(other))
        assert plane.is_clean(sick)
        # Once it is well, it is like any other node.
        plane.report(sick, "True", "NodeIsHealthy")
        assert wait_until(lambda: not plane.node(sick, Rules()).admitted)
        plane.report(sick, "False", SICK, ago=-2)  # times are in seconds
        assert wait_until(lambda: plane.is_out(sick))


@pytest.mark.parametrize(
    ("condition", "reason"),
    [
        ("KernelDeadlock", "DockerHung"),
        ("GpuMemWatch", "GpuMemWatchIsNotHealthy"),
        ("example.com/Disk", "Lost"),
    ],
)
def test_conditions_of_others(
    plane: Ward, nodes: Callable[..., list[str]], condition: str, reason: str
) -> None:
    """Conditions of node-problem-detector and NVSentinel are bad when True, and so is one of the operator's own."""
    (sick,) = nodes(1)
    with plane.controlled(conditions={"example.com/*": "True"}):
        plane.report(sick, "True", reason, condition)
        assert wait_until(lambda: plane.is_out(sick))
        plane.report(sick, "False", "AllWell", condition)
        plane.passes(sick)
        assert wait_until(lambda: plane.is_clean(sick))


def test_what_is_left_to_nvsentinel_is_not_touched(plane: Ward, nodes: Callable[..., list[str]]) -> None:
    (pooled,), (at_work, other) = nodes(1, pool="h100"), nodes(2)
    mark = {"metadata": {"annotations": {"quarantineHealthEvent": "{}"}}}
    plane.admin.request("PATCH", path_of_node(at_work), mark, MERGE_PATCH)
    with plane.controlled(nvsentinel=["h100"]):
        for name in (pooled, at_work, other):
            plane.report(name, "False", SICK)
        assert wait_until(lambda: plane.is_out(other))
        assert plane.is_clean(pooled) and plane.is_clean(at_work)


def test_an_emptied_node_is_handed_on_and_a_gpu_pod_is_not_evicted(
    plane: Ward, nodes: Callable[..., list[str]]
) -> None:
    sick, foreign = nodes(2)
    space = workloads.namespace(plane.admin, "handed-on")
    trains = workloads.replica_set("trains", 1, [sick], gpus=True)
    plain = workloads.job("plain", 1, [sick])
    workloads.create(plane.admin, space, trains, plain)
    workloads.await_running(plane.admin, space, 2)
    plane.admin.request("PATCH", path_of_node(foreign), {"spec": {"unschedulable": True}}, MERGE_PATCH)
    drain = {**DRAIN, "mode": "evict", "checkpoint_seconds": 1.0}
    with plane.controlled(**{**rule("reboot"), "drain": drain}) as lines:
        plane.report(sick, "False", SICK)
        plane.report(foreign, "False", SICK)
        assert wait_until(lambda: any("plain" in line and "is evicted" in line for line in lines))
        (pod,) = workloads.pods_of(plane.admin, space, "trains")
        assert pod["spec"]["nodeName"] == sick and "deletionTimestamp" not in pod["metadata"]
        assert (record := plane.record(sick)) and record.stage == "out"
        # The pod's owner opts in.
        meta = pod["metadata"]
        path = f"/api/v1/namespaces/{space}/pods/{meta['name']}"
        plane.admin.request("PATCH", path, {"metadata": {"annotations": {MARK: "evict"}}}, MERGE_PATCH)
        assert wait_until(lambda: (record := plane.record(sick)) is not None and record.stage == "asked")
        assert plane.events(sick)[0] == "NodeQuarantined" and plane.events(sick)[-1] == "RebootWanted"
        # Someone else's cordon doesn't prevent the taint, and remains entirely theirs.
        assert plane.is_out(foreign) and fence.record_of(plane.document(foreign)) is None
        for name in (sick, foreign):
            plane.kubelets.boot(name)
            plane.passes(name)
            plane.report(name, "True", "NodeIsHealthy")
        assert wait_until(lambda: plane.is_clean(sick) and plane.is_clean(foreign))
    assert not fence.is_cordoned(plane.document(sick)) and fence.is_cordoned(plane.document(foreign))


def test_a_set_that_a_rollout_drives_is_emptied_by_nobody_else(
    plane: Ward, nodes: Callable[..., list[str]]
) -> None:
    sick, work = nodes(2)
    path = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/virtualMachineScaleSets/gpu-0"
    provider = {"spec": {"providerID": f"azure://{path}/virtualMachines/1"}}
    for name in (sick, work):
        plane.admin.request("PATCH", path_of_node(name), provider, MERGE_PATCH)
    _, patch = fence.cordon(plane.document(work), "roll-7", 1.0)
    assert fence.send(plane.admin, work, patch)
    often = Settings(namespace=NAMESPACE, duration=5.0, deadline=4.0, pause=0.5)
    access = plane.cluster.admin.access
    with plane.controlled(**rule("drain")) as lines:
        with Leases(lambda: Client(access, agent="roll"), "roll-7", often) as leases:
            leases.take(path.lower())
            for name in (sick, work):
                plane.report(name, "False", SICK)
            assert wait_until(lambda: plane.is_out(sick))
            (other,) = nodes(1)
            # In no scale set, and with another reason, or the breaker would hold all three: emptied a few cycles
            # later.
            plane.report(other, "False", "GpuFabric")
            assert wait_until(lambda: f"{other}: emptied" in lines)
            assert not fence.is_cordoned(plane.document(sick)) and not plane.is_out(work)
        assert wait_until(lambda: f"{sick}: emptied" in lines)
        assert fence.is_cordoned(plane.document(sick)) and not plane.is_out(work)
    record = fence.record_of(plane.document(work))
    assert record and record.run == "roll-7"


def test_a_bad_host_is_remembered_and_who_comes_to_it_is_held(
    plane: Ward, nodes: Callable[..., list[str]]
) -> None:
    first, moved, later = nodes(3)
    plane.put_on(first, "HOST1")
    plane.put_on(moved, "HOST2")
    with plane.controlled() as lines:
        for name in (first, moved):
            plane.report(name, "False", SICK)
        assert wait_until(lambda: set(hosts.read(plane.admin) or {}) == {"HOST1", "HOST2"})
        # One passes its preflight on the same host, the other's machine comes up on another host.
        plane.put_on(moved, "HOST3")
        for name in (first, moved):
            plane.kubelets.boot(name)
            plane.passes(name)
            plane.report(name, "True", "NodeIsHealthy")
        assert wait_until(lambda: plane.is_clean(first) and plane.is_clean(moved))
        assert wait_until(lambda: set(hosts.read(plane.admin) or {}) == {"HOST2"})
        # By default, that is only reported.
        plane.put_on(later, "HOST2")
        assert wait_until(lambda: plane.events(later) == ["HostKnownBad"])
        assert plane.is_clean(later) and any(moved in line for line in lines if later in line)
    line = next(line for line in overview(plane.admin, Rules())[0] if line["node"] == later)
    assert (line["may_work"], moved in line["why"]) == ("yes", True)
    looker = Looker(plane.admin, DrainPolicy())
    assert (
        "HOST2 is known as bad" in explain(plane.admin, looker, later, 0.0, bad_hosts(plane.admin))["state"]
    )
    with plane.controlled(rules=[{"reason": "HostKnownBad", "remedy": "taint"}]):
        assert wait_until(lambda: plane.is_out(later))
        hosts.forget(plane.admin, "HOST2")
        plane.passes(later)
        assert wait_until(lambda: plane.is_clean(later))
        assert plane.events(later) == ["HostKnownBad", "NodeQuarantined", "NodeReturned"]


def test_a_controller_that_advises_changes_nothing(plane: Ward, nodes: Callable[..., list[str]]) -> None:
    (sick,) = nodes(1)
    with plane.controlled(advises=True, **rule("reboot")) as lines:
        plane.report(sick, "False", SICK)
        assert wait_until(lambda: f"{sick}: would be taken out for {SICK} (reboot)" in lines)
    assert plane.is_clean(sick) and plane.events(sick) == []


def test_a_false_alarm_takes_out_no_more_than_the_budget(
    plane: Ward, nodes: Callable[..., list[str]]
) -> None:
    """Five nodes of a hundred fail, and then half of them."""
    fleet = nodes(100)
    with plane.controlled(share=0.02) as lines:
        for name in fleet[:5]:
            plane.report(name, "False", SICK)
        assert wait_until(lambda: sum(map(plane.is_out, fleet[:5])) == 2)
        for name in fleet[5:50]:
            plane.report(name, "False", SICK)
        assert wait_until(lambda: any(f"BREAKER OPEN: {SICK}" in line for line in lines))
        # The budget has room again, and the first reason is held: a node that fails for another reason is taken out.
        back = next(name for name in fleet if plane.is_out(name))
        plane.passes(back)
        plane.report(back, "True", "NodeIsHealthy")
        assert wait_until(lambda: plane.is_clean(back))
        plane.report(fleet[99], "True", "DockerHung", "KernelDeadlock")
        assert wait_until(lambda: plane.is_out(fleet[99]))
        assert sum(map(plane.is_out, fleet[:50])) == 1


class DiesError(BaseException):
    """Stands for the process being killed."""


class Mortal(Client):
    """The connection of a process that dies right before or right after its ``last`` request that changes anything."""

    last, is_after = 0, False
    changes = 0

    def request(self, method: str, path: str, body: Any = None, content_type: str = "") -> dict[str, Any]:
        if method == "GET":
            return super().request(method, path, body)
        self.changes += 1
        if self.changes == self.last and not self.is_after:
            raise DiesError
        answer = super().request(method, path, body, content_type or "application/json")
        if self.changes == self.last:
            raise DiesError
        return answer


def outlived(
    plane: Ward,
    name: str,
    client: Client,
    policy: dict[str, Any],
    is_over: Callable[[Ward, str], bool],
) -> int:
    """Run a controller until a condition holds, then its successor if it dies; return how many died."""
    for deaths, living in enumerate((client, plane.client())):
        with living, suppress(DiesError):
            for _ in range(30):
                if is_over(plane, name):
                    return deaths
                plane.turn(living, [name], **policy)
    raise AssertionError(plane.document(name))


def is_asked(plane: Ward, name: str) -> bool:
    record = plane.record(name)
    return record is not None and record.stage == "asked"


def test_a_controller_that_is_killed_at_each_of_its_requests(
    plane: Ward, nodes: Callable[..., list[str]]
) -> None:
    """The successor does the rest; each step is one Event, and nothing of ours is left behind in the end."""
    cases = [(last, is_after) for last in range(1, 10) for is_after in (False, True)]
    names = nodes(len(cases))
    deaths = 0
    for name, (last, is_after) in zip(names, cases, strict=True):
        policy = {**rule("reimage"), "drain": {**DRAIN, "settle_seconds": 0.0}}
        plane.report(name, "False", SICK)
        client = Mortal(plane.client().access, agent="gate")
        client.last, client.is_after = last, is_after

        deaths += outlived(plane, name, client, policy, is_asked)
        assert fence.is_cordoned(plane.document(name)) and plane.is_out(name)
        plane.kubelets.boot(name)
        plane.passes(name)
        plane.report(name, "True", "NodeIsHealthy")
        deaths += outlived(plane, name, client, policy, Ward.is_clean)
        assert not fence.is_cordoned(plane.document(name))
        reasons = plane.events(name)
        steps = ("NodeQuarantined", "ReimageWanted", "NodeReturned")
        assert [reasons.count(reason) for reason in steps] == [1, 1, 1]
    assert deaths == len(cases)
    assert all(quarantine.record_of(plane.document(name)) is None for name in names)


def test_the_rights_are_enough_and_no_more(plane: Ward) -> None:
    """Checked after all tests above: nothing was refused, and each permission for draining was needed."""
    events = [event for event in plane.cluster.audit() if event.get("userAgent") == "gate"]
    done = [event for event in events if event["stage"] == "ResponseComplete"]
    assert done and [event for event in done if event["responseStatus"]["code"] == 403] == []
    rules = [rule for m in manifests(DRAIN_RIGHTS) if m["kind"] == "ClusterRole" for rule in m["rules"]]
    allowed = {(verb, name) for rule in rules for name in rule["resources"] for verb in rule["verbs"]}
    assert allowed <= {asked(event)[:2] for event in done}
