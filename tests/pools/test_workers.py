"""Slices on worker hosts: real sshd, real ansible-runner on both sides, real Ansible to real hosts.

The workers are hosts of the fleet with this environment's ansible-runner; the hosts that join have a stand-in for the
node agent.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from image_builder.pool.reach.provision import LOCK
from image_builder.pool.run.driver import Work
from image_builder.pool.run.records import Intent, Result
from image_builder.pool.steps import ansible, worker_guard
from image_builder.pool.steps.ansible import Slice
from tests.pools.conftest import lent, with_fault
from tests.support.pools.fleet import GATEWAY, SITE, USER, Fleet
from tests.support.pools.rollouts import Rollout, configuration, let_join, make, put, results, wait

pytestmark = [pytest.mark.root, pytest.mark.hosts]

# The last worker is unreachable.
HOSTS, WORKERS, DEAD = (0, 1, 2), (3, 4), with_fault("refused")
RUNNER = "/usr/local/bin/ansible-runner"
# As on a worker: two programs, found by path.
PROGRAMS = {
    RUNNER: "ansible_runner",
    "/usr/local/bin/ansible-playbook": "ansible.cli.playbook",
}


@pytest.fixture(scope="module")
def pool(hosts: Fleet) -> Iterator[Fleet]:
    """Put the programs of workers on two hosts."""
    for number in WORKERS:
        for path, module in PROGRAMS.items():
            text = f'#!/bin/sh\nPYTHONPATH={SITE} PYTHONDONTWRITEBYTECODE=1 exec python3 -m {module} "$@"\n'
            put(hosts, number, path, text)
    lines = [f"{hosts.hosts[n].address} {(hosts.folder / f'host-{n}.pub').read_text()}" for n in WORKERS]
    (hosts.folder / "workers").write_text("".join(lines))
    with lent(hosts):
        yield hosts
    for number in WORKERS:
        hosts.run(number, "rm", *PROGRAMS)


def _workers(pool: Fleet, *numbers: int) -> dict[str, Any]:
    """Return the part of a policy that names these workers."""
    query = f"?key={pool.key}&known_hosts={pool.folder / 'workers'}"
    urls = [f"ssh://{USER}@{pool.hosts[number].address}{query}" for number in numbers]
    return {"workers": urls, "worker_runner": RUNNER, "waves": ["100%"]}


def _left(pool: Fleet, number: int) -> str:
    """Return what a slice left on a worker: files, and the processes in its network namespace."""
    script = (
        "ls -A /dev/shm /tmp | grep image-builder;"
        "for p in /proc/[0-9]*; do [ $p/ns/net -ef /proc/self/ns/net ] || continue;"
        " tr '\\0' ' ' <$p/cmdline | grep ansible; done; true"
    )
    lines = pool.run(number, "sh", "-c", script).splitlines()
    return "\n".join(line for line in lines if "for p in /proc" not in line and "grep ansible" not in line)


def _kinds(report: dict[str, Any]) -> set[str]:
    return {result["outcome"]["kind"] for result in report["results"].values()}


def test_a_slice_on_a_worker_is_a_slice(rollout: Callable[..., Rollout], pool: Fleet) -> None:
    """Every host joins once, with its configuration; results are reported as they come; the worker stays unchanged."""
    run = rollout(*HOSTS, policy=_workers(pool, WORKERS[0]))
    (run.folder / "configs").mkdir()
    for number in HOSTS:
        (run.folder / f"configs/host-{number}.json").write_text(json.dumps(configuration(f"host-{number}")))
    pool.run(HOSTS[-1], "sh", "-c", "cat >/etc/stand-in", input="seconds=6\n")
    report = run.finish()
    assert _kinds(report) == {"ok"}, report["results"]
    assert run.joins() == dict.fromkeys(HOSTS, 1)
    for number in HOSTS:
        written = pool.run(number, "cat", "/etc/node-agent/node-config.json")
        assert json.loads(written) == configuration(f"host-{number}")
    ends = {r.host: r.at for r in run.records if isinstance(r, Result) and r.step == "bootstrap"}
    # The others weren't reported at the end of the slice, which waits for the slow one.
    assert max(ends["host-0"], ends["host-1"]) + 2 < ends["host-2"]
    assert _left(pool, WORKERS[0]) == "" and run.left() == []
    log = pool.run(WORKERS[0], "cat", "/var/log/sshd.log")
    assert f"Accepted publickey for {USER}" in log
    secret = pool.key.read_text().splitlines()[1]
    for path in (p for p in run.folder.rglob("*") if p.is_file()):
        assert secret not in path.read_text(errors="replace"), path


def test_a_slice_on_a_worker_goes_through_its_hosts_bastion(pool: Fleet, tmp_path: Path) -> None:
    """The slice uses one connection to it, as the driver's probes do; no other address connects to the hosts."""
    bastion, worker = WORKERS
    address = pool.hosts[bastion].address
    keys = tmp_path / "keys"
    keys.write_text(
        f"{pool.pinned.path.read_text()}{address} {(pool.folder / f'host-{bastion}.pub').read_text()}"
    )
    way = {n: {"ansible_ssh_common_args": f"-J {USER}@{address}", "pool_vm_size": f"D{n}"} for n in HOSTS}
    before = {n: pool.log(n) for n in (bastion, *HOSTS)}
    run = make(pool, tmp_path, HOSTS, policy=_workers(pool, worker), sound=HOSTS, variables=way)
    report = run.finish(known_hosts=os.fspath(keys))
    assert _kinds(report) == {"ok"}, report["results"]
    assert run.joins() == dict.fromkeys(HOSTS, 1)
    come_from = {n: _COME_FROM.findall(pool.log(n).removeprefix(log)) for n, log in before.items()}
    assert sorted(come_from.pop(bastion)) == [pool.hosts[worker].address, GATEWAY]
    assert {source for sources in come_from.values() for source in sources} == {address}
    assert _left(pool, worker) == "" and run.left() == []


