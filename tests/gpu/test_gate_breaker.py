"""The breaker for boots and the advise-only controller, with a real API server and the documented permissions."""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections.abc import Callable

import pytest

from image_builder.cluster.gate import breaker
from image_builder.cluster.gate.admit import overview
from image_builder.cluster.gate.model import Rules
from image_builder.node.net.kube import MERGE_PATCH, KubeError, path_of_node
from image_builder.node.preflight import command, hold, model
from image_builder.node.preflight.hold import Hold
from image_builder.node.preflight.model import FAILED, Verdict
from image_builder.node.preflight.settings import Settings as PreflightSettings
from tests.gpu.test_gate_preflight import FABRIC
from tests.support.control_plane.gates import (
    Cluster,
    Machine,
    controlled,
    give_rights,
    wait_until,
)

pytestmark = pytest.mark.root

CODE = "gpu.kat.int"
KEY = f"{CODE}.."  # for nodes without a pool
REPLACE = Verdict(FAILED, CODE, "mismatch in SM 7", "replace")


@pytest.fixture(scope="module", autouse=True)
def _rights(cluster: Cluster) -> None:
    give_rights(cluster.admin)


@pytest.fixture(scope="module")
def machine(
    cluster: Cluster, healthz: str, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], Machine]:
    directory = tmp_path_factory.mktemp("machines")

    def make() -> Machine:
        found = Machine(cluster, directory, f"node-{uuid.uuid4().hex[:8]}", healthz)
        found.start(is_known=False)
        return found

    return make


def held(cluster: Cluster) -> dict[str, Hold]:
    return breaker.read(cluster.admin) or {}


def asked(machine: Machine) -> Verdict:
    """Make the request as the machine's preflight does, with the kubelet's identity."""
    return hold.asked(REPLACE, PreflightSettings(kubeconfig=os.fspath(machine.kubeconfig)))


def test_many_that_fail_alike_are_held_until_a_person_says_otherwise(
    cluster: Cluster, machine: Callable[[], Machine]
) -> None:
    failing, good = [machine() for _ in range(3)], machine()
    with controlled(cluster) as said:
        good.report(model.PASSED)
        for each in failing[:2]:
            each.report(FAILED, CODE, "replace")
        assert wait_until(lambda: not good.is_out())
        assert held(cluster) == {} and asked(good) == REPLACE

        failing[2].report(FAILED, CODE, "replace")
        assert wait_until(lambda: KEY in held(cluster))
        assert (held(cluster)[KEY].failed, held(cluster)[KEY].of) == (3, 4)
        assert wait_until(lambda: any(f"BREAKER OPEN: {CODE}: 3 of 4 nodes" in line for line in said))
        # From now on, a node that fails for this reason does nothing to itself and requests nothing.
        verdict = asked(good)
        assert (verdict.state, verdict.action) == (FAILED, "none")
        assert "replace is held: 3 of 4 nodes failed alike" in verdict.reason
        elsewhere = machine()
        cluster.admin.request(
            "PATCH", path_of_node(elsewhere.name), {"metadata": {"labels": {"pool": "b"}}}, MERGE_PATCH
        )
        assert asked(elsewhere) == REPLACE, "of another pool"
        told = {line["node"]: line["why"] for line in overview(cluster.admin, Rules())[0]}
        assert all(told[each.name].startswith("HELD, 3 of 4 nodes") for each in failing)
        assert "HELD" not in told[good.name]

        released = breaker.release(cluster.admin, CODE, None, who="me", reason="a rack lost its power")
        assert released.failed == 3
        assert asked(good) == REPLACE
        assert "HELD" not in str(overview(cluster.admin, Rules())[0])

        for each in failing:
            each.start(is_known=True)
            each.report(model.PASSED)
        assert wait_until(lambda: held(cluster) == {})
        assert wait_until(lambda: not any(each.is_out() for each in failing))

    # A new controller takes over what the previous one held: it opens the breaker once, and not again.
    for each in failing:
        each.start(is_known=True)
        each.report(FAILED, CODE, "replace")
    for _ in range(2):
        with controlled(cluster) as said:
            assert wait_until(lambda: KEY in held(cluster))
    assert not any("BREAKER OPEN" in line for line in said)


