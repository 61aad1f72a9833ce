"""The verification suite on a good root, and on others, each with one thing broken (tests/image/mutations.py)."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from image_builder.namespace import run_isolated
from image_builder.report.verification import SuiteResult, from_json
from image_builder.sandbox import open_root
from image_builder.stages.verify import observe_suite


def observe(
    lowers: Sequence[Path], facts: Path, work: Path, *, mutated: bool, select: tuple[str, ...] = ()
) -> SuiteResult:
    """Run the suite on the image as it is, or once for each mutation on an image with that mutation.

    ``lowers`` are the trees of the image, topmost first, ``work`` is a directory to be, ``select`` names checks or
    their files, all where it is empty.
    """
    work.mkdir()

    def isolated() -> int:
        if mutated:
            look(f"mutant:{':'.join(map(str, lowers))}?work={work}")
        else:
            with open_root(lowers, work) as root:
                look(f"sandbox:{root.path}")
        return 0

    def look(target: str) -> None:
        python, log = Path(sys.executable), work / "log"
        observe_suite(
            target, facts, work, marker="offline", python=python, log=log, select=select, timeout=600
        )

    assert run_isolated(isolated) == 0
    return from_json(json.loads((work / "verify.json").read_text(encoding="utf-8")))


def blind(mutants: SuiteResult) -> dict[str, str]:
    """Return the checks that did not turn red by their own assertion, with what they said instead.

    An error in a mutation, or a check that trips over it, proves nothing.
    """
    return {
        check.name: f"{check.outcome} {check.exception}: {check.message}"
        for check in mutants.checks
        if (check.outcome, check.exception) != ("failed", "AssertionError")
    }


def names(result: SuiteResult) -> set[str]:
    """Return the checks of a run, each once."""
    return {check.name.partition("[")[0] for check in result.checks}
