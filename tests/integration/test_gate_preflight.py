"""`node-agent preflight` with real processes, sockets and files: what it tests, what it leaves, when it reboots."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from image_builder.node.errors import NodeError
from image_builder.node.preflight import command, model, report
from image_builder.node.preflight.smoke import run as run_smoke
from tests.builds import REPO

pytestmark = pytest.mark.root

PASS = """
import json, sys
json.dump({"boot_id": sys.argv[1], "verdict": {"status": "pass", "exit_code": 0, "summary": "8 GPUs"}}, sys.stdout)
"""
REMAP = """
import json, sys
check = {"id": "remap", "status": "fail", "reason_code": "remap.pending", "gpu_uuid": "GPU-1"}
verdict = {"status": "fail", "exit_code": 2, "reason_code": "remap.pending", "summary": "remap GPU-1: pending"}
json.dump({"boot_id": sys.argv[1], "checks": [check], "verdict": verdict}, sys.stdout)
sys.exit(2)
"""


class Machine:
    """The files of a node, and what its reboot would be: a file that appears."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for name in ("run", "etc"):
            (directory / name).mkdir()
        self.image("one")
        self.program = PASS
        self.settings()
        self.start()

    def start(self) -> None:
        """Start it: an empty /run, a new boot id."""
        self.boot = str(uuid.uuid4())
        (self.directory / "boot_id").write_text(f"{self.boot}\n")
        for path in (self.directory / "run").iterdir():
            path.unlink()
        self.rebooted.unlink(missing_ok=True)

    def image(self, build: str) -> None:
        (self.directory / "release").write_text(f'IMAGE_BUILD="{build}"\n')

    def settings(self, **settings: Any) -> None:
        settings = {"kubeconfig": "/nonexistent", "wait_seconds": 1, **settings}
        (self.directory / "etc/preflight.json").write_text(json.dumps(settings))

    def expect_gpus(self, program: str) -> None:
        (self.directory / "etc/gpu.json").write_text('{"expect": "gpus"}')
        self.program = program

    @property
    def rebooted(self) -> Path:
        return self.directory / "rebooted"

    def _smoke(self, tier: str) -> Sequence[str]:
        assert tier == "boot-quick"
        return [sys.executable, "-c", self.program, self.boot]

    def test(self) -> int:
        places = command.Places(
            run=self.directory / "run",
            etc=self.directory / "etc",
            release=self.directory / "release",
            boot_id=self.directory / "boot_id",
            attempts=self.directory / "var/preflight.json",
            reboot=("touch", os.fspath(self.rebooted)),
            smoke=self._smoke,
        )
        return command.run(places)

    @property
    def verdict(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / "run" / model.FILE).read_bytes())
        return found

    @property
    def told(self) -> str:
        """What the kubelet is told."""
        return (self.directory / "run/kubelet.env").read_text()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_boot_that_passed(machine: Machine) -> None:
    machine.expect_gpus(PASS)
    assert machine.test() == 0
    found = machine.verdict
    assert (found["state"], found["boot_id"], found["image_build"]) == ("passed", machine.boot, "one")
    assert [check["id"] for check in found["checks"] if check["state"] == "passed"] == ["gpu"]
    assert "image-builder/preflight=ok " in machine.told
    assert "--register-with-taints=image-builder/preflight=pending:NoSchedule" in machine.told


def test_it_is_started_again_once_for_an_image(machine: Machine) -> None:
    machine.expect_gpus(REMAP)
    assert machine.test() == 1  # the kubelet does not start on the way down
    assert machine.rebooted.exists()
    assert (machine.verdict["code"], machine.verdict["action"]) == ("remap.pending", "reboot")
    machine.start()
    assert machine.test() == 0
    assert not machine.rebooted.exists()
    assert (machine.verdict["state"], machine.verdict["action"]) == ("failed", "replace")
    assert "image-builder/preflight=failed " in machine.told
    machine.start()
    machine.image("two")
    assert machine.test() == 1 and machine.rebooted.exists()


def test_without_a_place_for_the_count_there_is_no_reboot(machine: Machine) -> None:
    machine.expect_gpus(REMAP)
    (machine.directory / "var").write_text("a file in the way")
    assert machine.test() == 0
    assert not machine.rebooted.exists()
    assert "no reboot" in machine.verdict["reason"]


