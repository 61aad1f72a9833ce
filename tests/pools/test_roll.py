"""Rolls on a real control plane: nodes are emptied, get another image from Azure's simulator, and work again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from image_builder.node.net.kube import MERGE_PATCH, path_of_node
from image_builder.pool.plan.plan import save
from image_builder.pool.scale_set.records import Replacement, read_journal
from image_builder.pool.show.report import counts
from tests.support.arm.fleet import BUILDS, NEW, OLD
from tests.support.arm.serving import found_by
from tests.support.control_plane import workloads
from tests.support.control_plane.gates import in_background, wait_until
from tests.support.control_plane.workloads import daemon_set, job
from tests.support.images.builds import REPO
from tests.support.pools.rolls import GENEROUS, World, plan, world

pytestmark = [pytest.mark.root, pytest.mark.process, pytest.mark.image("control_plane")]


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with world(2, 4, tmp_path) as state:
        found_by(state.served.environment, monkeypatch)
        yield state


def test_a_roll_around_jobs(fleet: World) -> None:
    """One host has a job that ends in its wave, one in the last wave, one a job that doesn't, one somebody's cordon."""
    admin = fleet.admin
    workloads.namespace(admin, "work")
    workloads.create(admin, "work", daemon_set("agent"))
    workloads.create(admin, "work", job("ends", 1, ["gpu-0-1"], gpus=True))
    workloads.create(admin, "work", job("endless", 1, ["gpu-1-2"], gpus=True))
    workloads.create(admin, "work", job("long", 1, ["gpu-1-1"], gpus=True))
    workloads.await_running(admin, "work", 11)
    admin.request("PATCH", path_of_node("gpu-0-3"), {"spec": {"unschedulable": True}}, MERGE_PATCH)
    rolled = plan(fleet, **GENEROUS)

    def finish_job(name: str) -> None:
        for item in workloads.pods_of(admin, "work", name):
            fleet.kubelets.finish("work", item["metadata"]["name"])

    def finish(stop: object) -> None:
        if wait_until(lambda: fleet.is_ours("gpu-0-1"), 60):
            finish_job("ends")
        # Cordoned in its wave, let go of, and cordoned in the last one before its job ends.
        turns = [
            wait_until(lambda: fleet.is_ours("gpu-1-1"), 90),
            wait_until(lambda: not fleet.is_ours("gpu-1-1"), 90),
            wait_until(lambda: fleet.is_ours("gpu-1-1"), 90),
        ]
        if all(turns):
            finish_job("long")

    with in_background(finish):
        progress = fleet.drive(rolled)
    assert progress.finished and not progress.stopped
    totals = counts(progress.hosts.values())
    assert (totals["ok"], totals["skipped"]) == (6, 2), {
        name: status.outcome for name, status in progress.hosts.items()
    }
    skipped = {
        n: s.outcome.detail for n, s in progress.hosts.items() if s.outcome and s.outcome.kind == "skipped"
    }
    assert skipped["gpu-0-3"] == "cordoned by somebody else"
    assert "still busy" in skipped["gpu-1-2"] and "work/endless" in skipped["gpu-1-2"]
    for host in fleet.hosts:
        assert fleet.build(host.name) == (BUILDS[OLD] if host.name in skipped else BUILDS[NEW])
        assert not fleet.is_ours(host.name)
        assert fleet.machine(host).reimages == (0 if host.name in skipped else 1)
    assert admin.request("GET", path_of_node("gpu-0-3"))["spec"]["unschedulable"] is True
    assert fleet.models() == {NEW}
    fleet.require_clean_sets()


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


def test_a_driver_that_is_killed_again_and_again(fleet: World) -> None:
    """Each takes up what the one before left, wherever that was: in a drain, between a request and its answer."""
    rolled = plan(fleet, **GENEROUS)
    save(rolled, fleet.folder / "plan.json")
    words = [os.fspath(fleet.folder), fleet.served.url, os.fspath(fleet.account())]
    for last in (6, 9, 14, 22, 16, 19):
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.pools.rolls", *words, str(last)],
            cwd=REPO,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == -signal.SIGKILL, done.stdout
    progress = fleet.drive(rolled)
    assert progress.finished and counts(progress.hosts.values())["ok"] == 8
    assert [fleet.machine(host).reimages for host in fleet.hosts] == [1] * 8
    assert not any(fleet.is_ours(host.name) for host in fleet.hosts)
    posts = fleet.reimages()
    intents = [r for r in read_journal(fleet.folder / "requests.jsonl") if isinstance(r, Replacement)]
    # An intent whose request never left is followed by another one.
    assert len(posts) == 16 <= len(intents)
    fleet.require_clean_sets()
