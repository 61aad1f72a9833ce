"""Checks of settings that the lab's images don't declare can also fail: the roles apply them, and each is mutated.

See ``tests/support/images/declarations.py``.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from image_builder.verify.result import blind
from tests.support.images import mutants, variants
from tests.support.images.builds import Workplace
from tests.support.images.declarations import DECLARATIONS, SELECTED
from tests.support.images.fixtures import WHOLE

pytestmark = pytest.mark.root


# The image that each is applied to. A kubelet from a repository replaces an existing one.
_BELOW = {"containerd": WHOLE, "docker": "worker", "dockershim": "worker"}


@pytest.mark.parametrize("name", _BELOW)
def test_every_check_sees_its_mutations(request: pytest.FixtureRequest, tmp_path: Path, name: str) -> None:
    (tmp_path / "roles").mkdir()
    below: Workplace = request.getfixturevalue(_BELOW[name])
    declaration = dataclasses.replace(DECLARATIONS[name], image=below.image)
    variant = variants.apply(below, declaration, tmp_path / "roles")
    clean = mutants.observe(
        variant.trees, variant.facts, tmp_path / "clean", mutated=False, select=SELECTED[name]
    )
    assert {check.name: check.message for check in clean.not_passed} == {}
    named = {check.partition("::")[2] for check in SELECTED[name]} - {""}
    assert named <= {check.partition("::")[2] for check in mutants.names(clean)}

    broken = mutants.observe(
        variant.trees, variant.facts, tmp_path / "mutants", mutated=True, select=SELECTED[name]
    )
    assert blind(broken) == {}
    assert mutants.names(broken) == mutants.names(clean)
