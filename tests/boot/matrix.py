"""Run the boot matrix, row by row.

    .venv/bin/python -m tests.boot.matrix [--image NAME] [--row NAME ...] [--artefact DIR] [--update-docs]

A named row also runs those that it depends on. With ``--update-docs`` each row that was run replaces its cell of the
image in docs/reference/proofs.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from image_builder.errors import ImageBuilderError
from image_builder.settings import REPO_ROOT
from tests.boot.engines import engine_of
from tests.boot.node import read_image
from tests.boot.rows import ROWS, Row, chain
from tests.boot.steps import Lab, Place, mismatches
from tests.support.pages import proofs

# Docker 26.1 with kubelet 1.20, containerd 2.1 with kubelet 1.36, Docker 28.5 with the same.
IMAGES = ("worker", "worker_current", "worker_current_docker")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a row: the facts that were found, and which of them aren't as expected."""

    name: str
    seconds: float
    facts: dict[str, Any]
    wrong: list[str]


def run_row(lab: Lab, row: Row) -> Outcome:
    """Run one row. A failure on the way is part of the outcome."""
    began = time.monotonic()
    place = Place(lab, row.machine, row.disks)
    facts: dict[str, Any] = {}
    try:
        for step in row.steps:
            facts |= step(place)
        wrong = mismatches(row.wanted(engine_of(lab.image.variables).name), facts)
    except (ImageBuilderError, AssertionError) as error:
        wrong = [f"{type(error).__name__}: {error}"]
        traceback.print_exc()
    return Outcome(row.name, round(time.monotonic() - began, 1), facts, wrong)


@contextmanager
def lab(artefact: Path, base: Path | None = None) -> Iterator[Lab]:
    """Make a directory below ``base`` for the machines and disks of a run, and remove it at the end."""
    with tempfile.TemporaryDirectory(prefix="boot-matrix-", dir=base) as folder:
        made = Lab(read_image(artefact), Path(folder))
        try:
            yield made
        finally:
            made.end()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the rows; return 1 if one of them failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.boot.matrix", description=__doc__)
    parser.add_argument("--row", action="append", metavar="NAME", help="a row, with those that it stands on")
    parser.add_argument(
        "--image", choices=IMAGES, default=IMAGES[0], help="which image's last build [%(default)s]"
    )
    parser.add_argument("--artefact", type=Path, metavar="DIR", help="another build of that image")
    parser.add_argument("--work", type=Path, metavar="DIR", help="where machines and disks lie meanwhile")
    parser.add_argument("--update-docs", action="store_true", help="write the results into the page")
    options = parser.parse_args(argv)
    try:
        rows = chain(options.row) if options.row else list(ROWS)
    except KeyError as error:
        parser.error(f"no such row: {error.args[0]}; there are: {'; '.join(row.name for row in ROWS)}")
    outcomes: list[Outcome] = []
    began = proofs.stamp()
    artefact = options.artefact or REPO_ROOT / "output" / options.image / "latest"
    with lab(artefact.resolve(), options.work) as made:
        if (image := made.image.told["image"]) != options.image:
            parser.error(f"{artefact} is a build of {image}, not of {options.image}")
        for row in rows:
            outcomes.append(run_row(made, row))
            _tell(outcomes[-1])
            if options.update_docs:
                _keep(options.image, row, outcomes, began)
    return 1 if any(outcome.wrong for outcome in outcomes) else 0


def _tell(outcome: Outcome) -> None:
    verdict = "FAILED" if outcome.wrong else "passed"
    sys.stdout.write(f"{verdict}  {outcome.seconds:7.1f} s  {outcome.name}\n")
    sys.stdout.writelines(f"          {line}\n" for line in outcome.wrong)
    sys.stdout.write(f"          {json.dumps(outcome.facts)}\n")
    sys.stdout.flush()


def _keep(image: str, row: Row, outcomes: Sequence[Outcome], began: proofs.Stamp) -> None:
    """Write the last outcome into the page, and the number of rows that passed so far."""
    passed = [not outcome.wrong for outcome in outcomes]
    verdict = "passed" if passed[-1] else "**failed**"
    cells = {"what is done": row.what, image: f"{verdict}, {began.date}, {began.commit}"}
    proofs.write("boot matrix", {row.name: cells})
    result = f"{sum(passed)} of {len(passed)} rows passed"
    proofs.write("runs", {f"`tests.boot.matrix --image {image}`": {"result": result, **began._asdict()}})


if __name__ == "__main__":
    sys.exit(main())
