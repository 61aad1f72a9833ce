"""A roll with exactly the permissions that its plan prints: RBAC of a real API server, 403 from the simulated Azure."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from image_builder.cli.main import app
from image_builder.drain.lease import NAMESPACE
from image_builder.errors import DefinitionError
from image_builder.node.net.kube import MERGE_PATCH
from image_builder.pool.plan.policy import GateLimits, Roll
from image_builder.pool.rights import in_cluster, missing_in_cluster
from image_builder.pool.run.journal import journal_of
from image_builder.pool.show.report import counts
from image_builder.pool.steps.control_plane import Kubernetes
from tests.support.arm.fleet import NEW, actions
from tests.support.arm.model import Request, action_of
from tests.support.arm.serving import found_by
from tests.support.control_plane import workloads
from tests.support.control_plane.drains import asked
from tests.support.control_plane.gates import Cluster, in_background, wait_until
from tests.support.pools.desk import write_desk
from tests.support.pools.recorder import audited
from tests.support.pools.rolls import GENEROUS, QUICK, RUN_AGENT, World, drive, plan, world

pytestmark = pytest.mark.root

ROLL = Roll(max_unavailable="50%", drain=QUICK.model_copy(update={"mode": "evict"}), max_wait_seconds=60.0)
MANUAL = "Microsoft.Compute/virtualMachineScaleSets/manualUpgrade/action"
ROLES = "/apis/rbac.authorization.k8s.io/v1"


@pytest.fixture(scope="module")
def whole(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(cluster, 1, 3, tmp_path_factory.mktemp("rights")) as state:
        workloads.namespace(state.admin, "work")
        yield state


@pytest.fixture
def fleet(whole: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    found_by(whole.served.environment, monkeypatch)
    return replace(whole, folder=tmp_path, began=time.time())


@contextmanager
def without(fleet: World, role: str, verb: str) -> Iterator[None]:
    """Remove a verb from the first rule of a role (`clusterroles/NAME`) for a while."""
    path = f"{ROLES}/{role}"
    rules = fleet.admin.request("GET", path)["rules"]
    less = [{**rules[0], "verbs": [each for each in rules[0]["verbs"] if each != verb]}, *rules[1:]]
    account = fleet.account()
    before = len(missing_in_cluster(account, ROLL))
    fleet.admin.request("PATCH", path, {"rules": less}, MERGE_PATCH)
    try:
        # The authorizer sees changed roles a moment later.
        assert wait_until(lambda: len(missing_in_cluster(account, ROLL)) == before + 1)
        yield
    finally:
        fleet.admin.request("PATCH", path, {"rules": rules}, MERGE_PATCH)
        assert wait_until(lambda: len(missing_in_cluster(account, ROLL)) == before)


def told(*argv: str) -> tuple[int, set[str]]:
    """Run a `pool` command; return its status, and the problems that it reports."""
    done = CliRunner().invoke(app, ["pool", *argv, "--json"])
    document: dict[str, Any] = json.loads(done.stdout)
    return done.exit_code, {problem["what"] for problem in document.get("error", {}).get("problems", ())}


def test_one_missing_right_of_either_side_is_told_before_anything_is_done(fleet: World) -> None:
    options = write_desk(fleet)
    roll, inventory = os.fspath(fleet.folder / "roll.json"), os.fspath(fleet.folder / "hosts.yml")
    azure = ["-i", inventory, "--endpoint", fleet.served.url]
    aims = ["plan", "gpu", *azure, "--to", NEW, "--unproven", "a test", "--out", roll, *options[-2:]]
    lacking = {
        f"the right {MANUAL} is missing on {fleet.hosts[0].scale_set_id}",
        "the right to patch nodes is missing",
        f"the right to update leases.coordination.k8s.io is missing in namespace {NAMESPACE}",
    }
    namespaced = f"namespaces/{NAMESPACE}/roles/image-builder-roll"
    allowed = fleet.served.arm.actions
    assert told(*aims) == (0, set())
    (fleet.folder / "roll.json").rename(fleet.folder / "first.json")
    fleet.served.arm.actions = [action for action in allowed if action != MANUAL]
    try:
        with without(fleet, "clusterroles/image-builder-roll", "patch"), without(fleet, namespaced, "update"):
            assert told(*aims) == (DefinitionError.exit_code, lacking)
            assert not Path(roll).exists()
            first = os.fspath(fleet.folder / "first.json")
            assert told("run", first, *azure, *options) == (DefinitionError.exit_code, lacking)
    finally:
        fleet.served.arm.actions = allowed
    assert not journal_of(fleet.folder / "first.json").exists()
    assert not any(fleet.is_ours(host.name) for host in fleet.hosts)
    assert not fleet.changes() and not fleet.reimages()


def test_the_rights_are_enough_and_no_more(fleet: World) -> None:
    """With a pod to evict and a Job to wait for: exactly what a plan prints was used, and nothing was refused."""
    admin = fleet.admin
    workloads.create(admin, "work", workloads.job("ends", 1, ["gpu-0-0"], gpus=True))
    workloads.create(admin, "work", workloads.replica_set("web", 1, ["gpu-0-1", "gpu-0-2"]))
    workloads.await_running(admin, "work", 2)
    rolled = plan(fleet, **GENEROUS, roll=ROLL, gate=GateLimits(not_ready="100%"))
    used: set[str] = set()

    def use(request: Request, _: object) -> None:
        if "/providers/Microsoft.Compute/" in request.path and not request.path.endswith("/permissions"):
            used.add(action_of(request).lower())

    def finish(_stop: object) -> None:
        if wait_until(lambda: fleet.is_ours("gpu-0-0"), 300):
            for item in workloads.pods_of(admin, "work", "ends"):
                fleet.kubelets.finish("work", item["metadata"]["name"])

    fleet.served.arm.observers.append(use)
    account = fleet.account()
    with in_background(finish), closing(Kubernetes(account)) as control_plane:
        progress = drive(fleet.folder, fleet.served.url, rolled, account, control_plane=control_plane)
    fleet.served.arm.observers.remove(use)
    assert counts(progress.hosts.values())["ok"] == 3, [s.outcome for s in progress.hosts.values()]
    assert used == {action.lower() for action in actions()}
    log, agents = fleet.cluster.audit(), (RUN_AGENT, "image-builder")
    events = [event for agent in agents for event in audited(log, agent, fleet.began)]
    assert [event for event in events if event["responseStatus"]["code"] == 403] == []
    granted = {(right.verb, right.resource) for right in in_cluster(ROLL)}
    reviews = "selfsubjectaccessreviews"
    asked_for = {(verb, name) for verb, name, _ in map(asked, events) if name not in ("", reviews)}
    assert asked_for == {right for right in granted if not right[1].startswith("/")}
    assert any(event["requestURI"] == "/metrics" for event in events)
    fleet.require_invariants(rolled)
