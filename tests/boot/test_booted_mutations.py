"""Every check of a running machine can fail: a VM with everything broken that they are about.

``IMAGE_BUILDER_ARTEFACT`` names the directory of one build (by default the worker is built).
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import pytest

from image_builder.boot import GROWTH_BYTES, find_disk, start_pod, virtual_size, wait_for_system
from image_builder.events import NullMonitor
from image_builder.report.verification import Check, SuiteResult
from image_builder.stages.verify import SUITE, observe_suite
from image_builder.target.ssh import SshTarget
from image_builder.target.vm import Vm, VmOptions
from tests.builds import Workplace

pytestmark = [pytest.mark.boot, pytest.mark.root]


@pytest.fixture
def artefact(request: pytest.FixtureRequest) -> Path:
    if "IMAGE_BUILDER_ARTEFACT" in os.environ:
        return Path(os.environ["IMAGE_BUILDER_ARTEFACT"]).resolve()
    built: Workplace = request.getfixturevalue("worker")
    return built.artefact


@pytest.fixture
def mutations(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The suite's commands that break a machine, by the check that must see them."""
    monkeypatch.syspath_prepend(str(SUITE))
    found: dict[str, str] = importlib.import_module("mutations_booted").all_booted()
    return found


def verify(ssh: SshTarget, facts: Path, out: Path, select: tuple[str, ...] = ()) -> SuiteResult:
    out.mkdir()
    python = Path(sys.executable)
    return observe_suite(
        ssh.url, facts, out, marker="booted", python=python, log=out / "log", select=select, timeout=3600
    )


def function(check: Check) -> str:
    """Return the name of a check's function."""
    return check.name.partition("::")[2]


def test_every_booted_check_sees_its_mutation(
    artefact: Path, tmp_path: Path, mutations: dict[str, str]
) -> None:
    facts = artefact / "facts.json"
    variables = json.loads(facts.read_bytes())["variables"]
    disk = find_disk(artefact)
    options = VmOptions(
        name="mutant",
        disk=disk,
        user=variables["image_base"]["distribution"],
        disk_size=virtual_size(disk) + GROWTH_BYTES,
    )
    machine = tmp_path / "machine"
    machine.mkdir()
    with Vm(options, machine) as vm:
        ssh = vm.wait_for_ssh()
        wait_for_system(ssh)
        start_pod(vm, ssh, variables, NullMonitor())
        clean = verify(ssh, facts, tmp_path / "clean")
        assert {check.name: check.message for check in clean.not_passed} == {}

        mutated = {function(check): check.name for check in clean.checks if function(check) in mutations}
        assert len(mutated) >= 20
        for name, command in mutations.items():
            if name in mutated:
                ssh.run(["sh", "-c", command])
        broken = verify(ssh, facts, tmp_path / "broken", tuple(mutated.values()))
    assert [check.name for check in broken.checks if check.outcome == "passed"] == []
