"""Rollouts on real hosts: real sshd, OpenSSH, Ansible, paramiko, pytest. Only the node agent on them is a stand-in.

The agent of an image needs a booted machine and a cluster. The stand-in is a shell script in its place that writes
the same `/run/node/provision.json`, and counts: a line in `/var/joins` each time it is told to join. What it comes to,
and how long it takes, stands in `/etc/stand-in` of the host.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from image_builder.pool.journal import journal_of, read_journal
from image_builder.pool.records import Intent, Record, Result
from tests.builds import REPO, Workplace
from tests.pools.drive import Told
from tests.pools.fleet import USER, Fault, Fleet, fleet

AGENT = """\
#!/bin/sh
file=/run/node/provision.json
if [ "$2" = --status ]; then
    cat $file 2>/dev/null || exit 1
    grep -q '"state": "ok"' $file
    exit
fi
say() {
    printf '{"format": 1, "boot_id": "b", "state": "%s", "phase": "%s", "code": %s, "reason": "%s",
 "phases": [{"name": "identity", "state": "ok", "seconds": 0.5, "code": 0}], "seconds": 1}' "$@" >$file.new
    mv $file.new $file
}
seconds=1 state=ok phase= code=0
[ ! -e /etc/stand-in ] || . /etc/stand-in
echo told >>/var/joins || { say failed disk 32 && exit 1; }
say running identity 0 ''
sleep $seconds
say $state "$phase" $code "the stand-in was told to"
"""
CHECK = """\
import pytest
@pytest.mark.booted
def test_it_has_joined(host):
    \"\"\"The host has joined.\"\"\"
    assert host.file("/var/joins").exists
    assert host.check_output("hostname") != "host-5", "it is host-5"
"""
POLICY = {
    "waves": ["3", "100%"],
    "max_unavailable": "100%",
    "wave_budget": "100%",
    "budget": "100%",
    "same_least": 99,
    "join_rate": 100,
    "soak_seconds": [0],
    "cadence_seconds": 0,
    "retries": 1,
    "retry_seconds": 0.2,
    "verify": "0%",
    "deadlines": {"probe": 15, "bootstrap": 60, "verify": 60},
}
SOUND = 6
# Of the hosts behind the sound ones. The last ones have an agent that fails, and a disk that is full.
FAULTS: tuple[Fault, ...] = (
    "dead",
    "refused",
    "slow banner",
    "other key",
    "auth",
    "sudo asks",
    "sudo refuses",
)
AGENTLESS, FAILING, FULL = (SOUND + len(FAULTS) + n for n in range(3))
COUNT = FULL + 1


@pytest.fixture(scope="module")
def pool(minimal: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    faults = {SOUND + n: fault for n, fault in enumerate(FAULTS)}
    with fleet(minimal, folder, COUNT, faults=faults) as hosts:
        for number in (*range(SOUND), FAILING, FULL, *(n for n, f in faults.items() if f.startswith("sudo"))):
            hosts.run(
                number,
                "sh",
                "-ec",
                f"mkdir -p /etc/node-agent; {_INSTALL} /usr/local/sbin/node-agent",
                input=AGENT,
            )
        hosts.run(FAILING, "sh", "-ec", "cat >/etc/stand-in", input="state=failed phase=disk code=31\n")
        # As on a booted machine: what is in /run is not on the disk.
        hosts.run(FULL, "sh", "-ec", "mount -t tmpfs tmpfs /run; mkdir /run/sshd")
        hosts.run(FULL, "sh", "-c", "cat /dev/zero >/var/fill", ok=False)
        yield hosts


_INSTALL = 'put() { cat >"$1"; chmod 755 "$1"; }; put'


@dataclass(frozen=True)
class Rollout:
    """A plan over some of the hosts, all of which are as new."""

    folder: Path
    pool: Fleet
    numbers: tuple[int, ...]

    @property
    def plan(self) -> Path:
        return self.folder / "plan.json"

    def told(self, **more: Any) -> Path:
        """Write what the driver is told; return the file."""
        told = Told(
            plan=os.fspath(self.plan),
            inventory=os.fspath(self.folder / "hosts.json"),
            user=USER,
            key=os.fspath(self.pool.key),
            known_hosts=os.fspath(self.pool.pinned.path),
            facts=os.fspath(self.folder / "facts.json"),
            suite=os.fspath(self.folder / "suite"),
            reports=os.fspath(self.folder / "reports"),
            node_configs=os.fspath(configs) if (configs := self.folder / "configs").exists() else "",
            **more,
        )
        file = self.folder / "told.json"
        file.write_text(json.dumps(dataclasses.asdict(told)))
        return file

    def start(self, **more: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.pools.drive", self.told(**more)],
            cwd=REPO,
            env={**os.environ, "CI": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, **more: Any) -> dict[str, Any]:
        """Drive to the end; return the report."""
        with self.start(**more) as child:
            out, err = child.communicate(timeout=300)
        assert child.returncode == 0, err
        report: dict[str, Any] = json.loads(out)
        return report

    @property
    def records(self) -> list[Record]:
        journal = journal_of(self.plan)
        return read_journal(journal) if journal.exists() else []

    def joins(self) -> dict[int, int]:
        """Return how often each host was told to join."""
        return {n: self.pool.run(n, "cat", "/var/joins", ok=False).count("told") for n in self.numbers}

    @property
    def _work(self) -> Path:
        return self.folder / f".{self.plan.name}.work"

    def running(self) -> list[str]:
        """Return the processes of slices of this rollout that still run."""
        return [
            command
            for entry in Path("/proc").iterdir()
            if entry.name.isdigit() and os.fspath(self._work) in (command := _command(entry))
        ]

    def left(self) -> list[str]:
        """Return what still runs, and the directories that are left."""
        return self.running() + ([os.fspath(p) for p in self._work.iterdir()] if self._work.exists() else [])


def _command(entry: Path) -> str:
    try:
        # Ansible's workers have no argument of ours, but all that is begun here has it in its environment.
        return " ".join(
            (entry / name).read_bytes().replace(b"\0", b" ").decode(errors="replace") for name in _TOLD
        )
    except OSError:
        return ""


_TOLD = ("cmdline", "environ")


def command(*argv: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command for pools to its end."""
    words = [sys.executable, "-m", "image_builder.cli", "pool", *(os.fspath(a) for a in argv)]
    return subprocess.run(words, cwd=REPO, capture_output=True, text=True, check=False)


