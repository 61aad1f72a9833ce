"""`node-agent preflight` with real processes, sockets and files: what it tests, what it leaves, when it reboots."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from image_builder.node import status
from image_builder.node.errors import NodeError
from image_builder.node.preflight import command, model, report
from image_builder.node.preflight.smoke import run as run_smoke
from tests.support.control_plane.gates import wait_until
from tests.support.images.builds import REPO
from tests.support.processes import is_over

pytestmark = pytest.mark.root

PASS = """
import json, sys
json.dump({"boot_id": sys.argv[1], "verdict": {"status": "pass", "exit_code": 0, "summary": "8 GPUs"}}, sys.stdout)
"""
_FAIL = """
import json, sys
check = {{"id": "{check}", "status": "fail", "reason_code": "{code}", "gpu_uuid": "GPU-1"}}
verdict = {{"status": "fail", "exit_code": 2, "reason_code": "{code}", "summary": "{check} GPU-1"}}
json.dump({{"boot_id": sys.argv[1], "checks": [check], "verdict": verdict}}, sys.stdout)
sys.exit(2)
"""
FABRIC = _FAIL.format(check="fabric", code="fabric.state")
# Routine in the life of GPU memory.
REMAP = _FAIL.format(check="remap", code="remap.pending")


class Machine:
    """The files of a node, and a stand-in for its reboot: a file that appears."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for name in ("run", "etc"):
            (directory / name).mkdir()
        self.image("one")
        self.program = PASS
        self.settings()
        self.start()

    def start(self) -> None:
        """Start the machine: an empty /run and a new boot ID."""
        self.boot = str(uuid.uuid4())
        (self.directory / "boot_id").write_text(f"{self.boot}\n")
        for path in (self.directory / "run").iterdir():
            path.unlink()
        self.rebooted.unlink(missing_ok=True)

    def image(self, build: str) -> None:
        (self.directory / "release").write_text(f'IMAGE_BUILD="{build}"\n')

    def settings(self, **settings: Any) -> None:
        settings = {"kubeconfig": "/nonexistent", **settings}
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

    @property
    def places(self) -> command.Places:
        return command.Places(
            run=self.directory / "run",
            etc=self.directory / "etc",
            release=self.directory / "release",
            boot_id=self.directory / "boot_id",
            attempts=self.directory / "var/preflight.json",
            reboot=("touch", os.fspath(self.rebooted)),
            report=("touch", os.fspath(self.reported)),
            smoke=self._smoke,
        )

    def test(self) -> int:
        return command.run(self.places)

    def test_again(self) -> int:
        return command.again(self.places)

    @property
    def reported(self) -> Path:
        return self.directory / "reported"

    def may_start_the_kubelet(self) -> bool:
        return (self.directory / "run" / model.ADMITTED).exists()

    def is_to_be_tested_again(self) -> bool:
        return (self.directory / "run" / model.UNSETTLED).exists()

    @property
    def verdict(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / "run" / model.FILE).read_bytes())
        return found

    @property
    def told(self) -> str:
        """Return what the kubelet is told."""
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


def test_it_is_started_again_once_until_a_boot_passes(machine: Machine) -> None:
    machine.expect_gpus(FABRIC)
    assert machine.test() == 1
    assert machine.rebooted.exists()
    assert status.is_reboot_own(machine.boot, machine.places.attempts.with_name("reboot.json"))
    assert not machine.may_start_the_kubelet(), "on the way down"
    assert (machine.verdict["code"], machine.verdict["action"]) == ("fabric.state", "reboot")
    machine.start()
    machine.program = PASS  # the reboot helped
    assert machine.test() == 0 and machine.verdict["state"] == "passed"
    machine.start()
    machine.program = FABRIC  # months later
    assert machine.test() == 1 and machine.rebooted.exists()
    machine.start()
    assert machine.test() == 0
    assert not machine.rebooted.exists()
    assert (machine.verdict["state"], machine.verdict["action"]) == ("failed", "replace")
    assert "a reboot did not help" in machine.verdict["reason"]
    assert "image-builder/preflight=failed " in machine.told
    machine.start()
    machine.image("two")
    assert machine.test() == 1 and machine.rebooted.exists()


def test_a_fault_that_comes_back_too_often_hands_the_node_over(machine: Machine) -> None:
    for program in [FABRIC, PASS] * 3:
        machine.start()
        machine.expect_gpus(program)
        machine.test()
    machine.start()
    machine.expect_gpus(FABRIC)
    assert machine.test() == 0 and not machine.rebooted.exists()
    assert machine.verdict["action"] == "replace" and "30 days" in machine.verdict["reason"]


def test_what_is_routine_is_for_a_person_after_three_reboots(machine: Machine) -> None:
    for number in range(3):
        machine.start()
        machine.expect_gpus(REMAP)
        assert machine.test() == 1 and machine.rebooted.exists(), number
    machine.start()
    assert machine.test() == 0 and not machine.rebooted.exists()
    assert (machine.verdict["state"], machine.verdict["action"]) == ("failed", "inspect")
    assert "3 reboots in 30 days" in machine.verdict["reason"]


def test_an_account_that_can_not_be_read_is_begun_again_by_a_pass(machine: Machine) -> None:
    (machine.directory / "var").mkdir()
    account = machine.directory / "var/preflight.json"
    account.write_text("{")
    machine.expect_gpus(REMAP)
    assert machine.test() == 0 and not machine.rebooted.exists()
    machine.program = PASS
    assert machine.test() == 0 and json.loads(account.read_bytes()) == {"reboots": []}


