"""The checks of the driver and the gate can fail: each gets a good image with one thing broken, and must turn red.

The image is `worker_gpu`, which is built if needed: its modules are compiled, or come from the store. A bare tree
works too: ``IMAGE_BUILDER_GPU_TREE`` lists its layers, topmost first, separated by colons, and
``IMAGE_BUILDER_GPU_FACTS`` names its facts.json.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from image_builder.verify.result import blind
from tests.support.images import mutants
from tests.support.images.builds import Workplace

pytestmark = pytest.mark.root

# Includes the gate's checks: no other image of the lab has that layer.
SELECTED = (
    "test_gpu.py",
    "test_gate.py",
    "test_node_health.py",
    "test_local_disk.py::test_node_agent_is_what_was_baked",
)


@pytest.fixture
def sealed(request: pytest.FixtureRequest) -> tuple[tuple[Path, ...], Path]:
    """Return the layers of a sealed image, topmost first, and the path of its facts."""
    if "IMAGE_BUILDER_GPU_TREE" in os.environ:
        layers = os.environ["IMAGE_BUILDER_GPU_TREE"].split(":")
        return tuple(Path(layer).resolve() for layer in layers), Path(os.environ["IMAGE_BUILDER_GPU_FACTS"])
    built: Workplace = request.getfixturevalue("worker_gpu")
    return built.sealed()


def test_every_offline_check_of_driver_and_gate_sees_its_mutations(
    tmp_path: Path, sealed: tuple[tuple[Path, ...], Path]
) -> None:
    lowers, facts = sealed
    clean = mutants.observe(lowers, facts, tmp_path / "clean", mutated=False, select=SELECTED)
    assert {check.name: check.message for check in clean.not_passed} == {}

    found = mutants.observe(lowers, facts, tmp_path / "mutants", mutated=True, select=SELECTED)
    assert blind(found) == {}
    assert mutants.names(found) == mutants.names(clean)
