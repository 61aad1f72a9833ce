"""The image with a GPU's driver and the gate boots where there is no GPU: nothing fails, the driver says what it lacks,
and the boot does not pass. It is given what the roles make of NVIDIA's container toolkit (a stand-in). Then everything
broken that its checks are about, and the checks again; then a fault that a reboot may cure, so that the machine starts
itself again, once: with the toolkit from its start, nothing fails either.

``IMAGE_BUILDER_GPU_ARTEFACT`` names the directory of a build to be used instead.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from image_builder.errors import BootError, CommandError
from image_builder.events import Monitor
from image_builder.lab import pause
from image_builder.machine.ssh import SshTarget
from image_builder.settings import Settings
from image_builder.verify.boot import SUITE_SECONDS, BootResult, boot, wait_for_system
from image_builder.verify.result import SuiteResult, blind
from image_builder.verify.runner import observe_suite
from tests.boot.node import shell
from tests.support.images import mutants
from tests.support.images.builds import Workplace
from tests.support.images.toolkits import NOTES
from tests.support.images.variants import Variant

pytestmark = [pytest.mark.boot, pytest.mark.root, pytest.mark.nightly]

CHECKS = ("test_gpu.py", "test_gate.py", "test_node_health.py")
TOOLKIT = "test_gpu_containers.py"
# The engine does not come up any more, in either boot: a fault that a reboot may cure, as far as anybody can tell.
BREAK = """
systemctl mask --quiet --now docker.socket docker.service
sed -i -E 's/("wait_seconds": )[0-9.]+/\\11/' /etc/node-agent/preflight.json
"""
# The role's rule, with another driver's name: without a GPU NVIDIA's own ends before it is any.
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
# A container that does nothing until it is told to end; Docker hands it to the runtime of that name.
RUN = f"""
docker load --quiet --input /run/pause.tar
docker run --detach --name probe --network none --runtime nvidia {pause.REFERENCE}
docker inspect --format '{{{{.State.Running}}}} {{{{.HostConfig.Runtime}}}}' probe
docker rm --force probe
"""


@dataclass(frozen=True)
class Node:
    """What a boot left: its id by the kernel, the preflight's verdict, systemd's word for the whole."""

    boot_id: str
    verdict: dict[str, Any]
    state: str


@dataclass(frozen=True)
class WithToolkit:
    """A boot with the toolkit: its checks, Docker's word for a container by its runtime, the calls of its programs."""

    suite: SuiteResult
    container: str
    notes: str


@dataclass(frozen=True)
class Booted:
    """Two boots: the first one's result, the checks on the machine after it was broken, and both boots' verdicts; the
    toolkit in the second one."""

    result: BootResult
    broken: SuiteResult
    first: Node
    second: Node
    toolkit: WithToolkit


@pytest.fixture(scope="module")
def artefact(request: pytest.FixtureRequest) -> Path:
    if "IMAGE_BUILDER_GPU_ARTEFACT" in os.environ:
        return Path(os.environ["IMAGE_BUILDER_GPU_ARTEFACT"]).resolve()
    built: Workplace = request.getfixturevalue("worker_gpu")
    return built.artefact


@pytest.fixture(scope="module")
def booted(artefact: Path, toolkit: Variant, tmp_path_factory: pytest.TempPathFactory) -> Booted:
    records = tmp_path_factory.mktemp("boot")
    settings = Settings(store=tmp_path_factory.mktemp("store"), python=Path(sys.executable))
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

    result = boot(
        artefact,
        verify=True,
        out_dir=records,
        settings=settings,
        monitor=Monitor(),
        pause_archive=pause.archive,
        then=go_on,
    )
    return Booted(result, **seen)


def _container(ssh: SshTarget) -> str:
    """Run a container by the toolkit's runtime; return what Docker says of it."""
    ssh.put(pause.archive(), "/run/pause.tar")
    return shell(ssh, RUN)


def _notes(ssh: SshTarget) -> str:
    """Let the driver's module come and go, then a driver appear; return how the toolkit's programs were called."""
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
    """Let the preflight find a fault that a reboot may cure; return what the machine is after its own reboot."""
    shell(ssh, BREAK)
    shell(ssh, "systemctl --no-block restart preflight.service")
    deadline = time.monotonic() + REBOOT_SECONDS
    while True:
        assert time.monotonic() < deadline, "the machine did not start itself again"
        time.sleep(5)
        try:
            ssh.connect()
            if _boot_id(ssh) != before:
                return _node(ssh)
        except (BootError, CommandError):
            pass  # it is on its way


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
    """Its size is unknown, so nobody knows how many GPUs there should be. No reboot would tell."""
    found = booted.first.verdict
    assert found["boot_id"] == booted.first.boot_id
    assert (found["state"], found["code"], found["action"]) in (
        ("inconclusive", "sku.unanswered", "none"),
        ("failed", "sku.unknown", "config"),  # the host's own platform answers, with a size that has no GPUs
    )


def test_machine_starts_itself_again_once_and_is_tested_anew(booted: Booted) -> None:
    """The second verdict is of the second boot, and asks for no third one: a reboot did not help."""
    found = booted.second.verdict
    assert booted.second.boot_id != booted.first.boot_id == booted.first.verdict["boot_id"]
    assert found["boot_id"] == booted.second.boot_id
    assert (found["state"], found["code"], found["action"]) == ("failed", "runtime.engine", "reimage")
    assert "a reboot did not help" in found["reason"]
    assert booted.second.state == "running"


def test_toolkit_asks_nothing_of_a_machine_without_a_gpu(booted: Booted) -> None:
    """It was there when the machine started: its checks pass, and nobody described what isn't there."""
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