_COME_FROM = re.compile(rf"Accepted publickey for {USER} from (\S+)")


def test_a_worker_that_can_t_be_reached_or_dies_costs_an_attempt(
    rollout: Callable[..., Rollout], pool: Fleet
) -> None:
    """The first slice finds no worker; the second one's worker dies midway, which counts as the slice dying."""
    policy = _workers(pool, DEAD, WORKERS[0], WORKERS[1]) | {"retries": 3}
    run = rollout(*HOSTS, policy=policy, agent="seconds=10\n")
    with run.start() as child:
        wait(lambda: child.poll() is not None or any(run.joins().values()))
        # All at once, including what is in memory, as in a power failure. No other host has such processes.
        pool.run(WORKERS[0], "sh", "-c", _KILL, ok=False)
        out, err = child.communicate(timeout=600)
    assert child.returncode == 0, err
    assert _kinds(json.loads(out)) == {"ok"}, out
    assert run.joins() == dict.fromkeys(HOSTS, 1)
    lost = {(r.outcome.kind, r.joined) for r in run.records if isinstance(r, Result) and not r.outcome.ok}
    assert ("dropped", "unknown") in lost and lost <= {("dropped", "unknown"), ("unknown", "unknown")}
    assert run.left() == []


_KILL = (
    "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline | grep -qE 'ansible|sshd-session: operator'"
    " && [ ${p#/proc/} != $$ ] && [ $p/ns/net -ef /proc/self/ns/net ] && kill -KILL ${p#/proc/}; done;"
    " rm -rf /dev/shm/image-builder-*"
)


def _is_intended(run: Rollout, host: str) -> bool:
    """Return whether a host is about to be told, that is, was probed and answered."""
    return any(isinstance(r, Intent) and r.step == "bootstrap" and host in r.hosts for r in run.records)


def test_a_killed_driver_leaves_nothing_on_the_worker(rollout: Callable[..., Rollout], pool: Fleet) -> None:
    run = rollout(*HOSTS, policy=_workers(pool, WORKERS[1]), agent="seconds=12\n")
    with run.start() as child:
        wait(lambda: child.poll() is not None or any(run.joins().values()))
        assert "ansible" in _left(pool, WORKERS[1])
        child.kill()
        child.communicate()
    wait(lambda: _left(pool, WORKERS[1]) == "")
    wait(lambda: not run.running())


