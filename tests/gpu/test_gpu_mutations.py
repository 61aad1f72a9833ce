"""The checks of the driver and the gate can fail: each gets a good image with one thing broken, and must turn red.

The image is `worker_gpu`, which is built if needed: its modules are compiled, or come from the store.
"""

from __future__ import annotations

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


def test_every_offline_check_of_driver_and_gate_sees_its_mutations(
    tmp_path: Path, worker_gpu: Workplace
) -> None:
    lowers, facts = worker_gpu.sealed()
    clean = mutants.observe(lowers, facts, tmp_path / "clean", mutated=False, select=SELECTED)
    assert {check.name: check.message for check in clean.not_passed} == {}

    found = mutants.observe(lowers, facts, tmp_path / "mutants", mutated=True, select=SELECTED)
    assert blind(found) == {}
    assert mutants.names(found) == mutants.names(clean)
