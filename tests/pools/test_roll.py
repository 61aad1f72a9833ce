"""Rolls on a real control plane: nodes are emptied, get another image from Azure's simulator, and work again."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
from typer.testing import CliRunner

from image_builder.cli.main import app
from image_builder.errors import PoolError, UsageError
from image_builder.node.net.kube import MERGE_PATCH, path_of_node
from image_builder.pool.plan.inventory import Fleet as InventoryFleet
from image_builder.pool.plan.plan import save
from image_builder.pool.rollback import plan_rollback
from image_builder.pool.run.journal import journal_of
from image_builder.pool.salvage import salvage
from image_builder.pool.scale_set.client import Client
from image_builder.pool.scale_set.records import Replacement, read_journal
from image_builder.pool.show.calls import UNTIL, calls
from image_builder.pool.show.report import counts
from image_builder.system.resource_manager import ResourceManager
from tests.support.arm.fleet import BUILDS, NEW, OLD
from tests.support.arm.model import SUBSCRIPTION, Request
from tests.support.arm.serving import found_by
from tests.support.control_plane import workloads
from tests.support.control_plane.gates import Cluster, in_background, wait_until
from tests.support.control_plane.workloads import daemon_set, job
from tests.support.images.builds import REPO
from tests.support.pools import invariants
from tests.support.pools.desk import write_desk
from tests.support.pools.rolls import GENEROUS, PATIENCE, World, drive, plan, world

KILLS = 50
LATER = "2099-01-01T00:00:00Z"

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def whole(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(cluster, 0, 0, tmp_path_factory.mktemp("rolls")) as state:
        workloads.namespace(state.admin, "work")
        yield state


@pytest.fixture
def fleet(whole: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Yield two scale sets of four nodes that no other test has."""
    found_by(whole.served.environment, monkeypatch)
    with whole.part(2, 4, tmp_path) as part:
        yield part


@contextmanager
def driver(fleet: World, last: int = 0) -> Iterator[subprocess.Popen[str]]:
    """Start a driver of a fleet's plan in a separate process, which dies after ``last`` records in its journals."""
    arguments = [os.fspath(fleet.folder), fleet.served.url, os.fspath(fleet.account()), str(last)]
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.pools.rolls", *arguments],
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        yield process


def killed_at(fleet: World, number: int, effect: Literal["drop", "lose"]) -> int:
    """Run a driver and kill it as its Nth request that changes something arrives at Azure; return its exit status."""
    numbers = itertools.count(1)
    with driver(fleet) as process:

        def fault(request: Request) -> Literal["drop", "lose"] | None:
            if request.method == "GET" or next(numbers) != number:
                return None
            process.kill()
            process.wait()
            return effect

        # After the recorder, which sees everything.
        fleet.served.arm.faults.insert(1, fault)
        process.communicate(timeout=600)
        fleet.served.arm.faults.remove(fault)
    return process.returncode


