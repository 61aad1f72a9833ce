"""pytest's runs, two at a time: the unit tests in two halves, then what boots machines beside all else.

An emulated machine computes with one processor and waits much, and what the other tests look at is not its: both share
the store alone, which has locks, and its temporary files are below a directory of its own. Within a run pytest puts its
tests in the order of the parts and stops at the end of a part in which something failed (``tests/conftest.py``).
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from image_builder.settings import REPO_ROOT
from image_builder.system import process
from tests.selftest.surroundings import ANY, environment

UNIT = "not root and not boot and not gpu"
ROOT = "root and not boot and not gpu"
BOOT = "boot and not gpu"
# What takes too long to be run on every commit.
NOT_NIGHTLY = " and not nightly"
# Of the unit tests, those that take as long as the others.
_HALF = ("tests/unit/node", "tests/unit/pool")
_CLOSING = re.compile(r"^(=+ )?(.*\d (passed|failed|error|skipped|deselected)|no tests ran).* in [\d.:]+")
# pytest's order; without what a lane deselects, which is another lane's, or needs a GPU.
_WORDS = ("failed", "passed", "skipped", "xfailed", "xpassed", "warnings", "errors")
_SINGULAR = {"warning": "warnings", "error": "errors"}
_WIDTH = 80
# A run's name, its marks, more arguments.
_Share = tuple[str, str, Sequence[str]]


@dataclass(frozen=True)
class Surroundings:
    """The store of the tests, what outlives them, and where lines go."""

    store: Path
    cache: Path
    write: Callable[[str], None]


@dataclass(frozen=True)
class Lane:
    """A run of pytest that ended: its status, the seconds of each part, its closing line ("" without one)."""

    status: int
    parts: Mapping[str, float]
    closing: str


def chosen(arguments: Sequence[str], surroundings: Surroundings, *, fast: bool) -> Lane:
    """Run what ``arguments`` say, in one lane; ``fast`` leaves out what needs root."""
    with _folder(surroundings) as folder:
        return _foreground(_Pytest(folder / "chosen", UNIT if fast else "not gpu", arguments), surroundings)


def unit(surroundings: Surroundings) -> list[Lane]:
    """Run the unit tests."""
    return _side_by_side(
        ("unit", UNIT, [f"--ignore={path}" for path in _HALF]), ("other-half", UNIT, _HALF), surroundings
    )


def rest(surroundings: Surroundings, *, nightly: bool = False) -> list[Lane]:
    """Run the other tests, but not those that need a GPU; ``nightly`` takes those along that are for the night."""
    left_out = "" if nightly else NOT_NIGHTLY
    return _side_by_side(("root", ROOT + left_out, ()), ("boot", BOOT + left_out, ()), surroundings)


def closing_line(lanes: Sequence[Lane], seconds: float) -> str:
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

    def __init__(self, directory: Path, marks: str, arguments: Sequence[str] = ()) -> None:
        directory.mkdir()
        self.log = directory / "log"
        self.temporary = directory / "tmp"
        self._report = directory / "parts.json"
        self._words = (f"--parts={self._report}", "-m", marks)
        self._arguments = tuple(arguments)

    def argv(self, cache: Path) -> list[str]:
        """Return the command. Lines are coloured where a person reads them."""
        colour = "yes" if sys.stdout.isatty() and "NO_COLOR" not in os.environ else "no"
        # Of each of two runs the files of failed tests stay.
        kept = ["-o", f"cache_dir={cache / 'pytest'}", "-o", "tmp_path_retention_count=2"]
        options = [f"--color={colour}", *kept, *self._words]
        return [sys.executable, "-m", "pytest", *options, *self._arguments]

    def lines(self) -> list[str]:
        """Return what it has said into its log."""
        return (
            self.log.read_text(encoding="utf-8", errors="replace").splitlines() if self.log.exists() else []
        )

    def lane(self, status: int, reader: _Reader) -> Lane:
        """Return what became of the run."""
        parts = json.loads(self._report.read_text()) if self._report.exists() else {}
        return Lane(status, parts, reader.closing)


@contextmanager
def _folder(surroundings: Surroundings) -> Iterator[Path]:
    """Yield a directory for all runs, beside what tests leave when they fail."""
    place = environment(surroundings.cache)["TMPDIR"]
    with tempfile.TemporaryDirectory(prefix="image-builder-test-", dir=place) as folder:
        yield Path(folder)


def _side_by_side(shown: _Share, held: _Share, surroundings: Surroundings) -> list[Lane]:
    """Run pytest twice at once; what the second one says follows when the first one has ended."""
    with _folder(surroundings) as folder:
        beside, reader = _Pytest(folder / held[0], *held[1:]), _Reader(surroundings.write)
        try:
            with _background(beside, surroundings) as wait:
                first = _foreground(_Pytest(folder / shown[0], *shown[1:]), surroundings)
                surroundings.write(f"\n{shown[0]} is through; beside it, {held[0]}:\n")
                status = wait()
        finally:
            # Also of a run that was interrupted: it may be why.
            for line in beside.lines():
                reader.read(line)
        return [first, beside.lane(status, reader)]


def _environment(surroundings: Surroundings) -> dict[str, str]:
    return {**environment(surroundings.cache), "IMAGE_BUILDER_STORE": os.fspath(surroundings.store)}


def _foreground(run: _Pytest, surroundings: Surroundings) -> Lane:
    """Run pytest to its end; its lines are passed on as they come."""
    reader = _Reader(surroundings.write)
    done = process.run(
        run.argv(surroundings.cache),
        cwd=REPO_ROOT,
        env=_environment(surroundings),
        ok=ANY,
        on_line=reader.read,
    )
    return run.lane(done.returncode, reader)


@contextmanager
def _background(run: _Pytest, surroundings: Surroundings) -> Iterator[Callable[[], int]]:
    """Run pytest beside the caller, its lines in ``run.log``; yields what waits for its exit status.

    Temporary files are made in the run's directory: tests of what a killed build leaves look at the ordinary one.
    pytest's own directory, which a failed test's files stay in, is where it always is.
    """
    run.temporary.mkdir()
    env = _environment(surroundings)
    env |= {"TMPDIR": os.fspath(run.temporary), "PYTEST_DEBUG_TEMPROOT": env["TMPDIR"]}
    argv = run.argv(surroundings.cache / "beside")
    with process.background(
        argv, cwd=REPO_ROOT, log=run.log, env=env, stop_seconds=60, with_all=True
    ) as child:
        yield child.wait


def _plain(line: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", line)
