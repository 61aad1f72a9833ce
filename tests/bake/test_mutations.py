"""Every verification check can fail: each gets a good image with one thing broken, and must turn red.

The image is today's worker; the others are slow, and built if needed. A bare tree works too:
``IMAGE_BUILDER_SEALED_TREE`` lists its layers, topmost first, separated by colons, and ``IMAGE_BUILDER_FACTS`` names
its facts.json.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from image_builder.verify.result import blind
from tests.support.images import mutants
from tests.support.images.builds import Workplace
from tests.support.images.fixtures import whole_workers

pytestmark = [pytest.mark.root]


@pytest.fixture(params=whole_workers("worker_current", "worker_current_docker", "whole_worker"))
def sealed(request: pytest.FixtureRequest) -> tuple[tuple[Path, ...], Path]:
    """Return the layers of a sealed image, topmost first, and the path of its facts."""
    if "IMAGE_BUILDER_SEALED_TREE" in os.environ:
        layers = os.environ["IMAGE_BUILDER_SEALED_TREE"].split(":")
        return tuple(Path(layer).resolve() for layer in layers), Path(os.environ["IMAGE_BUILDER_FACTS"])
    built: Workplace = request.getfixturevalue(request.param)
    return built.sealed()


def test_every_offline_check_sees_its_mutations(
    tmp_path: Path, sealed: tuple[tuple[Path, ...], Path]
) -> None:
    lowers, facts = sealed
    clean = mutants.observe(lowers, facts, tmp_path / "clean", mutated=False)
    assert {check.name: check.message for check in clean.not_passed} == {}

    found = mutants.observe(lowers, facts, tmp_path / "mutants", mutated=True)
    assert blind(found) == {}
    assert mutants.names(found) == mutants.names(clean)
