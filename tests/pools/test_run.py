"""Rollouts on real hosts (rollouts.py): every host ends in one class, none joins twice, none is lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from image_builder.pool.run.records import Stopped
from tests.pools.conftest import AGENTLESS, BROKEN, FAULTS, FILLED, SOUND, with_fault
from tests.support.pools.fleet import CLASSES
from tests.support.pools.rollouts import (
    FAILING,
    FULL,
    Rollout,
    command,
    configuration,
    intents,
    let_join,
    results,
    signature,
    wait,
)
from tests.support.pools.traces import here, wait_until_hosts_are_bare

pytestmark = [pytest.mark.root, pytest.mark.hosts]

# The sound hosts, those with faults, and one each without an agent, with one that fails, and with a full disk.
COUNT = FILLED + 1
# As an image's unit does on first boot.
JOIN = "node-agent join"


def test_each_host_ends_in_exactly_one_class(rollout: Callable[..., Rollout]) -> None:
    """A rollout over sound hosts and faults: each class matches its fault, and no sound host is affected by others."""
    run = rollout(*range(COUNT), policy={"verify": "100%"}, sound=range(SOUND))
    report = run.finish()
    results = {name: result["outcome"] for name, result in report["results"].items()}
    signatures = {int(name.rpartition("-")[2]): signature(outcome) for name, outcome in results.items()}
    expected = dict.fromkeys(range(SOUND), "ok") | {5: "failed verify 1"}
    expected |= {number: CLASSES[fault] for number, fault in FAULTS.items()}
    expected |= {AGENTLESS: "failed bootstrap 1", BROKEN: FAILING, FILLED: FULL}
    assert signatures == expected, results
    assert sum(report["counts"].values()) == COUNT
    assert report["builds"] == {"minimal": ["0"]}
    assert run.joins() == {n: int(n < SOUND or n == BROKEN) for n in range(COUNT)}
    assert report["results"]["host-0"]["phases"] == {"identity": 0.5}
    assert [p.name for p in (run.folder / "reports").iterdir()] == ["host-5"]
    assert "it is host-5" in (run.folder / "reports/host-5/verify.json").read_text()
    assert here(run.pool) == [] and run.left() == []
    hanging = with_fault("sudo hangs")
    wait(lambda: list(run.pool.processes()) == [hanging])
    run.pool.free_sudo(hanging)
    wait_until_hosts_are_bare(run.pool)
    run.pool.hang_sudo(hanging, answers=False)


def test_killed_while_hosts_join_nobody_joins_twice_and_nobody_is_lost(
    rollout: Callable[..., Rollout],
) -> None:
    """SIGKILL of the driver with one host joined and others about to: when resumed, it runs to the end."""
    run = rollout(*range(SOUND), agent="seconds=2\n")
    (run.folder / "configs").mkdir()
    for host in run.pool.hosts[:SOUND]:
        (run.folder / f"configs/{host.name}.json").write_text(json.dumps(configuration(host.name)))
    with run.start() as child:
        wait(lambda: child.poll() is not None or results(run.records, "bootstrap") >= 1)
        child.kill()
        child.communicate()
    # What it started is gone at once, before anything else checks. A directory may remain that no process had yet.
    wait(lambda: not run.running())
    report = run.finish(is_resumed=True)
    assert report["state"] == "finished"
    assert run.left() == []
    assert {n: r["outcome"]["kind"] for n, r in report["results"].items()} == {
        f"host-{n}": "failed" if n == 5 and _is_verified(report, 5) else "ok" for n in range(SOUND)
    }
    assert run.joins() == dict.fromkeys(range(SOUND), 1)
    for number in range(SOUND):
        written = run.pool.run(number, "cat", "/etc/node-agent/node-config.json")
        assert json.loads(written) == configuration(f"host-{number}")


def _is_verified(report: Mapping[str, Any], number: int) -> bool:
    return "verify" in report["results"][f"host-{number}"]["seconds"]


def test_abort_lets_what_is_in_work_end_and_nothing_begins(rollout: Callable[..., Rollout]) -> None:
    run = rollout(0, 1, agent="seconds=infinity\n")
    with run.start() as child, ThreadPoolExecutor(1) as threads:
        wait(lambda: child.poll() is not None or any(run.joins().values()))
        aborted = threads.submit(command, "abort", run.plan, "--json")
        wait(lambda: child.poll() is not None or any(isinstance(r, Stopped) for r in run.records))
        (joining,) = (number for number, times in run.joins().items() if times)
        let_join(run.pool, joining)
        done = aborted.result()
        child.communicate(timeout=600)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["state"] == "stopped"
    assert (report["counts"]["ok"], report["counts"]["not started"]) == (1, 1)
    assert sum(run.joins().values()) == 1
    again = command("abort", run.plan)
    assert again.returncode == 2 and "no process drives this run now" in again.stderr


def test_where_the_image_does_it_all_nobody_is_told(rollout: Callable[..., Rollout]) -> None:
    """A host that joined on its own is up, one still joining is waited for, one that does neither has failed."""
    deadlines = {"probe": 30, "bootstrap": 15, "verify": 120}
    policy = {"mode": "verify", "waves": ["100%"], "verify": "100%", "deadlines": deadlines}
    run = rollout(0, 1, 2, policy=policy, agent="seconds=infinity\n")
    run.pool.run(0, "sh", "-ec", f"mkdir /run/node; echo seconds=0 >/etc/stand-in; {JOIN}")
    run.pool.run(1, "sh", "-ec", f"mkdir /run/node; setsid {JOIN} >/dev/null 2>&1 &")
    with run.start() as child:
        wait(lambda: child.poll() is not None or results(run.records, "probe") > 0)
        let_join(run.pool, 1)
        out, err = child.communicate(timeout=600)
    assert child.returncode == 0, err
    report = json.loads(out)
    signatures = {name: signature(result["outcome"]) for name, result in report["results"].items()}
    assert signatures == {"host-0": "ok", "host-1": "ok", "host-2": "failed bootstrap 5"}, report["results"]
    assert intents(run.records, "bootstrap") == 0
    assert run.joins() == {0: 1, 1: 1, 2: 0}
    assert run.left() == []
