"""A roll with a deadline on a real control plane: the jobs that it lists, its confirmation, and whom it overrules."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from image_builder.cli.main import app
from image_builder.drain import event
from image_builder.errors import UsageError
from image_builder.pool.plan.policy import Roll
from image_builder.pool.run.journal import journal_of
from tests.support.arm.fleet import BUILDS, NEW, OLD
from tests.support.arm.serving import found_by
from tests.support.control_plane import workloads
from tests.support.control_plane.gates import Cluster
from tests.support.pools.desk import write_desk
from tests.support.pools.recorder import moment
from tests.support.pools.rolls import GENEROUS, QUICK, World, plan, world

pytestmark = pytest.mark.root

_EACH = 3
LATER = "2099-01-01T00:00:00Z"


@pytest.fixture(scope="module")
def whole(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(cluster, 4, _EACH, tmp_path_factory.mktemp("rolls")) as state:
        workloads.namespace(state.admin, "work")
        yield state


def part(whole: World, sets: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """Return the world with this number of scale sets that no test has used."""
    found_by(whole.served.environment, monkeypatch)
    hosts, whole.hosts = whole.hosts[: sets * _EACH], whole.hosts[sets * _EACH :]
    fleet = replace(whole, hosts=hosts, folder=folder, began=time.time())
    whole.served.arm.faults.append(fleet.answer)
    return fleet


def test_jobs_are_listed_and_nothing_begins_without_the_confirmation(
    whole: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = part(whole, 1, tmp_path, monkeypatch)
    names = [host.name for host in fleet.hosts]
    workloads.create(fleet.admin, "work", workloads.job("listed", 2, names[:2], gpus=True))
    workloads.create(fleet.admin, "work", workloads.pod("elsewhere", whole.hosts[-1].name))
    workloads.await_running(fleet.admin, "work", 2, "listed")
    options = write_desk(fleet)
    roll, azure = os.fspath(tmp_path / "roll.json"), ["--endpoint", fleet.served.url]
    inventory = ["-i", os.fspath(tmp_path / "hosts.yml")]
    aims = ["--to", NEW, "--unproven", "a test", "--deadline", LATER, "--out", roll, "--json"]
    planned = CliRunner().invoke(app, ["pool", "plan", "gpu", *inventory, *aims, *azure])
    assert planned.exit_code == 0, planned.output
    run = json.loads(planned.stdout)["run"]
    for confirmed in ([], ["--evict", "roll-000000000000"]):
        done = CliRunner().invoke(app, ["pool", "run", roll, *inventory, *options, *azure, *confirmed])
        assert done.exit_code == UsageError.exit_code, done.output
        assert f"--evict {run}" in done.stderr
        (row,) = [line for line in done.stderr.splitlines() if "work/Job listed" in line]
        assert "has GPUs" in row and all(name in row for name in names[:2]) and names[2] not in row
        assert "elsewhere" not in done.stderr
    assert not journal_of(tmp_path / "roll.json").exists()
    assert not any(fleet.is_ours(name) for name in names)
    assert {fleet.build(name) for name in names} == {BUILDS[OLD]}
    assert len(workloads.pods_of(fleet.admin, "work", "listed")) == 2


def evictions(fleet: World) -> dict[int, dict[str, list[float]]]:
    """Return when the roll requested evictions of which workload's pods, by the API server's answer."""
    asked: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for entry in fleet.changes():
        target = entry["objectRef"]
        if target.get("subresource") == "eviction":
            name = target["name"].partition("-")[0]
            asked[entry["responseStatus"]["code"]][name].append(moment(entry))
    return asked


@pytest.mark.nightly
def test_after_the_deadline_owners_are_overruled_and_nobody_else(
    whole: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One gang's hosts are all planned, another's aren't; a budget and a rule hold; a lone pod's owner never agreed."""
    fleet = part(whole, 2, tmp_path, monkeypatch)
    (gang, idle, stranded), (partner, budgeted, lone) = (
        [host.name for host in fleet.hosts[first : first + _EACH]] for first in (0, _EACH)
    )
    outside, admin = whole.hosts[0].name, fleet.admin
    for manifest in (
        workloads.job("whole", 2, [gang, partner], gpus=True),
        workloads.job("stranded", 2, [stranded, outside], gpus=True),
        workloads.replica_set("budgeted", 1, [budgeted]),
        workloads.budget("budgeted", "budgeted", 1),
        workloads.pod("lone", lone, gpus=True),
    ):
        workloads.create(admin, "work", manifest)
    workloads.await_running(admin, "work", 2, "whole")
    workloads.await_running(admin, "work", 2, "stranded")
    workloads.await_budget(admin, "work", "budgeted", 0)
    deadline = round(time.time()) + 15
    roll = Roll(
        max_unavailable="50%",
        drain=QUICK,
        max_wait_seconds=60.0,
        deadline=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(deadline)),
    )
    rolled = plan(fleet, **GENEROUS, roll=roll)
    progress = fleet.drive(rolled)
    ends = {name: status.outcome for name, status in progress.hosts.items()}
    skipped = {name: outcome.detail for name, outcome in ends.items() if outcome and not outcome.ok}
    assert progress.finished and skipped.keys() == {stranded, budgeted}, ends
    assert "work/budgeted" in skipped[budgeted] and "stranded" in skipped[stranded]
    asked = evictions(fleet)
    accepted = asked[201]
    assert accepted.keys() == {"whole", "lone"} and len(accepted["whole"]) == 2
    assert min(min(times) for answers in asked.values() for times in answers.values()) >= deadline
    assert asked[429].keys() <= {"budgeted"} and asked[429]
    posted = [
        item
        for item in admin.request("GET", event.PATH)["items"]
        if item["reason"] == "PodEvicted" and rolled.run in item["message"]
    ]
    assert {item["involvedObject"]["name"] for item in posted} == {gang, partner, lone}
    assert all("the deadline has passed, although" in item["message"] for item in posted)
    assert fleet.build(idle) == BUILDS[NEW] and fleet.build(stranded) == BUILDS[OLD]
    fleet.require_invariants(rolled)
