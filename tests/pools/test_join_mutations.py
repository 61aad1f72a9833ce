"""The checks of joining can fail: each gets a good image with one thing broken, and must turn red.

No image that CI bakes has the layer `join`. This is the smallest one that has it (tests/pools/joining); two of its
layers are baked, and no disk.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from image_builder.definition import load_inventory
from image_builder.verify.result import blind
from image_builder.verify.runner import definition_facts, write_facts
from tests.support.images import mutants, programs
from tests.support.images.builds import REPO, Workplace

pytestmark = pytest.mark.root

# Whichever kubelet doesn't have to be compiled.
IMAGE = "least_joining" if programs.DIRECTORY else "least_joining_compiled"
INVENTORIES = [REPO / "inventories/lab", REPO / "tests/pools/joining"]
SELECTED = ("test_join.py",)


@pytest.fixture(scope="module")
def trees(minimal: Workplace, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    """Return that image's layers, topmost first."""
    place = Workplace(minimal.store, tmp_path_factory.mktemp(IMAGE), IMAGE)
    return place.build_until("join", *(word for path in INVENTORIES for word in ("-i", path)))


def test_every_check_of_joining_sees_its_mutations(tmp_path: Path, trees: tuple[Path, ...]) -> None:
    facts = tmp_path / "facts.json"
    write_facts(facts, definition_facts(load_inventory(INVENTORIES).define(IMAGE), "0" * 64, [], []))
    clean = mutants.observe(trees, facts, tmp_path / "clean", mutated=False, select=SELECTED)
    assert {check.name: check.message for check in clean.not_passed} == {} and len(clean.checks) == 3

    found = mutants.observe(trees, facts, tmp_path / "mutants", mutated=True, select=SELECTED)
    assert blind(found) == {}
    assert mutants.names(found) == mutants.names(clean)