@pytest.fixture
def rollout(pool: Fleet, tmp_path: Path) -> Callable[..., Rollout]:
    """Plan a rollout of the hosts with these numbers."""

    def make(*numbers: int, policy: Mapping[str, Any] | None = None, agent: str = "") -> Rollout:
        hosts = {
            host.name: {"ansible_host": host.address, "pool_vm_id": host.vm_id}
            for host in (pool.hosts[n] for n in numbers)
        }
        variables = {"pool_image": "minimal", "pool_vm_size": "D16"}
        group = {"children": {"pool": {"hosts": hosts, "vars": variables}}}
        (tmp_path / "hosts.json").write_text(json.dumps({"all": group}))
        (tmp_path / "policy.yml").write_text(json.dumps(POLICY | dict(policy or {})))
        facts = {"image": "minimal", "build_id": "0", "packages": [], "variables": {}}
        (tmp_path / "facts.json").write_text(json.dumps(facts))
        _write_suite(tmp_path / "suite")
        for number in numbers:
            if number < SOUND:
                pool.run(number, "sh", "-c", "rm -rf /var/joins /run/node; cat >/etc/stand-in", input=agent)
        inventory, policy_file, out = (tmp_path / name for name in ("hosts.json", "policy.yml", "plan.json"))
        command("plan", "-i", inventory, "pool", "--out", out, "--policy", policy_file).check_returncode()
        return Rollout(tmp_path, pool, numbers)

    return make


def _write_suite(folder: Path) -> None:
    """Make a suite of one check, with the options and fixtures of the real one."""
    folder.mkdir()
    for path in (REPO / "tests/image").iterdir():
        if path.is_file() and not path.name.startswith("test_"):
            (folder / path.name).symlink_to(path)
    (folder / "test_joined.py").write_text(CHECK)


def test_each_host_ends_in_exactly_one_class(rollout: Callable[..., Rollout]) -> None:
    """A rollout over sound hosts and faults: every class is the fault's, and no sound host suffers from others."""
    made = rollout(*range(COUNT), policy={"verify": "100%"})
    report = made.finish()
    results = {name: result["outcome"] for name, result in report["results"].items()}
    found = {int(name.rpartition("-")[2]): _signature(outcome) for name, outcome in results.items()}
    wanted = dict.fromkeys(range(SOUND), "ok") | {5: "failed verify 1"}
    classes = ["timeout", "refused", "timeout", "host key", "auth", "sudo", "sudo"]
    wanted |= {SOUND + n: kind for n, kind in enumerate(classes)}
    wanted |= {AGENTLESS: "failed bootstrap 1", FAILING: "failed disk 31", FULL: "failed disk 32"}
    assert found == wanted, results
    assert sum(report["counts"].values()) == COUNT
    assert made.joins() == {n: int(n < SOUND or n == FAILING) for n in range(COUNT)}
    assert report["results"]["host-0"]["phases"] == {"identity": 0.5}
    assert [p.name for p in (made.folder / "reports").iterdir()] == ["host-5"]
    assert "it is host-5" in (made.folder / "reports/host-5/verify.json").read_text()
    assert made.left() == []


