"""The checks of driver and gate can fail: each gets a good image with one thing broken, and must turn red.

The image is `worker_gpu`, built when it isn't yet: its modules are compiled, or come from the store. Or a tree alone:
``IMAGE_BUILDER_GPU_TREE`` has its layers, topmost first, separated by colons, ``IMAGE_BUILDER_GPU_FACTS`` its
facts.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from image_builder.namespace import run_isolated
from image_builder.report.verification import SuiteResult, from_json
from image_builder.stages.verify import observe_suite
from tests.builds import Workplace

pytestmark = pytest.mark.root

# The gate's checks, too: no other image of the lab has that layer.
SELECTED = (
    "test_gpu.py",
    "test_gate.py",
    "test_node_health.py",
    "test_local_disk.py::test_node_agent_is_what_was_baked",
)


@pytest.fixture
def sealed(request: pytest.FixtureRequest) -> tuple[tuple[Path, ...], Path]:
    """The layers of a sealed image, topmost first, and its facts."""
    if "IMAGE_BUILDER_GPU_TREE" in os.environ:
        layers = os.environ["IMAGE_BUILDER_GPU_TREE"].split(":")
        return tuple(Path(layer).resolve() for layer in layers), Path(os.environ["IMAGE_BUILDER_GPU_FACTS"])
    built: Workplace = request.getfixturevalue("worker_gpu")
    return built.sealed()


def test_every_offline_check_of_driver_and_gate_sees_its_mutations(
    tmp_path: Path, sealed: tuple[tuple[Path, ...], Path]
) -> None:
    lowers, facts = sealed

    def isolated() -> int:
        observe_suite(
            f"mutant:{':'.join(map(str, lowers))}?work={tmp_path}",
            facts,
            tmp_path,
            marker="offline",
            python=Path(sys.executable),
            log=tmp_path / "log",
            select=SELECTED,
            timeout=600,
        )
        return 0

    assert run_isolated(isolated) == 0
    mutants: SuiteResult = from_json(json.loads((tmp_path / "verify.json").read_text(encoding="utf-8")))
    blind = {
        check.name: f"{check.outcome} {check.exception}: {check.message}"
        for check in mutants.checks
        if (check.outcome, check.exception) != ("failed", "AssertionError")
    }
    assert blind == {}
    assert len({check.name.partition("[")[0] for check in mutants.checks}) >= 25
