"""The image with a GPU's driver and the gate boots where there is no GPU: nothing fails, the driver says what it lacks,
and the boot does not pass. Then everything broken that its checks are about, and the checks again; then a fault that a
reboot may cure, so that the machine starts itself again, once.

``IMAGE_BUILDER_GPU_ARTEFACT`` names the directory of a build to be used instead.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from image_builder.boot import BootResult, boot, wait_for_system
from image_builder.errors import BootError, CommandError
from image_builder.events import NullMonitor
from image_builder.report.verification import SuiteResult
from image_builder.settings import Settings
from image_builder.stages.verify import SUITE, observe_suite
from image_builder.target.ssh import SshTarget
from tests.builds import Workplace

pytestmark = [pytest.mark.boot, pytest.mark.root]

CHECKS = ("test_gpu.py", "test_gate.py", "test_node_health.py")
# An engine that no layer of this image has brought: it does not answer, in either boot.
BREAK = """
import json
path = "/etc/node-agent/preflight.json"
settings = json.load(open(path))
json.dump({**settings, "engine": "docker", "wait_seconds": 1}, open(path, "w"))
"""
REBOOT_SECONDS = 900.0


@dataclass(frozen=True)
class Node:
    """What a boot left: its id by the kernel, the preflight's verdict, systemd's word for the whole."""

    boot_id: str
    verdict: dict[str, Any]
    state: str


@dataclass(frozen=True)
class Booted:
    """Two boots: the first one's result, the checks on the machine after it was broken, and both boots' verdicts."""

    result: BootResult
    broken: SuiteResult
    mutated: frozenset[str]
    first: Node
    second: Node


@pytest.fixture(scope="module")
def artefact(request: pytest.FixtureRequest) -> Path:
    if "IMAGE_BUILDER_GPU_ARTEFACT" in os.environ:
        return Path(os.environ["IMAGE_BUILDER_GPU_ARTEFACT"]).resolve()
    built: Workplace = request.getfixturevalue("worker_gpu")
    return built.artefact


@pytest.fixture(scope="module")
def booted(artefact: Path, tmp_path_factory: pytest.TempPathFactory) -> Booted:
    records, again = tmp_path_factory.mktemp("boot"), tmp_path_factory.mktemp("broken")
    settings = Settings(store=tmp_path_factory.mktemp("store"), python=Path(sys.executable))
    broken: list[SuiteResult] = []
    mutated: dict[str, str] = {}
    nodes: list[Node] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SUITE))
        mutations: dict[str, str] = importlib.import_module("mutations_booted").all_booted()

    def mutate_and_restart(ssh: SshTarget) -> None:
        nodes.append(_node(ssh))
        found = [str(c["name"]) for c in json.loads((records / "verify.json").read_bytes())["checks"]]
        names = {n.partition("::")[2]: n for n in found if n.startswith(CHECKS)}
        mutated.update({check: name for check, name in names.items() if check in mutations})
        for check, command in mutations.items():
            if check in mutated:
                ssh.run(["sh", "-c", command])
        broken.append(
            observe_suite(
                ssh.url,
                artefact / "facts.json",
                again,
                marker="booted",
                python=Path(sys.executable),
                log=again / "log",
                select=tuple(mutated.values()),
                timeout=600,
            )
        )
        nodes.append(_started_by_itself(ssh, nodes[0].boot_id))

    result = boot(
        artefact,
        verify=True,
        out_dir=records,
        settings=settings,
        monitor=NullMonitor(),
        then=mutate_and_restart,
    )
    return Booted(result, broken[0], frozenset(mutated), *nodes)


def _node(ssh: SshTarget) -> Node:
    state = wait_for_system(ssh)
    verdict = json.loads(ssh.run(["cat", "/run/node/preflight.json"]).stdout)
    return Node(_boot_id(ssh), verdict, state)


def _boot_id(ssh: SshTarget) -> str:
    return ssh.run(["cat", "/proc/sys/kernel/random/boot_id"]).stdout.strip()


def _started_by_itself(ssh: SshTarget, before: str) -> Node:
    """Let the preflight find a fault that a reboot may cure; return what the machine is after its own reboot."""
    ssh.run(["python3", "-c", BREAK])
    ssh.run(["systemctl", "--no-block", "restart", "preflight.service"])
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
    assert (found["state"], found["code"], found["action"]) == ("failed", "runtime.engine", "replace")
    assert "a reboot did not help" in found["reason"]
    assert booted.second.state == "running"


def test_every_booted_check_of_driver_and_gate_sees_its_mutation(booted: Booted) -> None:
    assert len(booted.mutated) == 8
    assert len(booted.broken.checks) == 8
    assert [check.name for check in booted.broken.checks if check.outcome == "passed"] == []
