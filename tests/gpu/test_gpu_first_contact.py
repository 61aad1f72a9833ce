"""A rehearsal of the first contact with a GPU: the whole command, on our own stand-in for the driver's libraries.

There is no GPU here, and speeds mean nothing. The point is that the command's ten minutes aren't lost to its own
faults.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from image_builder.system.namespace import run_isolated
from image_builder.system.sandbox import open_root
from tests.bench.first_contact.context import read_json
from tests.bench.first_contact.steps import STEPS
from tests.support.gpu_stand_in import machines
from tests.support.images.builds import REPO, Workplace

pytestmark = pytest.mark.root

# So much less is measured; the deadlines are those of a real run.
PACE = "0.02"


@pytest.fixture
def libraries(worker_gpu: Workplace, tmp_path: Path) -> Path:
    """Compile both libraries with the compiler that builds the kernel modules."""
    machines.sources(tmp_path / "src")
    binds = {"/run/stand-in": tmp_path / "src"}

    def isolated() -> int:
        with open_root(worker_gpu.trees("module_root"), tmp_path / "root", writable_binds=binds) as root:
            machines.compile_in(Path("/run/stand-in"), root.run)
        return 0

    assert run_isolated(isolated) == 0
    return tmp_path / "src"


def test_every_step_is_done(libraries: Path, tmp_path: Path) -> None:
    machine, out = machines.machine(tmp_path / "machine", libraries), tmp_path / "out"
    program = [sys.executable, os.fspath(REPO / "tests/bench/gpu.py"), "--first-contact", os.fspath(out)]
    argv = [*program, "--root", os.fspath(machine.root), "--pace", PACE]
    done = subprocess.run(argv, env=machine.environment, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stdout + done.stderr

    def result(step: str) -> dict[str, Any]:
        return read_json(out / "steps" / step / "result.json")

    states = {step["step"]: step["state"] for step in read_json(out / "summary.json")["steps"]}
    assert states == dict.fromkeys((step.name for step in STEPS), "done")
    assert result("smoke-quick")["exit_status"] == result("smoke-full")["exit_status"] == 0
    assert {device["uuid"] for device in result("cuda")["gpus"]} == set(machine.gpus)
    drills = [step.name for step in STEPS if step.name.startswith("drill-")]
    assert len(drills) == 10 and all(result(name)["caught"] for name in drills)
