"""Checks of what the lab's images don't declare can fail, too: the roles configure it, and each gets its mutations.

See ``tests/declarations.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import mutants, variants
from tests.builds import Workplace
from tests.declarations import DECLARATIONS, SELECTED

pytestmark = pytest.mark.root


@pytest.mark.parametrize("name", DECLARATIONS)
def test_every_check_sees_its_mutations(worker: Workplace, tmp_path: Path, name: str) -> None:
    (tmp_path / "roles").mkdir()
    variant = variants.apply(worker, DECLARATIONS[name], tmp_path / "roles")
    clean = mutants.observe(
        variant.trees, variant.facts, tmp_path / "clean", mutated=False, select=SELECTED[name]
    )
    assert {check.name: check.message for check in clean.not_passed} == {}
    named = {check.partition("::")[2] for check in SELECTED[name]} - {""}
    assert named <= {check.partition("::")[2] for check in mutants.names(clean)}

    broken = mutants.observe(
        variant.trees, variant.facts, tmp_path / "mutants", mutated=True, select=SELECTED[name]
    )
    assert mutants.blind(broken) == {}
    assert mutants.names(broken) == mutants.names(clean)
