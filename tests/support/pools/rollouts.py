"""Rollouts on real hosts: real sshd, OpenSSH, Ansible, paramiko, pytest. Only the node agent on them is a stand-in.

The agent of an image needs a booted machine and a cluster. The stand-in is a shell script in its place that writes
the same `/run/node/provision.json`, and adds a line to `/var/joins` each time it is told to join. Its result and
duration are set in the host's `/etc/stand-in`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from image_builder.pool.run.journal import journal_of, read_journal
from image_builder.pool.run.records import Intent, Record, Result
from tests.support.images.builds import REPO
from tests.support.nodes import joins
from tests.support.pools.drive import Request
from tests.support.pools.fleet import USER, Fleet

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
JOINED = """\
import pytest
@pytest.mark.booted
def test_it_has_joined(host):
    \"\"\"The host has joined.\"\"\"
    assert host.file("/var/joins").exists
"""
# A check that takes a while, once, on a host that was prepared for it (see midst.py).
HELD = "[ ! -e /etc/held ] || { mv /etc/held /run/being-verified; sleep 3; }"
CHECK = f"""\
{JOINED}
    assert host.check_output("hostname") != "host-5", "it is host-5"
    host.run("{HELD}")
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
    "deadlines": {"probe": 30, "bootstrap": 60, "verify": 120},
}
# How hosts end after ``let_fail`` and ``fill``.
FAILING, FULL = "failed disk 31", "failed disk 32"
_AUTHORITY = joins.authority().certificate


def install(pool: Fleet, numbers: Iterable[int], agent: str = AGENT) -> None:
    """Install the stand-in on hosts."""
    for number in numbers:
        pool.run(number, "mkdir", "-p", "/etc/node-agent")
        put(pool, number, "/usr/local/sbin/node-agent", agent)


def put(pool: Fleet, number: int, path: str, text: str) -> None:
    """Put a program on a host."""
    pool.run(number, "sh", "-ec", 'cat >"$0"; chmod 755 "$0"', path, input=text)


def let_fail(pool: Fleet, number: int) -> None:
    """Make a host's stand-in fail, so that the host ends as FAILING."""
    pool.run(number, "sh", "-ec", "cat >/etc/stand-in", input="state=failed phase=disk code=31\n")


def fill(pool: Fleet, number: int) -> None:
    """Fill a host's disk after the stand-in was installed, so that the host ends as FULL."""
    # As on a booted machine, /run isn't on the disk.
    pool.run(number, "sh", "-ec", "mount -t tmpfs tmpfs /run; mkdir /run/sshd")
    pool.run(number, "sh", "-c", "cat /dev/zero >/var/fill", ok=False)


def let_join(pool: Fleet, number: int) -> None:
    """End the join of a host whose stand-in takes for ever (``seconds=infinity``); it must be joining."""
    assert pool.run(number, "sh", "-c", _LET_JOIN).splitlines() == ["joining"]


_LET_JOIN = (
    "for p in /proc/[0-9]*; do [ $p/ns/net -ef /proc/self/ns/net ]"
    " && [ \"$(tr '\\0' ' ' <$p/cmdline)\" = 'sleep infinity ' ] && kill ${p#/proc/} && echo joining; done; true"
)