def test_a_roll_around_jobs(fleet: World) -> None:
    """One host's job ends in its wave, one's in the last wave, one's never, and one host has someone else's cordon."""
    admin = fleet.admin
    _, ending, _, foreign, _, lasting, busy, _ = (host.name for host in fleet.hosts)
    workloads.create(admin, "work", daemon_set("agent"))
    workloads.create(admin, "work", job("ends", 1, [ending], gpus=True))
    workloads.create(admin, "work", job("endless", 1, [busy], gpus=True))
    workloads.create(admin, "work", job("long", 1, [lasting], gpus=True))
    for name in ("ends", "endless", "long"):
        workloads.await_running(admin, "work", 1, name)
    admin.request("PATCH", path_of_node(foreign), {"spec": {"unschedulable": True}}, MERGE_PATCH)
    rolled = plan(fleet, **GENEROUS)

    def finish_job(name: str) -> None:
        for item in workloads.pods_of(admin, "work", name):
            fleet.kubelets.finish("work", item["metadata"]["name"])

    def finish(stop: object) -> None:
        if wait_until(lambda: fleet.is_ours(ending), 300):
            finish_job("ends")
        # Cordoned in its wave, released, and cordoned in the last one before its job ends.
        turns = [
            wait_until(lambda: fleet.is_ours(lasting), 300),
            wait_until(lambda: not fleet.is_ours(lasting), 300),
            wait_until(lambda: fleet.is_ours(lasting), 300),
        ]
        if all(turns):
            finish_job("long")

    with in_background(finish):
        progress = fleet.drive(rolled)
    admin.request("DELETE", "/apis/apps/v1/namespaces/work/daemonsets/agent")
    assert progress.finished and not progress.stopped
    totals = counts(progress.hosts.values())
    assert (totals["ok"], totals["skipped"]) == (6, 2), {
        name: status.outcome for name, status in progress.hosts.items()
    }
    skipped = {
        n: s.outcome.detail for n, s in progress.hosts.items() if s.outcome and s.outcome.kind == "skipped"
    }
    assert skipped[foreign] == "cordoned by somebody else"
    assert "still busy" in skipped[busy] and "work/endless" in skipped[busy]
    for host in fleet.hosts:
        assert fleet.build(host.name) == (BUILDS[OLD] if host.name in skipped else BUILDS[NEW])
        assert not fleet.is_ours(host.name)
        assert fleet.machine(host).reimages == (0 if host.name in skipped else 1)
    assert admin.request("GET", path_of_node(foreign))["spec"]["unschedulable"] is True
    assert fleet.models() == {NEW}
    fleet.require_clean_sets()
    fleet.require_invariants(rolled)


def test_a_canary_that_fails_takes_everything_back(fleet: World) -> None:
    rolled = plan(fleet)
    canary = rolled.waves[0].hosts[0]
    fleet.broken.add(canary)
    progress = fleet.drive(rolled)
    assert "failed" in progress.stopped
    assert fleet.models() == {OLD}
    status = progress.hosts[canary]
    assert status.outcome and status.outcome.signature == "failed verify 101" and status.restored
    assert fleet.build(canary) == BUILDS[OLD] and not fleet.is_ours(canary)
    others = [name for name in rolled.waves[0].hosts if name != canary]
    assert not any(fleet.is_ours(host.name) for host in fleet.hosts)
    assert {fleet.build(host.name) for host in fleet.hosts if host.name not in others} == {BUILDS[OLD]}
    fleet.require_clean_sets()
    fleet.require_invariants(rolled)


def test_a_driver_that_is_killed_again_and_again(fleet: World) -> None:
    """Each takes over what the previous one left, wherever that was: in a drain, between a request and its answer."""
    rolled = plan(fleet, **GENEROUS)
    save(rolled, fleet.folder / "plan.json")
    for last in (6, 14, 22):
        with driver(fleet, last) as process:
            output, _ = process.communicate(timeout=600)
        assert process.returncode == -signal.SIGKILL, output
    progress = fleet.drive(rolled)
    assert progress.finished and counts(progress.hosts.values())["ok"] == 8
    assert [fleet.machine(host).reimages for host in fleet.hosts] == [1] * 8
    assert not any(fleet.is_ours(host.name) for host in fleet.hosts)
    posts = fleet.reimages()
    intents = [r for r in read_journal(fleet.folder / "requests.jsonl") if isinstance(r, Replacement)]
    # Upgrades may be combined. An intent whose request was never sent is followed by another one.
    assert sum(path.lower().endswith("/reimage") for path in posts) == 8
    assert 8 < len(posts) <= 16 <= len(intents)
    fleet.require_clean_sets()
    fleet.require_invariants(rolled)


