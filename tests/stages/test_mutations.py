"""Every verification check can fail: each gets a good image with one thing broken, and must turn red.

The image is the worker, built when it isn't yet. Or a tree alone: ``IMAGE_BUILDER_SEALED_TREE`` has its layers,
topmost first, separated by colons, ``IMAGE_BUILDER_FACTS`` its facts.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from image_builder.namespace import run_isolated
from image_builder.report.verification import SuiteResult, from_json
from image_builder.sandbox import open_root
from image_builder.stages.verify import observe_suite
from tests.builds import Workplace

pytestmark = pytest.mark.root


@pytest.fixture
def sealed(request: pytest.FixtureRequest) -> tuple[tuple[Path, ...], Path]:
    """The layers of a sealed image, topmost first, and its facts."""
    if "IMAGE_BUILDER_SEALED_TREE" in os.environ:
        layers = os.environ["IMAGE_BUILDER_SEALED_TREE"].split(":")
        return tuple(Path(layer).resolve() for layer in layers), Path(os.environ["IMAGE_BUILDER_FACTS"])
    built: Workplace = request.getfixturevalue("worker")
    return built.sealed()


def run_in_sandbox(work: Path, lowers: tuple[Path, ...], facts: Path, *, mutated: bool) -> SuiteResult:
    """Run the suite on the image as it is, or once for each mutation on an image with that mutation."""
    work.mkdir()

    def isolated() -> int:
        if mutated:
            observe(f"mutant:{':'.join(map(str, lowers))}?work={work}")
        else:
            with open_root(lowers, work) as root:
                observe(f"sandbox:{root.path}")
        return 0

    def observe(target: str) -> None:
        python = Path(sys.executable)
        observe_suite(target, facts, work, marker="offline", python=python, log=work / "log", timeout=600)

    assert run_isolated(isolated) == 0
    return from_json(json.loads((work / "verify.json").read_text(encoding="utf-8")))


def test_every_offline_check_sees_its_mutations(
    tmp_path: Path, sealed: tuple[tuple[Path, ...], Path]
) -> None:
    lowers, facts = sealed
    clean = run_in_sandbox(tmp_path / "clean", lowers, facts, mutated=False)
    assert {check.name: check.message for check in clean.not_passed} == {}

    mutants = run_in_sandbox(tmp_path / "mutants", lowers, facts, mutated=True)
    # Red by the check's own assertion: an error in a mutation or a check that trips over it proves nothing.
    blind = {
        check.name: f"{check.outcome} {check.exception}: {check.message}"
        for check in mutants.checks
        if (check.outcome, check.exception) != ("failed", "AssertionError")
    }
    assert blind == {}
    assert {check.name.partition("[")[0] for check in mutants.checks} == {
        check.name for check in clean.checks
    }