def test_what_was_not_settled_is_tested_again_until_it_is(machine: Machine) -> None:
    """A name doesn't resolve at boot; the GPUs, which passed, aren't tested a second time."""
    runs = machine.directory / "runs"
    machine.expect_gpus(f"open({str(runs)!r}, 'a').write('x')\n" + PASS)
    machine.settings(dns=["nowhere.invalid"], wait_seconds=1, kubeconfig="/nonexistent/kubelet.conf")
    assert machine.test() == 0
    first = {**machine.verdict, "started": "2026-01-01T00:00:00+00:00"}
    (machine.directory / "run" / model.FILE).write_text(json.dumps(first))
    assert (first["state"], first["code"]) == ("inconclusive", "network.dns")
    assert machine.may_start_the_kubelet() and machine.is_to_be_tested_again()
    assert machine.test_again() == 0
    assert machine.verdict["started"] == first["started"], "nothing new, so nothing is to be reported"
    assert machine.is_to_be_tested_again() and not machine.reported.exists()
    machine.settings(dns=["localhost"], kubeconfig="/nonexistent/kubelet.conf")
    assert machine.test_again() == 0
    assert machine.verdict["state"] == "passed" and machine.reported.exists()
    assert {check["id"] for check in machine.verdict["checks"]} == {"dns:localhost", "gpu"}
    assert not machine.is_to_be_tested_again()
    assert runs.read_text() == "x"
    machine.reported.unlink()
    assert machine.test_again() == 0 and not machine.reported.exists()


def test_what_is_found_later_starts_no_node_again(machine: Machine) -> None:
    """Pods may run by then."""
    machine.settings(dns=["nowhere.invalid"], wait_seconds=1)
    machine.test()
    machine.settings(dns=["localhost"])
    machine.expect_gpus(REMAP)
    assert machine.test_again() == 0
    assert (machine.verdict["state"], machine.verdict["action"]) == ("failed", "reboot")
    assert not machine.rebooted.exists() and machine.may_start_the_kubelet()
    assert not machine.places.attempts.exists(), "a reboot is on record that nobody makes"


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
    machine.settings(tcp=["127.0.0.1:9"], wait_seconds=1, hard=hard)
    assert machine.test() == 0
    assert machine.may_start_the_kubelet() is not hard
    assert machine.verdict["code"] == "network.tcp" and not machine.rebooted.exists()


def test_endpoints_are_tried_until_they_answer(machine: Machine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        machine.settings(dns=["localhost"], tcp=[f"127.0.0.1:{port}"])
        assert machine.test() == 0
        assert machine.verdict["state"] == "passed"
        assert {c["id"] for c in machine.verdict["checks"]} == {"dns:localhost", f"tcp:127.0.0.1:{port}"}
    machine.settings(dns=["nowhere.invalid"], wait_seconds=1)
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
    assert (machine.verdict["code"], machine.verdict["action"]) == ("disk.foreign", "config")


def test_no_verdict_is_left_while_it_is_tested_again(machine: Machine) -> None:
    assert machine.test() == 0
    machine.expect_gpus(
        f"import os; assert not os.path.exists({str(machine.directory / 'run' / model.FILE)!r})" + PASS
    )
    assert machine.test() == 0
    assert machine.verdict["state"] == "passed"


def test_a_kubelet_that_was_admitted_stays_so_while_it_is_tested_again(machine: Machine) -> None:
    machine.settings(hard=True, dns=["localhost"])
    assert machine.test() == 0 and machine.may_start_the_kubelet()
    admitted = str(machine.directory / "run" / model.ADMITTED)
    machine.expect_gpus(f"import os; assert os.path.exists({admitted!r})" + PASS)
    assert machine.test() == 0
    assert machine.verdict["state"] == "passed"
    machine.program = REMAP
    machine.settings(hard=True, reboot=False)
    assert machine.test() == 0 and not machine.may_start_the_kubelet()


def test_a_machine_without_a_place_for_its_verdict_has_none(machine: Machine) -> None:
    (machine.directory / "run" / model.FILE).mkdir()
    (machine.directory / "run" / model.BEFORE / "full").mkdir(parents=True)
    assert machine.test() == 1 and not machine.may_start_the_kubelet()


def test_a_smoke_test_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    pid, ended = tmp_path / "pid", tmp_path / "ended"
    sleeps = f"import pathlib, time; time.sleep(60); pathlib.Path({str(ended)!r}).touch()"
    program = f"{sys.executable} -c \"$0\" & echo $! > {pid}; trap '' TERM INT; wait"
    pid.touch()
    seconds = 0.5
    while not pid.read_text():  # on a busy machine, it is killed before it gets that far
        seconds *= 2
        found = run_smoke(["sh", "-c", program, sleeps], seconds, "b")
        assert (found.state, found.code, found.action) == ("inconclusive", "gpu.deadline", "reboot")
    assert not ended.exists(), "its end was waited for"
    assert wait_until(lambda: is_over(int(pid.read_text())))


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
        machine.directory / "run", machine.directory / "etc", boot_id=machine.directory / "boot_id"
    )
    with pytest.raises(NodeError, match="no verdict of this boot"):
        report.run(places)
    machine.test()
    (machine.directory / "boot_id").write_text(f"{uuid.uuid4()}\n")
    with pytest.raises(NodeError, match="the verdict is of boot"):
        report.run(places)