@pytest.mark.slow
def test_fifty_kills(whole: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL at fifty points, alternately after a record, before a request arrives, and before its answer does.

    After each kill, check what must never happen; after each roll, check what must be true in the end. There are as
    many rolls as it takes.
    """
    found_by(whole.served.environment, monkeypatch)
    drawn, kills = random.Random(20), 0
    while kills < KILLS:
        folder = tmp_path / f"roll-{kills}"
        folder.mkdir()
        with whole.part(2, 3, folder) as part:
            rolled = plan(part, **GENEROUS)
            save(rolled, folder / "plan.json")
            status = -signal.SIGKILL
            while status == -signal.SIGKILL and kills < KILLS:
                if kills % 3:
                    status = killed_at(part, drawn.randint(1, 8), "drop" if kills % 3 == 1 else "lose")
                else:
                    with driver(part, drawn.randint(3, 14)) as process:
                        output, _ = process.communicate(timeout=600)
                    status = process.returncode
                    assert status in (0, -signal.SIGKILL), output
                was_killed = status == -signal.SIGKILL
                kills += was_killed
                assert invariants.violations(part.log(rolled), was_killed=was_killed) == [], kills
            progress = part.drive(rolled)
            assert progress.finished and counts(progress.hosts.values())["ok"] == 6
            assert part.reimages_of(rolled) == 6
            part.require_invariants(rolled)
    assert kills == KILLS


@pytest.mark.slow
def test_a_rollback_takes_models_first_and_then_every_host(fleet: World) -> None:
    """One host failed with the new version and was left cordoned; another one has a job that is waited for."""
    rolled = plan(fleet, **GENEROUS)
    broken = rolled.waves[-1].hosts[-1]
    fleet.broken.add(broken)
    progress = fleet.drive(rolled)
    assert counts(progress.hosts.values())["ok"] == 7 and fleet.is_ours(broken)
    busy = next(name for name in rolled.waves[-1].hosts if name != broken)
    workloads.create(fleet.admin, "work", job("back", 1, [busy], gpus=True))
    workloads.await_running(fleet.admin, "work", 1, "back")
    inventory = InventoryFleet(rolled.inventory, rolled.pools, fleet.hosts)
    with ResourceManager(SUBSCRIPTION, endpoint=fleet.served.url) as manager:
        azure = Client(manager)
        back = plan_rollback(progress, inventory, azure, only_failed=False).plan
        # As a driver of the rollback leaves a scale set when it is killed: the next one continues.
        azure.hold(fleet.hosts[0].scale_set_id, back.holder, azure.now() + 600)
    assert len(back.hosts) == 8 and back.target and back.target.broken == (broken,)
    sent = len(fleet.requests())

    def finish(_stop: object) -> None:
        if wait_until(lambda: fleet.is_ours(busy), 300):
            for item in workloads.pods_of(fleet.admin, "work", "back"):
                fleet.kubelets.finish("work", item["metadata"]["name"])

    folder = fleet.folder / "back"
    folder.mkdir()
    with in_background(finish):
        progress = drive(folder, fleet.served.url, back, fleet.account())
    assert progress.finished and counts(progress.hosts.values())["ok"] == 8
    assert fleet.models() == {OLD}
    assert {fleet.build(host.name) for host in fleet.hosts} == {BUILDS[OLD]}
    assert not any(fleet.is_ours(host.name) for host in fleet.hosts)
    assert [fleet.machine(host).reimages for host in fleet.hosts] == [2] * 8
    changes = [entry for entry in fleet.requests()[sent:] if entry.method in ("PATCH", "POST")]
    models = [n for n, e in enumerate(changes) if "virtualMachineProfile" in str(e.body)]
    disks = [n for n, e in enumerate(changes) if e.path.endswith(("/manualupgrade", "/reimage"))]
    assert len(models) == 2 and max(models) < min(disks)
    fleet.require_clean_sets()


def test_a_run_sends_what_its_plan_says(fleet: World) -> None:
    rolled = plan(fleet, **GENEROUS)
    with ResourceManager(SUBSCRIPTION, endpoint=fleet.served.url) as manager:
        said = calls(rolled, Client(manager))
    progress = fleet.drive(rolled)
    assert progress.finished and counts(progress.hosts.values())["ok"] == 8

    def request(method: str, path: str, body: object) -> tuple[str, str, str]:
        return (
            method,
            path,
            re.sub(r"@\S+ until [^\"]*", f"@{UNTIL} until {UNTIL}", json.dumps(body, ensure_ascii=False)),
        )

    def bodies(body: Any) -> list[Any]:
        # Which hosts are combined depends on timing.
        return [{"instanceIds": [number]} for number in (body or {}).get("instanceIds", ())] or [body]

    sent = [(e.method, e.path, body) for e in fleet.requests() for body in bodies(e.body)]
    assert Counter(request(*each) for each in sent) == Counter(
        request(call.method, call.path, call.body) for call in said if call.to == "azure"
    )
    events = [
        event
        for event in fleet.changes()
        if event["responseStatus"]["code"] < 300
        and event["objectRef"]["resource"] not in ("events", "leases")
    ]
    assert Counter((event["verb"].upper(), event["requestURI"]) for event in events) == Counter(
        (call.method, call.path) for call in said if call.to == "kubernetes"
    )


def test_before_a_deadline_jobs_are_listed_and_nothing_begins_without_the_confirmation(fleet: World) -> None:
    names = [host.name for host in fleet.hosts[:4]]
    fleet.hosts, others = fleet.hosts[:4], fleet.hosts[4:]
    workloads.create(fleet.admin, "work", workloads.job("listed", 2, names[:2], gpus=True))
    workloads.create(fleet.admin, "work", workloads.pod("elsewhere", others[-1].name))
    workloads.await_running(fleet.admin, "work", 2, "listed")
    options = write_desk(fleet)
    roll, azure = os.fspath(fleet.folder / "roll.json"), ["--endpoint", fleet.served.url]
    inventory = ["-i", os.fspath(fleet.folder / "hosts.yml")]
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
    assert not journal_of(fleet.folder / "roll.json").exists()
    assert not any(fleet.is_ours(name) for name in names)
    assert {fleet.build(name) for name in names} == {BUILDS[OLD]}
    assert len(workloads.pods_of(fleet.admin, "work", "listed")) == 2


def test_a_driver_that_is_gone_with_its_journals(
    whole: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it left is cleaned up by the run's name alone; who may have the new image keeps its cordon."""
    # What Azure has accepted shows within this time, instead of a minute.
    monkeypatch.setattr("image_builder.pool.salvage.salvage", partial(salvage, settle=PATIENCE.settle))
    found_by(whole.served.environment, monkeypatch)
    with whole.part(2, 3, tmp_path) as fleet:
        write_desk(fleet)
        rolled = plan(fleet, **GENEROUS)
        save(rolled, fleet.folder / "plan.json")
        with driver(fleet, 24) as process:
            output, _ = process.communicate(timeout=600)
        assert process.returncode == -signal.SIGKILL, output
        assert any(fleet.is_ours(host.name) for host in fleet.hosts)
        inventory = ["-i", os.fspath(tmp_path / "hosts.yml"), "--pool", "gpu"]
        account = ["--kubeconfig", os.fspath(fleet.account()), "--endpoint", fleet.served.url]
        argv = ["pool", "abort", "--run", rolled.run, "--to", NEW, *inventory, *account, "--json"]
        # It ran on this machine, where it is known to be dead: its claims needn't expire.
        answer = CliRunner().invoke(app, argv)
        result = json.loads(answer.stdout)
        assert answer.exit_code == (PoolError.exit_code if result["remaining"] else 0)
        for host in fleet.hosts:
            has_new = fleet.machine(host).version == NEW
            assert not fleet.is_ours(host.name) or (has_new and host.name in result["remaining"])
        fleet.require_clean_sets()
