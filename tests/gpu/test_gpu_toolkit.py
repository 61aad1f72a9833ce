"""The container toolkit as the roles add it to the GPU image: every check of it passes, and can fail.

The toolkit is a stand-in (``tests/support/images/toolkits.py``); the configuration, and the engines that read it, are
real.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from image_builder.verify.result import SuiteResult, blind
from tests.support.images import mutants
from tests.support.images.variants import Variant

pytestmark = pytest.mark.root

CHECKS = "test_gpu_containers.py"
# What adding the toolkit could have broken: the engines' own checks, the driver's units, systemd's verdict on units.
OTHERS = (
    "test_container_runtime.py",
    "test_containerd.py",
    "test_gpu.py::test_gpu_starts_its_units",
    "test_gpu.py::test_gpu_nothing_of_a_machine_is_baked",
    "test_gpu.py::test_gpu_packages_are_held",
    "test_system.py::test_units_are_valid",
)


def observed(toolkit: Variant, work: Path, select: tuple[str, ...], *, mutated: bool) -> SuiteResult:
    """Run checks on the image as it is, or once for each of their mutations."""
    trees = toolkit.trees
    return mutants.observe(trees, toolkit.facts, work, mutated=mutated, select=select)


def test_engines_and_units_are_as_declared(toolkit: Variant, tmp_path: Path) -> None:
    found = observed(toolkit, tmp_path / "clean", (CHECKS, *OTHERS), mutated=False)
    assert {check.name: check.message for check in found.not_passed} == {}
    assert len([check for check in found.checks if check.name.startswith(CHECKS)]) == 6


def test_every_check_sees_its_mutations(toolkit: Variant, tmp_path: Path) -> None:
    found = observed(toolkit, tmp_path / "mutants", (CHECKS,), mutated=True)
    assert blind(found) == {}
    assert len(mutants.names(found)) == 6
