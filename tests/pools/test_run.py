"""Rollouts on real hosts (rollouts.py): every host ends in one class, none joins twice, none is lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from image_builder.pool.run.records import Intent, Record, Result
from tests.support.images.builds import Workplace
from tests.support.pools.fleet import CLASSES, Fault, Fleet, fleet
from tests.support.pools.midst import Moment, cut, prepare, undo
from tests.support.pools.rollouts import (
    FAILING,
    FULL,
    Rollout,
    command,
    configuration,
    ended,
    fill,
    install,
    intents,
    let_fail,
    results,
    signature,
    wait,
)
from tests.support.pools.traces import here, wait_until_hosts_are_bare

pytestmark = [pytest.mark.root, pytest.mark.hosts]

SOUND = 6
# The faults of the hosts after the sound ones. The last ones have no agent, one that fails, and a full disk.
FAULTS: list[Fault] = [fault for fault, kind in CLASSES.items() if kind != "ok"]
AGENTLESS, BROKEN, FILLED = (SOUND + len(FAULTS) + n for n in range(3))
COUNT = FILLED + 1


@pytest.fixture(scope="module")
def pool(minimal: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    faults = {SOUND + n: fault for n, fault in enumerate(FAULTS)}
    with fleet(minimal, folder, COUNT, faults=faults) as hosts:
        sudo = (n for n, fault in faults.items() if fault.startswith("sudo"))
        install(hosts, (*range(SOUND), BROKEN, FILLED, *sudo))
        let_fail(hosts, BROKEN)
        fill(hosts, FILLED)
        yield hosts


def test_each_host_ends_in_exactly_one_class(rollout: Callable[..., Rollout]) -> None:
    """A rollout over sound hosts and faults: each class matches its fault, and no sound host is affected by others."""
    run = rollout(*range(COUNT), policy={"verify": "100%"}, sound=range(SOUND))
    report = run.finish()
    results = {name: result["outcome"] for name, result in report["results"].items()}
    signatures = {int(name.rpartition("-")[2]): signature(outcome) for name, outcome in results.items()}
    expected = dict.fromkeys(range(SOUND), "ok") | {5: "failed verify 1"}
    expected |= {SOUND + n: CLASSES[fault] for n, fault in enumerate(FAULTS)}
    expected |= {AGENTLESS: "failed bootstrap 1", BROKEN: FAILING, FILLED: FULL}
    assert signatures == expected, results
    assert sum(report["counts"].values()) == COUNT
    assert report["builds"] == {"minimal": ["0"]}
    assert run.joins() == {n: int(n < SOUND or n == BROKEN) for n in range(COUNT)}
    assert report["results"]["host-0"]["phases"] == {"identity": 0.5}
    assert [p.name for p in (run.folder / "reports").iterdir()] == ["host-5"]
    assert "it is host-5" in (run.folder / "reports/host-5/verify.json").read_text()
    assert here(run.pool) == [] and run.left() == []
    hanging = SOUND + FAULTS.index("sudo hangs")
    wait(lambda: list(run.pool.processes()) == [hanging])
    run.pool.free_sudo(hanging)
    wait_until_hosts_are_bare(run.pool)


def test_one_failure_too_many_stops_the_run_before_the_next_host(rollout: Callable[..., Rollout]) -> None:
    """No host may fail, and one may be unavailable: hosts after the failed one are neither told nor probed."""
    limits = {"max_unavailable": "1", "wave_budget": "0"}
    run = rollout(0, 2, 4, BROKEN, policy=limits, sound=(0, 2, 4))
    waves = [wave["slices"] for wave in json.loads(run.plan.read_text())["waves"]]
    order = [int(name.rpartition("-")[2]) for ((name,),) in waves]  # each wave has one host
    before, after = order[: order.index(BROKEN)], order[order.index(BROKEN) + 1 :]
    assert before and after
    joins = run.joins()
    report = run.finish(status=1)  # from the tests' own driver (drive.py)
    assert report["state"] == "stopped" and "its budget is 0" in report["reason"]
    assert {n: times - joins[n] for n, times in run.joins().items()} == {
        n: int(n not in after) for n in order
    }
    assert {n: signature(report["results"][f"host-{n}"]["outcome"]) for n in (*before, BROKEN)} == {
        **dict.fromkeys(before, "ok"),
        BROKEN: FAILING,
    }
    records = (record for record in run.records if isinstance(record, Intent | Result))
    hosts = [host for r in records for host in (r.hosts if isinstance(r, Intent) else (r.host,))]
    assert set(hosts) == {f"host-{n}" for n in (*before, BROKEN)}
    # One after another: no other host's step comes between a host's first step and its last.
    assert hosts == sorted(hosts, key=hosts.index)
    assert run.left() == []


@pytest.mark.nightly
def test_killed_anywhere_nobody_joins_twice_and_nobody_is_lost(rollout: Callable[..., Rollout]) -> None:
    """SIGKILL of the driver, at moments from the first probe to the last host: when resumed, it runs to the end."""
    run = rollout(*range(SOUND), agent="seconds=2\n")
    (run.folder / "configs").mkdir()
    for host in run.pool.hosts[:SOUND]:
        (run.folder / f"configs/{host.name}.json").write_text(json.dumps(configuration(host.name)))
    moments: list[Callable[[list[Record]], bool]] = [
        lambda records: intents(records, "probe") >= 1,
        lambda records: intents(records, "bootstrap") >= 1,
        lambda _: any(run.joins().values()),
        lambda records: results(records, "bootstrap") >= 2,
    ]
    for number, moment in enumerate(moments):
        with run.start(is_resumed=number > 0) as child:
            wait(lambda: child.poll() is not None or moment(run.records))  # noqa: B023  # not beyond this round
            child.kill()
            child.communicate()
        # What it started is gone at once, before anything else checks. A directory may remain that no process had
        # yet.
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


@pytest.mark.nightly
def test_what_breaks_in_the_middle_of_a_task_is_one_hosts_business(rollout: Callable[..., Rollout]) -> None:
    """A host cut off at one of three moments is checked, not told again; a host whose sudo hangs is never told."""
    others = (0, 4)
    moments: dict[int, Moment] = {1: "verified", 2: "joining", 3: "told", 5: "sudo"}
    # Patience for longer than the others take.
    deadlines = {"probe": 15, "bootstrap": 60, "verify": 300}
    policy = {"waves": ["100%"], "verify": "100%", "retries": 7, "deadlines": deadlines}
    run = rollout(*others, *moments, policy=policy)
    prepare(run.pool, moments)
    try:
        with run.start() as child:
            wait(lambda: child.poll() is not None or bool(run.joins((4,))[4]))
            assert {line.partition(" ")[0] for line in here(run.pool)} == {"process", "socket", "connection"}
            cut(run, moments, child)
            ends = {0: "verify", 4: "verify", 2: "bootstrap", 3: "bootstrap"}
            wait(lambda: all(ended(run.records, n, step) for n, step in ends.items()))
            assert not any(ended(run.records, n, "verify") for n in (1, 2, 3))
            for number in (1, 2, 3):
                run.pool.mend(number)
            out, err = child.communicate(timeout=300)
        assert child.returncode == 0, err
        assert here(run.pool) == [] and run.left() == []
    finally:
        undo(run.pool, moments)
    signatures = {n: signature(r["outcome"]) for n, r in json.loads(out)["results"].items()}
    assert signatures == {f"host-{n}": "sudo" if n == 5 else "ok" for n in range(SOUND)}
    tries = {
        n: [r.step for r in run.records if isinstance(r, Result) and r.host == f"host-{n}"]
        for n in range(SOUND)
    }
    assert all(tries[n] == ["probe", "bootstrap", "verify"] for n in (*others, 1))
    assert tries[5] == ["probe", "bootstrap"]
    for number in (2, 3):
        lost = ended(run.records, number, "bootstrap")
        assert [(r.outcome.kind, r.joined) for r in lost] == [("dropped", "unknown")]
    # What waited for sudo has been answered by now, and didn't continue.
    wait_until_hosts_are_bare(run.pool)
    assert run.joins() == {n: int(n != 5) for n in range(SOUND)}


def test_abort_lets_what_is_in_work_end_and_nothing_begins(rollout: Callable[..., Rollout]) -> None:
    run = rollout(0, 1, agent="seconds=8\n")
    with run.start() as child:
        wait(lambda: child.poll() is not None or any(run.joins().values()))
        done = command("abort", run.plan, "--json")
        child.communicate(timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (
        report["state"] == "stopped" and report["counts"]["ok"] == 1 and report["counts"]["not started"] == 1
    )
    assert sum(run.joins().values()) == 1
    again = command("abort", run.plan)
    assert again.returncode == 2 and "no process drives this run now" in again.stderr
