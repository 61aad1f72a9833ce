"""The image with a GPU driver and the gate on a machine without a GPU: no unit fails, and the boot doesn't pass.

The driver reports what is missing. The machine then gets what the roles configure for NVIDIA's container toolkit (a
stand-in). Next, everything that its checks cover is broken and the checks run again; then comes a fault that a reboot
may cure, so the machine reboots itself, once: with the toolkit present from the start, nothing fails either.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from image_builder.errors import BootError, CommandError
from image_builder.lab import pause
from image_builder.machine.ssh import SshTarget
from image_builder.verify.boot import SUITE_SECONDS, BootResult, wait_for_system
from image_builder.verify.result import SuiteResult, blind
from image_builder.verify.runner import observe_suite
from tests.boot.node import shell
from tests.selftest.turns import machine_boots
from tests.support.images import mutants
from tests.support.images.builds import Workplace
from tests.support.images.toolkits import NOTES
from tests.support.images.variants import Variant
from tests.support.nodes.emulated import boot_and_verify

pytestmark = [pytest.mark.boot, pytest.mark.root, pytest.mark.slow]

CHECKS = ("test_gpu.py", "test_gate.py", "test_node_health.py")
TOOLKIT = "test_gpu_containers.py"
# The engine no longer comes up, in either boot: as far as anyone can tell, a fault that a reboot may cure.
BREAK = """
systemctl mask --quiet --now docker.socket docker.service
sed -i -E 's/("wait_seconds": )[0-9.]+/\\11/' /etc/node-agent/preflight.json
"""
# The role's rule with another driver's name: without a GPU, NVIDIA's own module exits before it registers a driver.
APPEAR = """
driver=$(ls /sys/bus/pci/drivers | head -n 1)
mkdir -p /run/udev/rules.d
cd /run/udev/rules.d
sed "s,/bus/pci/drivers/nvidia,/bus/pci/drivers/$driver," /etc/udev/rules.d/71-nvidia.rules > 72-probe.rules
udevadm control --reload
echo add > "/sys/bus/pci/drivers/$driver/uevent"
udevadm settle
"""
REBOOT_SECONDS = 900.0
# What a boot with the toolkit would have read.
TAKE = """
tar --extract --gzip --no-overwrite-dir --file /run/toolkit.tar.gz --directory /
systemctl daemon-reload
udevadm control --reload
systemctl restart containerd.service docker.service
"""
MEND = "systemctl unmask --quiet docker.socket docker.service && systemctl start docker.service"
# A container that does nothing until it is told to exit; Docker starts it with the runtime of that name.
RUN = f"""
docker load --quiet --input /run/pause.tar
docker run --detach --name probe --network none --runtime nvidia {pause.REFERENCE}
docker inspect --format '{{{{.State.Running}}}} {{{{.HostConfig.Runtime}}}}' probe
docker rm --force probe
"""


@dataclass(frozen=True)
class Node:
    """What a boot left behind: the kernel's boot ID, the preflight's verdict, and systemd's state of the system."""

    boot_id: str
    verdict: dict[str, Any]
    state: str


@dataclass(frozen=True)
class WithToolkit:
    """A boot with the toolkit: its checks, Docker's report on a container with its runtime, and its programs' calls."""

    suite: SuiteResult
    container: str
    notes: str


@dataclass(frozen=True)
class Booted:
    """Two boots: the result of the first, the checks on the machine after it was broken, and both boots' verdicts;
    the toolkit is present in the second."""

    result: BootResult
    broken: SuiteResult
    first: Node
    second: Node
    toolkit: WithToolkit


@pytest.fixture(scope="module")
def booted(worker_gpu: Workplace, toolkit: Variant, tmp_path_factory: pytest.TempPathFactory) -> Booted:
    seen: dict[str, Any] = {}

    def observe(ssh: SshTarget, select: tuple[str, ...]) -> SuiteResult:
        out = tmp_path_factory.mktemp("again")
        return observe_suite(
            ssh.url,
            toolkit.facts,
            out,
            marker="booted",
            python=Path(sys.executable),
            log=out / "log",
            select=select,
            timeout=SUITE_SECONDS,
        )

    def go_on(ssh: SshTarget) -> None:
        seen["first"] = _node(ssh)
        ssh.put(toolkit.archive(), "/run/toolkit.tar.gz")
        shell(ssh, TAKE)
        seen["broken"] = mutants.observe_broken(
            ssh.url, toolkit.facts, tmp_path_factory.mktemp("broken"), (*CHECKS, TOOLKIT)
        )
        seen["second"] = _started_by_itself(ssh, seen["first"].boot_id)
        shell(ssh, MEND)
        suite = observe(ssh, (TOOLKIT,))
        seen["toolkit"] = WithToolkit(suite, _container(ssh), _notes(ssh))

    folder = tmp_path_factory.mktemp("boot")
    result = boot_and_verify(worker_gpu.artefact, folder, go_on, select=("test_boot.py", *CHECKS))
    return Booted(result, **seen)


