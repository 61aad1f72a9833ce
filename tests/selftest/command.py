"""This project's own checks, fast ones first: lint and types, the unit tests, then everything that needs root.

This package starts them all and prints a single closing line. Times are printed, and never judged.
"""

from __future__ import annotations

import difflib
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from image_builder.bake.lock.fetch import PROGRAMS
from image_builder.errors import UsageError
from image_builder.settings import REPO_ROOT
from image_builder.system.trees import remove_tree
from tests.selftest import counts, lint, runs
from tests.selftest.surroundings import cache_directory
from tests.support.images import programs
from tests.support.pages import proofs

_WORDS = ("failed", "passed", "skipped", "errors", "not run")
_SLOWEST = 15
# Today's programs, where nothing else is said.
_BESIDE = REPO_ROOT.parent / "shared/programs"


def run(arguments: Sequence[str], *, fast: bool, slow: bool, store: Path, as_json: bool) -> int:
    """Run the checks and return the exit status: 0 when all passed.

    With ``arguments`` (for pytest) only pytest runs, once. ``fast`` omits the tests that need root; ``slow`` runs only
    those that take too long for every commit. Progress goes to standard output, or to standard error if ``as_json``
    reserves standard output for the result.
    """
    if slow and arguments:
        raise UsageError("--slow takes no arguments for pytest", hint="pytest's own: -m slow")
    if not fast and os.geteuid() != 0:
        raise UsageError("the whole suite needs root", hint="image-builder test --fast needs none")
    if PROGRAMS not in os.environ and _BESIDE.is_dir():
        os.environ[PROGRAMS] = os.fspath(_BESIDE)
    write = partial(print, file=sys.stderr if as_json else sys.stdout, flush=True)
    kind = "chosen" if arguments else "fast" if fast else "slow" if slow else "all"
    place = runs.Surroundings(store, cache_directory(), _reports(kind), _seed(), write)
    write(f"seed: IMAGE_BUILDER_KILL_SEED={place.seed}")
    started = time.monotonic()
    if arguments:
        done, clean = [runs.chosen(arguments, place, fast=fast)], True
    elif slow:
        done, clean = [_slow(place)], True
    else:
        done, clean = _all(place, fast=fast)
    seconds = time.monotonic() - started
    left_out = _left_out(done)
    passed = clean and not any(each.status for each in done) and not (left_out and _must_be_complete())
    for line in (*([] if arguments else _slowest(done)), *_flaky(done), *left_out):
        write(line)
    if kind == "all" and passed and not left_out and not any(each.flaky for each in done):
        passed = _has_no_more(done, place.reports / counts.GOLDEN.name, write)
    write(f"logs and JUnit files: {place.reports}")
    if not clean:
        write("lint failed: see above")
    closing = closing_line(done, seconds)
    write(closing)
    if as_json:
        print(json.dumps({"passed": passed, "minutes": round(seconds / 60, 2), "closing": closing}))
    return 0 if passed else 1


def _all(place: runs.Surroundings, *, fast: bool) -> tuple[list[runs.Run], bool]:
    """Run lint beside the unit tests, then what needs root; return the runs, and whether lint found nothing."""
    started = time.monotonic()
    with lint.beside(place.cache, place.write) as is_clean:
        units = runs.unit(place)
        clean = is_clean()
    place.write(f"lint and unit tests: {(time.monotonic() - started) / 60:.1f} minutes")
    if fast:
        return [units], clean
    if units.status or not clean:
        place.write("what needs root is not run")
        return [units], clean
    return [units, runs.rest(place, slow=False, failed_before=len(units.flaky))], clean


def _slow(place: runs.Surroundings) -> runs.Run:
    """Run the slow tests; if they pass, write their files to the page of proofs."""
    began = proofs.stamp()
    run = runs.rest(place, slow=True)
    if not run.status:
        proofs.write_slow(run.result.seconds, began)
    return run


def closing_line(done: Sequence[runs.Run], seconds: float) -> str:
    """Return one closing line for all runs, in pytest's format; a run that broke off is named with its status."""
    counts: Counter[str] = Counter()
    for run in done:
        counts += run.result.outcomes
    flaky = sum(len(run.flaky) for run in done)
    broken = [f"pytest ended with {run.status}" for run in done if run.status not in (0, 1)]
    words = [f"{counts[word]} {word}" for word in _WORDS if counts[word]]
    words += [f"{flaky} flaky {'file' if flaky == 1 else 'files'}"] if flaky else []
    minutes, over = divmod(round(seconds), 60)
    told = ", ".join([*words, *broken]) or "no tests ran"
    return f" {told} in {seconds:.2f}s ({minutes // 60}:{minutes % 60:02}:{over:02}) ".center(80, "=")


def _seed() -> int:
    return int(os.environ.get("IMAGE_BUILDER_KILL_SEED") or random.randrange(1 << 32))


def _reports(kind: str) -> Path:
    """Return a directory for the logs and JUnit files of a run; those of older runs of its kind go, but for four."""
    place = cache_directory() / "runs" / kind
    place.mkdir(parents=True, exist_ok=True)
    for old in sorted(place.iterdir())[:-4]:
        remove_tree(old)
    return Path(tempfile.mkdtemp(prefix=f"{datetime.now(UTC):%Y-%m-%d-%H%M%S}-", dir=place))


def _slowest(done: Sequence[runs.Run]) -> Iterator[str]:
    seconds = {file: spent for run in done for file, spent in run.result.seconds.items()}
    yield f"the {_SLOWEST} slowest files, of {sum(seconds.values()) / 60:.1f} minutes in all processes:"
    for file in sorted(seconds, key=lambda file: -seconds[file])[:_SLOWEST]:
        yield f"{seconds[file]:8.1f}  {file}"


def _flaky(done: Sequence[runs.Run]) -> Iterator[str]:
    for run in done:
        for file in run.flaky:
            again = run.log.with_name(f"{runs.name_again(file)}.log")
            yield f"flaky: {file} failed beside others and passed alone: {run.log}, {again}"


def _left_out(done: Sequence[runs.Run]) -> list[str]:
    """Say how many tests were left out for want of a program; that is an error where it is at hand."""
    prefix = "error: left out" if _must_be_complete() else "left out"
    skipped: Counter[str] = Counter()
    for run in done:
        skipped += run.result.skipped
    return [
        f"{prefix}: {number} tests, since {reason}"
        for reason, number in sorted(skipped.items())
        if reason.startswith((programs.ABSENT, "no Chromium", "no npm"))
    ]


def _has_no_more(done: Sequence[runs.Run], file: Path, write: Callable[[str], None]) -> bool:
    """Return whether the tests of a complete run started no more than the golden file says; write what differs."""
    now = counts.lines({key: n for run in done for key, n in run.result.started.items()})
    file.write_text("".join(f"{line}\n" for line in now), encoding="utf-8")
    golden = counts.GOLDEN.read_text(encoding="utf-8").splitlines()
    for line in (line for line in difflib.ndiff(golden, now) if line[0] in "+-"):
        write(line)
    if now != golden:
        write(f"the tests start something else than before; if that is wanted: cp {file} {counts.GOLDEN}")
    return counts.numbers(now) <= counts.numbers(golden)


def _must_be_complete() -> bool:
    """Return whether today's programs are at hand, so that a run without them would prove less than it says."""
    return bool(os.environ.get(PROGRAMS))