def test_a_node_can_read_what_is_held_and_change_nothing(
    cluster: Cluster, machine: Callable[[], Machine]
) -> None:
    node = machine()
    with pytest.raises(KubeError) as caught:
        node.kubelet.request("PATCH", hold.PATH, {"data": None}, "application/merge-patch+json")
    assert caught.value.status == 403


def test_a_controller_that_advises_changes_nothing(cluster: Cluster, machine: Callable[[], Machine]) -> None:
    again = machine()
    again.report(model.PASSED)
    with controlled(cluster):
        assert wait_until(lambda: not again.is_out())
    cluster.admin.request("DELETE", hold.PATH)
    again.start(is_known=True)
    good, *failing = (machine() for _ in range(4))
    good.report(model.PASSED)
    for each in failing:
        each.report(FAILED, CODE, "replace")
    # It may read nodes and nothing else.
    rights = [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["list", "watch"]}]
    rbac = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": "adviser"}}
    path = "/apis/rbac.authorization.k8s.io/v1"
    cluster.admin.request("POST", f"{path}/clusterroles", {**rbac, "kind": "ClusterRole", "rules": rights})
    subject = {"kind": "User", "name": "adviser", "apiGroup": "rbac.authorization.k8s.io"}
    role = {"kind": "ClusterRole", "name": "adviser", "apiGroup": "rbac.authorization.k8s.io"}
    binding = {**rbac, "kind": "ClusterRoleBinding", "roleRef": role, "subjects": [subject]}
    cluster.admin.request("POST", f"{path}/clusterrolebindings", binding)

    before = {each.name: cluster.node(each.name).taints for each in (good, again)}
    with controlled(cluster, "adviser", advises=True) as said:
        assert wait_until(lambda: any(f"{again.name}: would be gated" in line for line in said))
        assert wait_until(lambda: any(f"{good.name}: would be admitted" in line for line in said))
        assert wait_until(lambda: any("BREAKER OPEN" in line and "would be held" in line for line in said))
    assert {each.name: cluster.node(each.name).taints for each in (good, again)} == before
    assert held(cluster) == {}
    assert sum(again.name in line for line in said) == 1
    assert not any("lease" in line or "not done" in line for line in said), said


def switch_on(machine: Machine) -> None:
    """Start a machine whose kubelet is waiting for the preflight: the API server only knows about the previous boot."""
    machine.boot = str(uuid.uuid4())
    (machine.directory / "boot_id").write_text(f"{machine.boot}\n")


def starts_itself_again(machine: Machine) -> bool:
    """Run the agent's preflight on GPUs with a fault that a reboot may cure."""
    here = machine.directory
    for name in ("run", "etc"):
        (here / name).mkdir(exist_ok=True)
    (here / "etc/preflight.json").write_text(json.dumps({"kubeconfig": os.fspath(machine.kubeconfig)}))
    (here / "etc/gpu.json").write_text('{"expect": "gpus"}')
    (here / "release").write_text('IMAGE_BUILD="one"\n')
    rebooted = here / "rebooted"
    rebooted.unlink(missing_ok=True)
    places = command.Places(
        run=here / "run",
        etc=here / "etc",
        release=here / "release",
        boot_id=here / "boot_id",
        attempts=here / "var/preflight.json",
        reboot=("touch", os.fspath(rebooted)),
        smoke=lambda _tier: [sys.executable, "-c", FABRIC, machine.boot],
    )
    assert command.run(places) == int(rebooted.exists())
    return rebooted.exists()


def test_nodes_that_start_themselves_again_are_counted(
    cluster: Cluster, machine: Callable[[], Machine]
) -> None:
    nodes = [machine() for _ in range(3)]
    with controlled(cluster):
        for each in nodes:
            switch_on(each)
            assert starts_itself_again(each)
            said = each.condition()
            assert said["status"] == "False" and said["message"].startswith(f"boot={each.boot} ")
        assert wait_until(lambda: "fabric.state.." in held(cluster))
        switch_on(nodes[0])
        assert not starts_itself_again(nodes[0])
        assert "replace is held" in nodes[0].condition()["message"]