def _container(ssh: SshTarget) -> str:
    """Run a container with the toolkit's runtime and return what Docker reports about it."""
    ssh.put(pause.archive(), "/run/pause.tar")
    return shell(ssh, RUN)


def _notes(ssh: SshTarget) -> str:
    """Try to load the driver's module, then make a driver appear; return how the toolkit's programs were called."""
    shell(ssh, "modprobe nvidia", ok=(1,))
    shell(ssh, APPEAR)
    return ssh.run(["cat", NOTES]).stdout


def _node(ssh: SshTarget) -> Node:
    state = wait_for_system(ssh)
    verdict = json.loads(ssh.run(["cat", "/run/node/preflight.json"]).stdout)
    return Node(_boot_id(ssh), verdict, state)


def _boot_id(ssh: SshTarget) -> str:
    return ssh.run(["cat", "/proc/sys/kernel/random/boot_id"]).stdout.strip()


def _started_by_itself(ssh: SshTarget, before: str) -> Node:
    """Make the preflight find a fault that a reboot may cure; return the machine's state after its own reboot."""
    shell(ssh, BREAK)
    with machine_boots():
        shell(ssh, "systemctl --no-block restart preflight.service")
        deadline = time.monotonic() + REBOOT_SECONDS
        while True:
            assert time.monotonic() < deadline, "the machine did not start itself again"
            time.sleep(1)
            try:
                ssh.connect()
                if _boot_id(ssh) != before:
                    return _node(ssh)
            except (BootError, CommandError):
                pass  # it is rebooting


def test_every_check_passes_without_a_gpu(booted: Booted) -> None:
    booted.result.require_passed()
    assert booted.result.suite is not None
    names = {check.name for check in booted.result.suite.checks}
    assert names >= {
        "test_gpu.py::test_gpu_driver_wants_nothing_but_a_gpu",
        "test_gpu.py::test_gpu_units_follow_the_gpu",
        "test_gate.py::test_gpus_that_can_not_be_tested_are_no_pass",
        "test_node_health.py::test_node_was_looked_at",
        "test_node_health.py::test_metrics_are_written",
    }


def test_no_unit_failed_without_a_gpu(booted: Booted) -> None:
    assert booted.result.system_state == "running"
    assert booted.result.console_problems == ()


def test_boot_without_a_gpu_does_not_pass(booted: Booted) -> None:
    """The VM size is unknown, so the expected number of GPUs is unknown too. A reboot wouldn't help."""
    found = booted.first.verdict
    assert found["boot_id"] == booted.first.boot_id
    assert (found["state"], found["code"], found["action"]) in (
        ("inconclusive", "sku.unanswered", "none"),
        ("failed", "sku.unknown", "config"),  # the host's own platform answers, with a size that has no GPUs
    )


def test_machine_starts_itself_again_once_and_is_tested_anew(booted: Booted) -> None:
    """The second verdict is from the second boot, and doesn't request a third one: the reboot didn't help."""
    found = booted.second.verdict
    assert booted.second.boot_id != booted.first.boot_id == booted.first.verdict["boot_id"]
    assert found["boot_id"] == booted.second.boot_id
    assert (found["state"], found["code"], found["action"]) == ("failed", "runtime.engine", "reimage")
    assert "a reboot did not help" in found["reason"]
    assert booted.second.state == "running"


def test_toolkit_asks_nothing_of_a_machine_without_a_gpu(booted: Booted) -> None:
    """The toolkit was there when the machine started: its checks pass, and no CDI spec was generated."""
    assert {check.name: check.message for check in booted.toolkit.suite.not_passed} == {}
    assert len(booted.toolkit.suite.checks) == 9
    assert "cdi generate" not in booted.toolkit.notes


def test_a_container_starts_by_the_toolkits_runtime(booted: Booted) -> None:
    assert "true nvidia" in booted.toolkit.container.splitlines()
    calls = [line.split() for line in booted.toolkit.notes.splitlines()]
    assert any(call[0] == "nvidia-container-runtime" and "create" in call for call in calls)


def test_udev_makes_links_when_a_driver_appears(booted: Booted) -> None:
    assert "nvidia-ctk system create-dev-char-symlinks --create-all" in booted.toolkit.notes.splitlines()


def test_every_booted_check_of_driver_and_gate_sees_its_mutation(booted: Booted) -> None:
    assert blind(booted.broken) == {}
    assert len(mutants.names(booted.broken)) == 12