@dataclass(frozen=True)
class Rollout:
    """A plan for some of the hosts, all of which are as new."""

    folder: Path
    pool: Fleet
    numbers: tuple[int, ...]

    @property
    def plan(self) -> Path:
        return self.folder / "plan.json"

    def request(self, **more: Any) -> Path:
        """Write the request for the driver; return the file."""
        configs = self.folder / "configs"
        values = {
            "plan": os.fspath(self.plan),
            "inventory": os.fspath(self.folder / "hosts.json"),
            "user": USER,
            "key": os.fspath(self.pool.key),
            "known_hosts": os.fspath(self.pool.pinned.path),
            "facts": os.fspath(self.folder / "facts.json"),
            "suite": os.fspath(self.folder / "suite"),
            "reports": os.fspath(self.folder / "reports"),
            "node_configs": os.fspath(configs) if configs.exists() else "",
        }
        request = Request(**(values | more))
        file = self.folder / "request.json"
        file.write_text(json.dumps(dataclasses.asdict(request)))
        return file

    def start(self, **more: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.support.pools.drive", self.request(**more)],
            cwd=REPO,
            env={**os.environ, "CI": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, status: int = 0, **more: Any) -> dict[str, Any]:
        """Drive to the end; return the report. The driver must exit with ``status``."""
        with self.start(**more) as child:
            out, err = child.communicate(timeout=600)
        assert child.returncode == status, err
        report: dict[str, Any] = json.loads(out)
        return report

    @property
    def last_wave(self) -> list[int]:
        """The numbers of the last wave's hosts, in order."""
        slices = json.loads(self.plan.read_text())["waves"][-1]["slices"]
        return [int(name.rpartition("-")[2]) for part in slices for name in part]

    @property
    def records(self) -> list[Record]:
        journal = journal_of(self.plan)
        return read_journal(journal) if journal.exists() else []

    def joins(self, numbers: Sequence[int] = ()) -> dict[int, int]:
        """Return how often each of these hosts, or of all hosts, was told to join."""
        hosts = numbers or self.numbers
        return {n: self.pool.run(n, "cat", "/var/joins", ok=False).count("told") for n in hosts}

    @property
    def _work(self) -> Path:
        return self.folder / f".{self.plan.name}.work"

    def running(self) -> list[str]:
        """Return the processes of this rollout's slices that are still running."""
        return [
            command
            for entry in Path("/proc").iterdir()
            if entry.name.isdigit() and os.fspath(self._work) in (command := _command(entry))
        ]

    def left(self) -> list[str]:
        """Return the processes that are still running, and the directories that are left."""
        return self.running() + ([os.fspath(p) for p in self._work.iterdir()] if self._work.exists() else [])


def _command(entry: Path) -> str:
    try:
        # Ansible's workers have no argument of ours, but everything started here has it in its environment.
        return " ".join(
            (entry / name).read_bytes().replace(b"\0", b" ").decode(errors="replace")
            for name in _SECRET_FILES
        )
    except OSError:
        return ""


_SECRET_FILES = ("cmdline", "environ")


def command(*argv: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a ``pool`` command to its end."""
    arguments = [sys.executable, "-m", "image_builder.cli", "pool", *(os.fspath(a) for a in argv)]
    return subprocess.run(arguments, cwd=REPO, capture_output=True, text=True, check=False)


def make(
    pool: Fleet,
    folder: Path,
    numbers: Sequence[int],
    *,
    policy: Mapping[str, Any] | None = None,
    agent: str = "",
    sound: Iterable[int] = (),
    check: str = CHECK,
    variables: Mapping[int, Mapping[str, Any]] | None = None,
) -> Rollout:
    """Plan a rollout of hosts by number; the ``sound`` ones are reset to new, with ``agent`` in /etc/stand-in.

    ``check`` is the whole suite; by default host 5 fails it. ``variables`` are additional ones of hosts.
    """
    write_plan(pool, folder, numbers, POLICY | dict(policy or {}), variables)
    facts = {"image": "minimal", "build_id": "0", "packages": [], "variables": {}}
    (folder / "facts.json").write_text(json.dumps(facts))
    write_suite(folder / "suite", test_joined=check)
    for number in sound:
        pool.run(number, "sh", "-c", "rm -rf /var/joins /run/node; cat >/etc/stand-in", input=agent)
    return Rollout(folder, pool, tuple(numbers))


def write_plan(
    pool: Fleet,
    folder: Path,
    numbers: Sequence[int],
    policy: Mapping[str, Any],
    variables: Mapping[int, Mapping[str, Any]] | None = None,
) -> Path:
    """Write an inventory of hosts and plan their rollout; return the plan."""
    hosts = {
        host.name: {
            "ansible_host": host.address,
            "pool_vm_id": host.vm_id,
            **(variables or {}).get(number, {}),
        }
        for number, host in ((n, pool.hosts[n]) for n in numbers)
    }
    shared = {"pool_image": "minimal", "pool_vm_size": "D16"}
    group = {"children": {"pool": {"hosts": hosts, "vars": shared}}}
    (folder / "hosts.json").write_text(json.dumps({"all": group}))
    (folder / "policy.yml").write_text(json.dumps(policy))
    inventory, policy_file, out = (folder / name for name in ("hosts.json", "policy.yml", "plan.json"))
    command("plan", "-i", inventory, "pool", "--out", out, "--policy", policy_file).check_returncode()
    return out


def write_suite(folder: Path, **files: str) -> None:
    """Make a suite of these checks, by file name, with the options and fixtures of the real one."""
    folder.mkdir()
    for path in (REPO / "image_builder/suite").iterdir():
        if path.is_file() and not path.name.startswith("test_"):
            (folder / path.name).symlink_to(path)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)


def configuration(name: str) -> dict[str, Any]:
    """Return a node configuration that its node accepts."""
    return joins.document(_AUTHORITY, node={"name": name})


def signature(outcome: Mapping[str, Any]) -> str:
    kind = str(outcome["kind"])
    return f"failed {outcome['phase']} {outcome['code']}" if kind == "failed" else kind


def intents(records: list[Record], step: str) -> int:
    return sum(isinstance(r, Intent) and r.step == step for r in records)


def results(records: list[Record], step: str) -> int:
    return sum(isinstance(r, Result) and r.step == step for r in records)


def ended(records: Iterable[Record], number: int, step: str) -> list[Result]:
    """Return all results of a step on a host."""
    results = (r for r in records if isinstance(r, Result))
    return [r for r in results if (r.host, r.step) == (f"host-{number}", step)]


def wait(until: Callable[[], bool], seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline, "it came to a halt"
        time.sleep(0.05)
