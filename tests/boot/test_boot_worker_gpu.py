"""The image with a GPU's driver boots where there is no GPU: nothing fails, and the driver says what it lacks.

``IMAGE_BUILDER_GPU_ARTEFACT`` names the directory of a build to be used instead.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from image_builder.boot import BootResult, boot
from image_builder.events import NullMonitor
from image_builder.report.verification import SuiteResult
from image_builder.settings import Settings
from image_builder.stages.verify import SUITE, observe_suite
from image_builder.target.ssh import SshTarget
from tests.builds import Workplace

pytestmark = [pytest.mark.boot, pytest.mark.root]

CHECKS = "test_gpu.py"


@dataclass(frozen=True)
class Booted:
    """One boot: its result, and the driver's checks on the machine after it was broken."""

    result: BootResult
    broken: SuiteResult
    mutated: frozenset[str]


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
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SUITE))
        mutations: dict[str, str] = importlib.import_module("mutations_booted").all_booted()

    def mutate_and_verify(ssh: SshTarget) -> None:
        found = [str(c["name"]) for c in json.loads((records / "verify.json").read_bytes())["checks"]]
        mutated.update({n.partition("::")[2]: n for n in found if n.startswith(f"{CHECKS}::")})
        for check in [check for check in mutated if check not in mutations]:
            del mutated[check]
        for check in mutated:
            ssh.run(["sh", "-c", mutations[check]])
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

    result = boot(
        artefact,
        verify=True,
        out_dir=records,
        settings=settings,
        monitor=NullMonitor(),
        then=mutate_and_verify,
    )
    return Booted(result, broken[0], frozenset(mutated))


def test_every_check_passes_without_a_gpu(booted: Booted) -> None:
    booted.result.require_passed()
    assert booted.result.suite is not None
    names = {check.name for check in booted.result.suite.checks}
    assert {name for name in names if name.startswith(CHECKS)} >= {
        f"{CHECKS}::test_gpu_driver_wants_nothing_but_a_gpu",
        f"{CHECKS}::test_gpu_units_follow_the_gpu",
    }


def test_no_unit_failed_without_a_gpu(booted: Booted) -> None:
    assert booted.result.system_state == "running"
    assert booted.result.console_problems == ()


def test_every_booted_check_of_the_driver_sees_its_mutation(booted: Booted) -> None:
    assert len(booted.mutated) == 3
    assert [check.name for check in booted.broken.checks if check.outcome == "passed"] == []
