"""Rolls of real hosts with the command line: planned, run, killed and resumed, and reported, as an operator does it.

Each test has its own hosts: a scale set of the simulated Azure, whose reimage gives them a new boot, build and key.
"""

from __future__ import annotations

import json
import signal
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from image_builder.errors import DefinitionError, PoolError
from image_builder.node.net.kube import path_of_node
from image_builder.pool.run.journal import journal_of, requests_of
from image_builder.pool.scale_set.records import Accepted, Replacement, read_journal
from tests.support.control_plane import workloads
from tests.support.control_plane.gates import running
from tests.support.control_plane.workloads import job
from tests.support.images.builds import Workplace
from tests.support.pools.fleet import fleet
from tests.support.pools.reimages import OLD_BUILD, RealWorld, rolling
from tests.support.pools.rollouts import wait

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.hosts]

ROLLED, KILLED, ODD = ([f"host-{n}" for n in numbers] for numbers in (range(4), range(4, 7), range(7, 15)))


@pytest.fixture(scope="module")
def world(minimal: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealWorld]:
    """Run a control plane in the hosts' network, from which the one of the test process can't be reached."""
    with (
        fleet(minimal, tmp_path_factory.mktemp("pool"), 15, signed=True) as pool,
        running(controllers=True) as cluster,
        rolling(cluster, pool, minimal, [4, 3, 8], tmp_path_factory.mktemp("world")) as state,
    ):
        yield state


def outcomes(report: Mapping[str, Any]) -> dict[str, str]:
    return {name: result["outcome"]["kind"] for name, result in report["results"].items()}


def require_new(world: RealWorld, names: list[str], before: Mapping[str, tuple[str, str]]) -> None:
    """Assert what a roll leaves on hosts: another boot, the new image, and nothing of ours on their nodes."""
    for name in names:
        boot_id, build = world.tells(name)
        assert build not in (OLD_BUILD[:12], "") and boot_id != before[name][0]
        assert not world.is_ours(name)


def test_hosts_are_rolled_around_a_job(world: RealWorld, tmp_path: Path) -> None:
    """Three get the new image and pass the suite, each with its new host key; the busy one is named."""
    busy = ROLLED[3]
    workloads.namespace(world.admin, "work")
    workloads.create(world.admin, "work", job("endless", 1, [busy], gpus=True))
    workloads.await_running(world.admin, "work", 1)
    before = {name: world.tells(name) for name in ROLLED}
    keys = {name: world.key(name) for name in ROLLED}
    plan = world.plan(tmp_path, ROLLED, {})
    out, _ = world.operate(
        "run", *world.driving(plan), *world.authority, "--json", status=PoolError.exit_code
    )
    report = json.loads(out)
    assert outcomes(report) == dict.fromkeys(ROLLED[:3], "ok") | {busy: "skipped"}, report["results"]
    assert report["verified"] == 3
    require_new(world, ROLLED[:3], before)
    assert [name for name in ROLLED if world.key(name) == keys[name]] == [busy]
    assert world.tells(busy) == before[busy] and not world.is_ours(busy)
    assert sorted(name for name in world.reimaged if name in ROLLED) == ROLLED[:3]
    world.require_clean_sets()

    page, cases = tmp_path / "roll.html", tmp_path / "roll.xml"
    text, _ = world.operate("report", plan, "--html", page, "--junit", cases)
    assert "work/endless" in text
    html, document = page.read_text(), ET.parse(cases)
    assert "work/endless" in html and all(name in html for name in ROLLED)
    skipped = [case.get("name") for case in document.iter("testcase") if case.find("skipped") is not None]
    assert skipped == [busy]


def test_a_roll_that_is_killed_is_resumed(world: RealWorld, tmp_path: Path) -> None:
    """The process dies while a host is away; the next one finds the host with its new key, and continues."""
    before = {name: world.tells(name) for name in KILLED}
    plan = world.plan(tmp_path, KILLED, {})

    def is_away() -> bool:
        file = requests_of(plan)
        records = read_journal(file) if file.exists() else []
        sent = [r for r in records if isinstance(r, Replacement)]
        return bool(sent) and sent[-1].verb == "reimage" and isinstance(records[-1], Accepted)

    with world.start("run", *world.driving(plan), *world.authority, stderr=subprocess.DEVNULL) as child:
        wait(is_away)
        child.send_signal(signal.SIGKILL)
    status = json.loads(world.operate("status", plan, "--json", status=1)[0])
    assert status["state"] == "interrupted"
    out, _ = world.operate("resume", *world.driving(plan), *world.authority, "--json")
    assert outcomes(json.loads(out)) == dict.fromkeys(KILLED, "ok")
    require_new(world, KILLED, before)
    assert sorted(name for name in world.reimaged if name in KILLED) == KILLED
    world.require_clean_sets()


def test_hosts_that_return_as_others(world: RealWorld, tmp_path: Path) -> None:
    """One has an unsigned key and isn't touched; one returns without a signed key, one with its old image."""
    before = {name: world.tells(name) for name in ODD}
    plan = world.plan(tmp_path, ODD, {"retries": 0})
    canary = json.loads(plan.read_text())["waves"][0]["slices"][0][0]
    stranger, lost, stubborn, *others = (name for name in ODD if name != canary)
    sound = [canary, *others]
    world.unsigned.add(lost)
    world.stubborn.add(stubborn)
    world.pool.change_key(world.number(stranger))
    out, _ = world.operate(
        "run", *world.driving(plan), *world.authority, "--json", status=PoolError.exit_code
    )
    report = json.loads(out)
    odd = {stranger: "host key", lost: "failed", stubborn: "failed"}
    assert outcomes(report) == dict.fromkeys(sound, "ok") | odd, report["results"]
    assert report["cordoned"] == sorted((lost, stubborn))
    require_new(world, sound, before)
    details = {name: result["outcome"]["detail"] for name, result in report["results"].items()}
    assert "host key" in details[lost]
    assert "old build" in details[stubborn]
    assert world.tells(stranger) == before[stranger] and not world.is_ours(stranger)
    assert all(world.is_ours(name) for name in (lost, stubborn))
    assert [world.reimaged.count(name) for name in (canary, stranger, lost, stubborn)] == [1, 0, 1, 2]
    world.require_clean_sets()


def test_without_a_host_ca_nothing_begins(world: RealWorld, tmp_path: Path) -> None:
    plan = world.plan(tmp_path, ODD, {})
    _, err = world.operate(
        "run",
        *world.driving(plan),
        "--known-hosts",
        world.pool.pinned.path,
        status=DefinitionError.exit_code,
    )
    assert "--host-ca" in err and "another key after its reimage" in err
    assert not journal_of(plan).exists()
    nodes = [world.admin.request("GET", path_of_node(name)) for name in ROLLED]
    assert not any(node["spec"].get("unschedulable") for node in nodes)
