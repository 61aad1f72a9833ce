"""pytest's runs: lanes that share a queue of test files, unit tests first, then what needs root.

Each lane takes the next file when it is free (``tests/selftest/file_queue.py`` has the rules). Lanes share the store,
which has locks, and nothing else: temporary files of each but the first are below a directory of its own.
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
# What takes too long to be run on every commit.
NOT_NIGHTLY = " and not nightly"
# Two processors: two lanes that compute, and one of what mostly waits, for as long as there is such.
UNIT_LANES = (Lane(0), Lane(1))
REST_LANES = (Lane(0), Lane(1), Lane(2, light=True))
_CLOSING = re.compile(r"^(=+ )?(.*\d (passed|failed|error|skipped|deselected)|no tests ran).* in [\d.:]+")
# pytest's order; without what a lane deselects, which is another lane's, or needs a GPU.
_WORDS = ("failed", "passed", "skipped", "xfailed", "xpassed", "warnings", "errors")
_SINGULAR = {"warning": "warnings", "error": "errors"}
_WIDTH = 80


@dataclass(frozen=True)
class Surroundings:
    """The store of the tests, what outlives them, the directory of their JUnit files, and where lines go."""

    store: Path
    cache: Path
    reports: Path
    write: Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """A run of pytest that ended: its status, the seconds of each part, its closing line ("" without one)."""

    status: int
    parts: Mapping[str, float]
    closing: str


def chosen(arguments: Sequence[str], surroundings: Surroundings, *, fast: bool) -> Outcome:
    """Run what ``arguments`` say, in one lane; ``fast`` leaves out what needs root."""
    with _folder(surroundings) as folder:
        run = _Pytest("chosen", folder, surroundings, UNIT if fast else "not gpu", arguments)
        return _foreground(run, surroundings)


def unit(surroundings: Surroundings) -> list[Outcome]:
    """Run the unit tests."""
    return _side_by_side("unit", UNIT, UNIT_LANES, surroundings)


def rest(surroundings: Surroundings, *, nightly: bool = False, proofs: Proofs | None = None) -> list[Outcome]:
    """Run the other tests, but not those that need a GPU; ``nightly`` takes those along that are for the night.

    What ``proofs`` have is not run again, and what passes is added to them.
    """
    return _side_by_side("root", REST if nightly else REST + NOT_NIGHTLY, REST_LANES, surroundings, proofs)


def closing_line(lanes: Sequence[Outcome], seconds: float) -> str:
    """Return one closing line, as pytest's own, for all lanes; it names those that ended without one."""
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
    """Passes lines on, but for the closing one."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self.closing = ""

    def read(self, line: str) -> None:
        """Pass a line on; one that may be the closing one is kept until the next comes."""
        if self.closing:
            self._write(self.closing)
            self.closing = ""
        if _CLOSING.match(_plain(line)):
            self.closing = line
        else:
            self._write(line)


class _Pytest:
    """One run of pytest, with a directory of its own that lasts as long as all runs."""

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
        """Return the command. Lines are coloured where a person reads them."""
        colour = "yes" if sys.stdout.isatty() and "NO_COLOR" not in os.environ else "no"
        # Of each of the runs the files of failed tests stay; the older form of JUnit names a test's file.
        settings = (f"cache_dir={cache / 'pytest'}", "tmp_path_retention_count=3", "junit_family=xunit1")
        options = [word for setting in settings for word in ("-o", setting)]
        return [sys.executable, "-m", "pytest", f"--color={colour}", *options, *self._options]

    def lines(self) -> list[str]:
        """Return what it has said into its log."""
        return (
            self.log.read_text(encoding="utf-8", errors="replace").splitlines() if self.log.exists() else []
        )

    def outcome(self, status: int, reader: _Reader) -> Outcome:
        """Return what became of the run."""
        parts = json.loads(self._report.read_text()) if self._report.exists() else {}
        return Outcome(status, parts, reader.closing)


@contextmanager
def _folder(surroundings: Surroundings) -> Iterator[Path]:
    """Yield a directory for all runs, beside what tests leave when they fail."""
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
    """Run pytest once for each lane, all at once; the first one's lines are shown, then each other's as it ends."""
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
            # Also of a run that was interrupted: it may be why.
            for run, reader in zip(others, readers, strict=True):
                surroundings.write(f"\n{shown.name} is through; beside it, {run.name}:\n")
                for line in run.lines():
                    reader.read(line)
        ended = zip(others, statuses, readers, strict=True)
        return [first, *(run.outcome(status, reader) for run, status, reader in ended)]


def _environment(surroundings: Surroundings) -> dict[str, str]:
    return {**environment(surroundings.cache), "IMAGE_BUILDER_STORE": os.fspath(surroundings.store)}


def _foreground(run: _Pytest, surroundings: Surroundings) -> Outcome:
    """Run pytest to its end; its lines are passed on as they come."""
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
    """Run pytest beside the caller, its lines in ``run.log``; yields what waits for its exit status.

    Temporary files are made in the run's directory: tests of what a killed build leaves look at the ordinary one.
    pytest's own directory, which a failed test's files stay in, is where it always is.
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
