"""The verification suite (tests/suite) on a good root, and on mutants, each with one thing broken."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from image_builder.system.namespace import run_isolated
from image_builder.system.sandbox import open_root
from image_builder.verify.boot import SUITE_SECONDS
from image_builder.verify.result import SuiteResult, from_json
from image_builder.verify.runner import observe_suite


def observe(
    lowers: Sequence[Path], facts: Path, work: Path, *, mutated: bool, select: tuple[str, ...] = ()
) -> SuiteResult:
    """Run the suite on the image as it is, or once for each mutation on an image with that mutation.

    ``lowers`` are the trees of the image, topmost first; ``work`` is a directory to create; ``select`` names checks or
    their files, and selects all if empty.
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
            target,
            facts,
            work,
            marker="offline",
            python=python,
            log=log,
            select=select,
            mutations="tests.suite.offline" if mutated else None,
            timeout=600,
        )

    assert run_isolated(isolated) == 0
    return from_json(json.loads((work / "verify.json").read_text(encoding="utf-8")))


def observe_broken(ssh_url: str, facts: Path, work: Path, select: tuple[str, ...]) -> SuiteResult:
    """Run each of the selected checks on a running machine twice: as it is, and broken by the check's own mutation.

    The machine is unusable afterwards. ``work`` is a directory for the records.
    """
    python, log = Path(sys.executable), work / "log"
    return observe_suite(
        f"broken:{ssh_url}",
        facts,
        work,
        marker="booted",
        python=python,
        log=log,
        select=select,
        mutations="tests.suite.booted",
        timeout=SUITE_SECONDS,
    )


def names(result: SuiteResult) -> set[str]:
    """Return the checks of a run, each once."""
    return {check.name.partition("[")[0] for check in result.checks}
