"""The pytest runs: lanes that share a queue of test files, unit tests first, then the tests that need root.

Each lane takes the next file when it is free (``tests/selftest/file_queue.py`` has the rules). Lanes share only the
store, which has locks: every lane but the first keeps its temporary files in its own directory.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from image_builder.settings import REPO_ROOT
from image_builder.system import process
from tests.selftest import durations
from tests.selftest.file_queue import Lane, Queue
from tests.selftest.lane_plugin import SECONDS_FILE, argument
from tests.selftest.proofs import Proofs
from tests.selftest.surroundings import ANY, environment

UNIT = "not root and not boot and not gpu"
REST = "(root or boot) and not gpu"
# Excludes the tests that take too long for every commit.
NOT_NIGHTLY = " and not nightly"
# For two processors: two lanes that compute, and one for files that mostly wait, as long as there are any.
UNIT_LANES = (Lane(0), Lane(1))
REST_LANES = (Lane(0), Lane(1), Lane(2, light=True))
_CLOSING = re.compile(r"^(=+ )?(.*\d (passed|failed|error|skipped|deselected)|no tests ran).* in [\d.:]+")
# In pytest's order, without `deselected`: those tests belong to another lane, or need a GPU.
_WORDS = ("failed", "passed", "skipped", "xfailed", "xpassed", "warnings", "errors")
_SINGULAR = {"warning": "warnings", "error": "errors"}
_WIDTH = 80


@dataclass(frozen=True)
class Surroundings:
    """The tests' store, the cache directory that outlives them, the directory for JUnit files, and the output."""

    store: Path
    cache: Path
    reports: Path
    write: Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """A finished pytest run: its status, the seconds of each part, its closing line ("" if there was none)."""

    status: int
    parts: Mapping[str, float]
    closing: str


def chosen(arguments: Sequence[str], surroundings: Surroundings, *, fast: bool) -> Outcome:
    """Run the tests that ``arguments`` select, in one lane; ``fast`` omits those that need root."""
    with _folder(surroundings) as folder:
        run = _Pytest("chosen", folder, surroundings, UNIT if fast else "not gpu", arguments)
        return _foreground(run, surroundings)


def unit(surroundings: Surroundings) -> list[Outcome]:
    """Run the unit tests."""
    return _side_by_side("unit", UNIT, UNIT_LANES, surroundings)


def rest(surroundings: Surroundings, *, nightly: bool = False, proofs: Proofs | None = None) -> list[Outcome]:
    """Run the other tests, except those that need a GPU; ``nightly`` includes the nightly tests.

    Files that ``proofs`` contains don't run again; files that pass are added to it.
    """
    return _side_by_side("root", REST if nightly else REST + NOT_NIGHTLY, REST_LANES, surroundings, proofs)


def closing_line(lanes: Sequence[Outcome], seconds: float) -> str:
    """Return one closing line for all lanes, in pytest's format; it lists the lanes that ended without one."""
    if len(lanes) == 1 and lanes[0].closing:
        return lanes[0].closing
    counts: Counter[str] = Counter()
    for lane in lanes:
        for number, word in re.findall(r"(\d+) (\w+)", _plain(lane.closing).rpartition(" in ")[0]):
            counts[_SINGULAR.get(word, word)] += int(number)
    told = [f"{counts[word]} {word}" for word in _WORDS if counts[word]]
    silent = [str(lane.status) for lane in lanes if not lane.closing]
    if silent:
        return f"pytest ended without a closing line, status {', '.join(silent)}; besides {', '.join(told) or 'none'}"
    minutes, over = divmod(round(seconds), 60)
    line = f" {', '.join(told) or 'no tests ran'} in {seconds:.2f}s ({minutes // 60}:{minutes % 60:02}:{over:02}) "
    return line.center(_WIDTH, "=")


