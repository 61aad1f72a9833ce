"""Every verification check can fail: each gets a good image with one thing broken, and must turn red.

The image is the worker, built when it isn't yet. Or a tree alone: ``IMAGE_BUILDER_SEALED_TREE`` has its layers,
topmost first, separated by colons, ``IMAGE_BUILDER_FACTS`` its facts.json.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import mutants
from tests.builds import Workplace

pytestmark = [pytest.mark.root, pytest.mark.image("worker")]


@pytest.fixture
def sealed(request: pytest.FixtureRequest) -> tuple[tuple[Path, ...], Path]:
    """The layers of a sealed image, topmost first, and its facts."""
    if "IMAGE_BUILDER_SEALED_TREE" in os.environ:
        layers = os.environ["IMAGE_BUILDER_SEALED_TREE"].split(":")
        return tuple(Path(layer).resolve() for layer in layers), Path(os.environ["IMAGE_BUILDER_FACTS"])
    built: Workplace = request.getfixturevalue("worker")
    return built.sealed()


def test_every_offline_check_sees_its_mutations(
    tmp_path: Path, sealed: tuple[tuple[Path, ...], Path]
) -> None:
    lowers, facts = sealed
    clean = mutants.observe(lowers, facts, tmp_path / "clean", mutated=False)
    assert {check.name: check.message for check in clean.not_passed} == {}

    found = mutants.observe(lowers, facts, tmp_path / "mutants", mutated=True)
    assert mutants.blind(found) == {}
    assert mutants.names(found) == mutants.names(clean)