def test_where_it_may_not_start_again_it_says_so(machine: Machine) -> None:
    machine.expect_gpus(REMAP)
    machine.settings(reboot=False)
    assert machine.test() == 0
    assert machine.verdict["action"] == "reboot" and not machine.rebooted.exists()


@pytest.mark.parametrize("hard", [False, True])
def test_the_kubelet_starts_after_a_failure_unless_it_is_hard(machine: Machine, hard: bool) -> None:
    machine.settings(tcp=["127.0.0.1:9"], hard=hard)
    assert machine.test() == (1 if hard else 0)
    assert machine.verdict["code"] == "network.tcp" and not machine.rebooted.exists()


def test_endpoints_are_tried_until_they_answer(machine: Machine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        machine.settings(dns=["localhost"], tcp=[f"127.0.0.1:{port}"])
        assert machine.test() == 0
        assert machine.verdict["state"] == "passed"
        assert {c["id"] for c in machine.verdict["checks"]} == {"dns:localhost", f"tcp:127.0.0.1:{port}"}
    machine.settings(dns=["nowhere.invalid"])
    machine.test()
    assert (machine.verdict["state"], machine.verdict["code"]) == ("inconclusive", "network.dns")


def test_settings_that_are_wrong_pass_nothing(machine: Machine) -> None:
    (machine.directory / "etc/preflight.json").write_text('{"wait": 1}')
    assert machine.test() == 0
    assert (machine.verdict["state"], machine.verdict["code"]) == ("inconclusive", "settings")
    assert "image-builder/preflight=pending:NoSchedule" in machine.told


def test_a_section_that_failed_fails_the_boot(machine: Machine) -> None:
    (machine.directory / "etc/disk.json").write_text("{}")
    failed = {"state": "failed", "code": "disk.foreign", "reason": "there is data on it"}
    (machine.directory / "run/status.json").write_text(json.dumps({"format": 1, "disk": failed}))
    assert machine.test() == 0
    assert (machine.verdict["code"], machine.verdict["action"]) == ("disk.foreign", "replace")


def test_no_verdict_is_left_while_it_is_tested_again(machine: Machine) -> None:
    assert machine.test() == 0
    machine.expect_gpus(
        f"import os; assert not os.path.exists({str(machine.directory / 'run' / model.FILE)!r})" + PASS
    )
    assert machine.test() == 0
    assert machine.verdict["state"] == "passed"


def test_a_smoke_test_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    pid, ended = tmp_path / "pid", tmp_path / "ended"
    sleeps = f"import pathlib, time; time.sleep(20); pathlib.Path({str(ended)!r}).touch()"
    program = f"{sys.executable} -c \"$0\" & echo $! > {pid}; trap '' TERM INT; wait"
    found = run_smoke(["sh", "-c", program, sleeps], 1.0, "b")
    assert not ended.exists(), "its end was waited for"
    assert (found.state, found.code, found.action) == ("failed", "gpu.deadline", "reboot")
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid.read_text().strip()}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    state = Path(f"/proc/{pid.read_text().strip()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_a_smoke_test_that_is_not_there_or_says_much(tmp_path: Path) -> None:
    assert run_smoke(["/nonexistent"], 5, "b").code == "gpu.program"
    found = run_smoke([sys.executable, "-c", "print('x' * 50_000_000)"], 30, "b")
    assert (found.state, found.code) == ("inconclusive", "gpu.output")


def test_the_command_is_known_to_the_agent(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "image_builder.node", "preflight", "--help"],
        cwd=REPO,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "--report" in done.stdout


def test_nothing_is_reported_without_a_verdict_of_this_boot(machine: Machine) -> None:
    places = report.Places(
        machine.directory / "run", machine.directory / "etc", machine.directory / "boot_id"
    )
    with pytest.raises(NodeError, match="no verdict to report"):
        report.run(places)
    machine.test()
    (machine.directory / "boot_id").write_text(f"{uuid.uuid4()}\n")
    with pytest.raises(NodeError, match="the verdict is of boot"):
        report.run(places)