class _Reader:
    """Passes lines on, except the closing one."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self.closing = ""

    def read(self, line: str) -> None:
        """Pass a line on; hold back a possible closing line until the next line arrives."""
        if self.closing:
            self._write(self.closing)
            self.closing = ""
        if _CLOSING.match(_plain(line)):
            self.closing = line
        else:
            self._write(line)


class _Pytest:
    """One pytest run, with its own directory, which lasts until all runs have ended."""

    def __init__(
        self, name: str, folder: Path, surroundings: Surroundings, marks: str, arguments: Sequence[str] = ()
    ) -> None:
        self.name = name
        directory = folder / name
        directory.mkdir()
        self.log = directory / "log"
        self.temporary = directory / "tmp"
        self._report = directory / "parts.json"
        junit = surroundings.reports / f"{name}.xml"
        self._options = [f"--parts={self._report}", f"--junitxml={junit}", "-m", marks, *arguments]

    def argv(self, cache: Path) -> list[str]:
        """Return the command. The output is colored on a terminal."""
        colour = "yes" if sys.stdout.isatty() and "NO_COLOR" not in os.environ else "no"
        # Each run keeps the files of its failed tests; the older JUnit format includes a test's file name.
        settings = (f"cache_dir={cache / 'pytest'}", "tmp_path_retention_count=3", "junit_family=xunit1")
        options = [word for setting in settings for word in ("-o", setting)]
        return [sys.executable, "-m", "pytest", f"--color={colour}", *options, *self._options]

    def lines(self) -> list[str]:
        """Return the lines of its log."""
        return (
            self.log.read_text(encoding="utf-8", errors="replace").splitlines() if self.log.exists() else []
        )

    def outcome(self, status: int, reader: _Reader) -> Outcome:
        """Return how the run ended."""
        parts = json.loads(self._report.read_text()) if self._report.exists() else {}
        return Outcome(status, parts, reader.closing)


@contextmanager
def _folder(surroundings: Surroundings) -> Iterator[Path]:
    """Yield a directory for all runs, next to the files that failed tests leave."""
    place = environment(surroundings.cache)["TMPDIR"]
    with tempfile.TemporaryDirectory(prefix="image-builder-test-", dir=place) as folder:
        yield Path(folder)


def _side_by_side(
    name: str,
    marks: str,
    lanes: Sequence[Lane],
    surroundings: Surroundings,
    proofs: Proofs | None = None,
) -> list[Outcome]:
    """Run pytest in all lanes at once; show the first lane's output live, and the others' when they end."""
    with _folder(surroundings) as folder:
        (folder / SECONDS_FILE).write_text(json.dumps(durations.expected()), encoding="utf-8")
        if proofs:
            proofs.write(folder)
        shown, *others = [
            _Pytest(f"{name}-{lane.number}", folder, surroundings, marks, [argument(folder, lane)])
            for lane in lanes
        ]
        readers = [_Reader(surroundings.write) for _ in others]
        try:
            with ExitStack() as stack:
                waits = [stack.enter_context(_background(run, surroundings)) for run in others]
                first = _foreground(shown, surroundings)
                Queue(folder).end_first_lane()
                statuses = [wait() for wait in waits]
        finally:
            # Even after an interrupt: a failure may be its reason.
            for run, reader in zip(others, readers, strict=True):
                surroundings.write(f"\n{shown.name} is through; beside it, {run.name}:\n")
                for line in run.lines():
                    reader.read(line)
        ended = zip(others, statuses, readers, strict=True)
        return [first, *(run.outcome(status, reader) for run, status, reader in ended)]


def _environment(surroundings: Surroundings) -> dict[str, str]:
    return {**environment(surroundings.cache), "IMAGE_BUILDER_STORE": os.fspath(surroundings.store)}


def _foreground(run: _Pytest, surroundings: Surroundings) -> Outcome:
    """Run pytest to its end and pass its lines on as they come."""
    reader = _Reader(surroundings.write)
    done = process.run(
        run.argv(surroundings.cache),
        cwd=REPO_ROOT,
        env=_environment(surroundings),
        ok=ANY,
        on_line=reader.read,
    )
    return run.outcome(done.returncode, reader)


@contextmanager
def _background(run: _Pytest, surroundings: Surroundings) -> Iterator[Callable[[], int]]:
    """Run pytest in the background, its output in ``run.log``; yields a function that waits for its exit status.

    Temporary files are created in the run's directory, because tests that look for leftovers of killed builds inspect
    the usual one. pytest's own directory, which keeps the files of failed tests, stays in its usual place.
    """
    run.temporary.mkdir()
    env = _environment(surroundings)
    env |= {"TMPDIR": os.fspath(run.temporary), "PYTEST_DEBUG_TEMPROOT": env["TMPDIR"]}
    argv = run.argv(surroundings.cache / "beside" / run.name)
    with process.background(
        argv, cwd=REPO_ROOT, log=run.log, env=env, stop_seconds=60, with_all=True
    ) as child:
        yield child.wait


def _plain(line: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", line)