@pytest.mark.slow
def test_a_network_that_parts_ends_the_slices_behind_it_and_nobody_is_told_twice(
    rollout: Callable[..., Rollout], pool: Fleet
) -> None:
    """In mid-slice, one worker loses its link, the other one only its route to here: it could still tell its hosts.

    Neither sees its connection close; both have ended when the driver gives up on them. Hosts that had been told are
    checked, and are fine; the one that hadn't is retried.
    """
    lost, parted = WORKERS
    more = {"canaries": len(HOSTS), "slice_hosts": 2, "retries": 0, "worker_silent_seconds": 5}
    run = rollout(*HOSTS, policy=_workers(pool, *WORKERS) | more)
    joined = (0, 2)
    for number in joined:
        put(pool, number, "/etc/stand-in", "seconds=infinity\n")
    with run.start() as child, ExitStack() as mending:
        wait(lambda: child.poll() is not None or _is_intended(run, "host-1"))
        pool.cut(1)  # so that it isn't told
        wait(lambda: child.poll() is not None or run.joins() == {0: 1, 1: 0, 2: 1})
        assert all("ansible" in _left(pool, worker) for worker in WORKERS)
        pool.cut(lost)
        mending.callback(pool.mend, lost)
        pool.part(parted)
        mending.callback(pool.unite, parted)
        wait(lambda: not any(_left(pool, worker) for worker in WORKERS))
        # The slices didn't complete: their hosts are still joining, and can only finish now.
        for number in joined:
            let_join(pool, number)
        pool.mend(1)
        wait(lambda: child.poll() is not None or results(run.records, "bootstrap") > 0)
        assert [_left(pool, worker) for worker in WORKERS] == ["", ""]
        out, err = child.communicate(timeout=600)
    assert child.returncode == 0, err
    ends = [r for r in run.records if isinstance(r, Result) and r.step == "bootstrap"]
    assert sorted(r.host for r in ends) == [f"host-{n}" for n in HOSTS]
    assert {(r.outcome.kind, r.joined) for r in ends} <= {("dropped", "unknown"), ("unknown", "unknown")}
    kinds = {name: result["outcome"]["kind"] for name, result in json.loads(out)["results"].items()}
    assert kinds == {"host-0": "ok", "host-1": kinds["host-1"], "host-2": "ok"}, out
    assert kinds["host-1"] in ("dropped", "unknown"), out
    assert run.left() == [] and run.joins() == {0: 1, 1: 0, 2: 1}
    report = run.finish(is_resumed=True, retry=True)
    assert _kinds(report) == {"ok"}, report["results"]
    assert run.joins() == dict.fromkeys(HOSTS, 1)


def test_nothing_runs_on_for_those_who_are_silent(tmp_path: Path) -> None:
    """A partitioned network sends no end: the guard takes silence for one, and ends what the runner started."""
    runner = tmp_path / "runner"
    runner.write_text(
        f'#!/bin/sh\necho "$3"\ncat >{tmp_path}/got\nsetsid sleep 600 &\necho $! >{tmp_path}/pid\nwait\n'
    )
    runner.chmod(0o755)
    argv = [sys.executable, "-c", Path(worker_guard.__file__).read_text(), os.fspath(runner), "600", "1"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as guard:
        assert guard.stdin and guard.stdout
        guard.stdin.write(b"5\nslice")
        guard.stdin.flush()
        folder = Path(guard.stdout.readline().decode().strip())
        assert folder.stat().st_mode & 0o777 == 0o700
        guard.wait(60)
        assert guard.returncode == 75
    assert (tmp_path / "got").read_text() == "slice"
    assert not folder.exists() and not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


def test_the_stream_goes_from_file_to_file(pool: Fleet, tmp_path: Path) -> None:
    """What any other engine does with a slice, using ansible-runner's own commands: transmit, worker, process."""
    host = pool.hosts[0]
    # Once a join left over from an earlier test has ended.
    pool.run(0, "sh", "-c", f"flock {LOCK} true; rm -rf /var/joins /run/node /etc/stand-in")
    access = pool.access()
    slice_ = Slice((Work(host, 1, 0.0),), access, 30.0)
    ansible.write_portable(slice_, tmp_path / "slice")
    for path in (tmp_path / "slice").rglob("*"):
        assert not path.is_file() or os.fspath(tmp_path) not in path.read_text(), path
    (tmp_path / "slice/env/ssh_key").write_text(pool.key.read_text())
    command = [sys.executable, "-m", "ansible_runner"]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    steps: list[tuple[list[str], str, str]] = [
        (["transmit", os.fspath(tmp_path / "slice"), "-p", "bootstrap.yml"], "/dev/null", "sent"),
        (["worker", "--private-data-dir", os.fspath(tmp_path / "there")], "sent", "told"),
        (["process", os.fspath(tmp_path / "here")], "told", "shown"),
    ]
    for argv, source_name, target_name in steps:
        with (tmp_path / source_name).open("rb") as source, (tmp_path / target_name).open("wb") as target:
            subprocess.run([*command, *argv], stdin=source, stdout=target, env=environment, check=True)
    shown = (tmp_path / "shown").read_text()
    assert '"state": "ok"' in shown or "ok=2" in shown, shown
    assert pool.run(0, "cat", "/var/joins") == "told\n"
