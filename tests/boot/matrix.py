"""Run the boot matrix, row by row.

    .venv/bin/python -m tests.boot.matrix [--image NAME] [--row NAME ...] [--artefact DIR] [--update-docs]

A named row also runs those that it depends on. With ``--update-docs`` the results are kept in ``record.json``,
separately for each image, and docs/reference/boot-matrix.md is generated from it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from image_builder.errors import ImageBuilderError
from image_builder.machine.qemu import accelerator
from image_builder.settings import REPO_ROOT
from tests.boot import page
from tests.boot.engines import engine_of
from tests.boot.foreign import PROGRAMS
from tests.boot.node import read_image
from tests.boot.rows import ROWS, Row, chain
from tests.boot.steps import Lab, Place, mismatches
from tests.support import provenance

RECORD = Path(__file__).with_name("record.json")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a row: the facts that were found, and which of them aren't as expected."""

    name: str
    seconds: float
    facts: dict[str, Any]
    wrong: list[str]
    date: str


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
    today = datetime.now(tz=UTC).strftime("%Y-%m-%d")
    return Outcome(row.name, round(time.monotonic() - began, 1), facts, wrong, today)


@contextmanager
def lab(artefact: Path, base: Path | None = None) -> Iterator[Lab]:
    """Make a directory below ``base`` for the machines and disks of a run, and remove it at the end."""
    with tempfile.TemporaryDirectory(prefix="boot-matrix-", dir=base) as folder:
        made = Lab(read_image(artefact), Path(folder))
        try:
            yield made
        finally:
            made.end()


def machine() -> str:
    """Return a description of this machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    how = "emulated" if accelerator() == "tcg" else "with KVM"
    return f"a virtual machine with {os.cpu_count()} cores and {memory:.0f} GiB, the nodes in QEMU {how}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the rows; return 1 if one of them failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.boot.matrix", description=__doc__)
    parser.add_argument("--row", action="append", metavar="NAME", help="a row, with those that it stands on")
    parser.add_argument(
        "--image", choices=page.IMAGES, default=page.IMAGES[0], help="which image's last build [%(default)s]"
    )
    parser.add_argument("--artefact", type=Path, metavar="DIR", help="another build of that image")
    parser.add_argument("--work", type=Path, metavar="DIR", help="where machines and disks lie meanwhile")
    parser.add_argument("--update-docs", action="store_true", help="keep the results, write the page")
    options = parser.parse_args(argv)
    try:
        rows = chain(options.row) if options.row else list(ROWS)
    except KeyError as error:
        parser.error(f"no such row: {error.args[0]}; there are: {'; '.join(row.name for row in ROWS)}")
    if missing := [package for program, package in PROGRAMS.items() if not shutil.which(program)]:
        parser.error(f"disks of the rows are made by these packages: apt-get install {' '.join(missing)}")
    failed = 0
    artefact = options.artefact or REPO_ROOT / "output" / options.image / "latest"
    with lab(artefact.resolve(), options.work) as made:
        if (image := made.image.told["image"]) != options.image:
            parser.error(f"{artefact} is a build of {image}, not of {options.image}")
        for row in rows:
            outcome = run_row(made, row)
            failed += bool(outcome.wrong)
            _tell(outcome)
            if options.update_docs:
                _keep(options.image, outcome)
    return 1 if failed else 0


def _tell(outcome: Outcome) -> None:
    verdict = "FAILED" if outcome.wrong else "passed"
    sys.stdout.write(f"{verdict}  {outcome.seconds:7.1f} s  {outcome.name}\n")
    sys.stdout.writelines(f"          {line}\n" for line in outcome.wrong)
    sys.stdout.write(f"          {json.dumps(outcome.facts)}\n")
    sys.stdout.flush()


def _keep(image: str, outcome: Outcome) -> None:
    found = json.loads(RECORD.read_bytes())
    found["machine"] = machine()
    kept = {key: value for key, value in asdict(outcome).items() if key != "name"}
    rows = found["images"].setdefault(image, {})
    rows[outcome.name] = {**kept, "code": provenance.digest(provenance.LOCAL_DISK)}
    RECORD.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    page.PAGE.write_text(page.text(found), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
