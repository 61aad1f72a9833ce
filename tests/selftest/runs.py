"""Runs of pytest: the unit tests, those that need root, the slow ones, and files that failed, once more."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from image_builder.errors import StoreError
from image_builder.settings import REPO_ROOT
from image_builder.system import process
from image_builder.system.trees import remove_tree
from tests.selftest.plugin import FAILED_FILES, Result
from tests.selftest.surroundings import ANY, environment
from tests.selftest.turns import DIRECTORY as TURNS

UNIT = "not root and not boot and not gpu"
REST = "(root or boot) and not gpu and not slow"
SLOW = "(root or boot) and not gpu and slow"
# For two processors: a third process has a use, since many tests of real programs wait for half of their time.
UNIT_PROCESSES, REST_PROCESSES = 2, 3
# Against hangs: a process begins no further test after so many seconds.
_LIMIT = 7200


@dataclass(frozen=True)
class Surroundings:
    """The tests' store, the cache directory, the directory of logs and JUnit files, the seed, and the output."""

    store: Path
    cache: Path
    reports: Path
    seed: int
    write: Callable[[str], None]


@dataclass(frozen=True)
class Run:
    """A finished run: its status, what it found, its log, and the files that failed first and passed alone."""

    status: int
    result: Result
    log: Path
    flaky: tuple[str, ...] = ()


def chosen(arguments: Sequence[str], place: Surroundings, *, fast: bool) -> Run:
    """Run the tests that ``arguments`` select, in one process; ``fast`` omits those that need root."""
    return _pytest("chosen", ["-m", UNIT if fast else "not gpu", *arguments], place)


def unit(place: Surroundings) -> Run:
    """Run the unit tests, and those that failed once more."""
    return _twice("unit", UNIT, UNIT_PROCESSES, ["tests/unit"], place)


def rest(place: Surroundings, *, slow: bool, failed_before: int = 0) -> Run:
    """Run the tests that need root, and those that failed once more; or the ``slow`` ones."""
    name, marks = ("slow", SLOW) if slow else ("root", REST)
    return _twice(name, marks, REST_PROCESSES, ["--ignore=tests/unit"], place, failed_before)


def _twice(
    name: str, marks: str, processes: int, options: Sequence[str], place: Surroundings, failed_before: int = 0
) -> Run:
    """Run tests in several processes, then up to three files that failed once more, each alone."""
    side_by_side = ["-n", str(processes), "--dist=loadgroup", "--no-loadscope-reorder"]
    run = _pytest(name, [*side_by_side, "-m", marks, *options], place)
    failed, outcomes = run.result.failed, run.result.outcomes
    is_whole = failed and not (run.result.refused or outcomes["not run"])
    if run.status != 1 or not is_whole or len(failed) + failed_before > FAILED_FILES:
        return run
    for file in failed:
        place.write(f"\n{file} failed: it runs once more, alone")
        again = _pytest(name_again(file), ["-m", marks, file], place)
        if again.status or again.result.skipped.keys() - run.result.skipped.keys():
            return run
    outcomes["passed"] += outcomes.pop("failed", 0)
    outcomes.pop("errors", None)
    return Run(0, run.result, run.log, tuple(failed))


def name_again(file: str) -> str:
    """Return the name of a file's second run."""
    return f"again-{file.removesuffix('.py').replace('/', '-')}"


def _pytest(name: str, options: Sequence[str], place: Surroundings) -> Run:
    """Run pytest to its end; its lines are passed on as they come, and kept."""
    # The output is colored on a terminal.
    colour = "yes" if sys.stdout.isatty() and "NO_COLOR" not in os.environ else "no"
    result, log = place.reports / f"{name}.json", place.reports / f"{name}.log"
    result.unlink(missing_ok=True)
    settings = (f"cache_dir={place.cache / 'pytest'}", "junit_family=xunit1", f"session_timeout={_LIMIT}")
    argv = [
        *(sys.executable, "-m", "pytest", f"--color={colour}", f"--result={result}"),
        f"--junitxml={place.reports / name}.xml",
        f"--hypothesis-seed={place.seed}",
        *(word for setting in settings for word in ("-o", setting)),
        *options,
    ]
    env = environment(place.cache) | {"IMAGE_BUILDER_STORE": os.fspath(place.store)}
    # A socket's path has 107 bytes at most, and some lie deep in a test's directory.
    temporary = _temporary(Path(env["TMPDIR"]))
    argv.append(f"--basetemp={temporary}")
    env |= {"IMAGE_BUILDER_KILL_SEED": str(place.seed), TURNS: os.fspath(place.reports)}
    with log.open("w", encoding="utf-8") as stream:

        def keep(line: str) -> None:
            stream.write(f"{line}\n")
            place.write(line)

        done = process.run(argv, cwd=REPO_ROOT, env=env, ok=ANY, on_line=keep)
    if done.returncode:
        place.write(f"files of the tests that failed: {temporary}")
    else:
        remove_tree(temporary)
    return Run(done.returncode, Result.read(result), log)


def _temporary(place: Path) -> Path:
    """Return a directory for a run of pytest; what earlier runs of processes that are gone left there is removed."""
    for old in place.glob("ib-[0-9]*-*"):
        if not Path("/proc", old.name.split("-")[1]).exists():
            with suppress(StoreError):  # something is mounted there
                remove_tree(old)
    return Path(tempfile.mkdtemp(prefix=f"ib-{os.getpid()}-", dir=place))