def _signature(outcome: Mapping[str, Any]) -> str:
    kind = str(outcome["kind"])
    return f"failed {outcome['phase']} {outcome['code']}" if kind == "failed" else kind


def test_killed_anywhere_nobody_joins_twice_and_nobody_is_lost(rollout: Callable[..., Rollout]) -> None:
    """SIGKILL of the driver, at moments from the first question to the last host: resumed, it comes to the end."""
    made = rollout(*range(SOUND), agent="seconds=2\n")
    (made.folder / "configs").mkdir()
    for host in made.pool.hosts[:SOUND]:
        (made.folder / f"configs/{host.name}.json").write_text(json.dumps({"generation": host.name}))
    moments: list[Callable[[list[Record]], bool]] = [
        lambda records: _intents(records, "probe") >= 1,
        lambda records: _intents(records, "bootstrap") >= 1,
        lambda _: any(made.joins().values()),
        lambda records: _results(records, "bootstrap") >= 2,
    ]
    for number, moment in enumerate(moments):
        with made.start(is_resumed=number > 0) as child:
            _wait(lambda: child.poll() is not None or moment(made.records))  # noqa: B023  # not beyond this round
            child.kill()
            child.communicate()
        # What it began is gone at once, before anything else looks. A directory may be left that no process had yet.
        _wait(lambda: not made.running())
    report = made.finish(is_resumed=True)
    assert report["state"] == "finished"
    assert made.left() == []
    assert {n: r["outcome"]["kind"] for n, r in report["results"].items()} == {
        f"host-{n}": "failed" if n == 5 and _is_verified(report, 5) else "ok" for n in range(SOUND)
    }
    assert made.joins() == dict.fromkeys(range(SOUND), 1)
    for number in range(SOUND):
        written = made.pool.run(number, "cat", "/etc/node-agent/node-config.json")
        assert json.loads(written) == {"generation": f"host-{number}"}


def _is_verified(report: Mapping[str, Any], number: int) -> bool:
    return "verify" in report["results"][f"host-{number}"]["seconds"]


def _intents(records: list[Record], step: str) -> int:
    return sum(isinstance(r, Intent) and r.step == step for r in records)


def _results(records: list[Record], step: str) -> int:
    return sum(isinstance(r, Result) and r.step == step for r in records)


def _wait(until: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline, "it came to a halt"
        time.sleep(0.05)


def test_a_host_that_is_cut_off_while_it_joins_is_looked_at_before_it_is_told_again(
    rollout: Callable[..., Rollout],
) -> None:
    made = rollout(0, agent="seconds=3\n", policy={"retries": 3, "retry_seconds": 1})
    with made.start() as child:
        _wait(lambda: child.poll() is not None or made.joins()[0] == 1)
        made.pool.cut(0)
        try:
            _wait(lambda: _results(made.records, "bootstrap") == 1)
        finally:
            made.pool.mend(0)
        out, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    lost = [r for r in made.records if isinstance(r, Result) and r.step == "bootstrap"]
    assert [(r.outcome.kind, r.joined) for r in lost] == [("dropped", "unknown")]
    assert json.loads(out)["results"]["host-0"]["outcome"]["kind"] == "ok"
    assert made.joins() == {0: 1}


def test_abort_lets_what_is_in_work_end_and_nothing_begins(rollout: Callable[..., Rollout]) -> None:
    made = rollout(0, 1, agent="seconds=3\n")
    with made.start() as child:
        _wait(lambda: child.poll() is not None or any(made.joins().values()))
        done = command("abort", made.plan, "--json")
        child.communicate(timeout=120)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["state"] == "stopped" and told["counts"]["ok"] == 1 and told["counts"]["not started"] == 1
    assert sum(made.joins().values()) == 1
    again = command("abort", made.plan)
    assert again.returncode == 2 and "no process drives this run now" in again.stderr
