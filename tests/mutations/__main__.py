"""Apply each recorded defect to a copy of the checkout and run its tests: ``python -m tests.mutations [AREA ...]``.

``--root`` applies only those whose tests need root, ``--json`` prints one object. Exits with 1 if a mutant isn't
killed, and with 2 if the tests fail without one. Without IMAGE_BUILDER_PROGRAMS some tests are skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue

from image_builder.settings import REPO_ROOT
from tests.mutations import Mutant, fate, find_tests, has_moved, left, load, locate

# The timeout for a mutant's tests: one that exceeds it is reported as hung, which isn't a verdict. The slowest that
# needs nothing took 11 s on two cores (2026-11-24); some that need root run bakes, and their time isn't on record.
SECONDS = 600.0
_TAIL_LINES = 20
_groups: set[int] = set()


@contextmanager
def copies(number: int) -> Iterator[list[Path]]:
    """Yield copies of the files in the checkout that git tracks or would add; they are removed after the block."""
    argv = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(argv, cwd=REPO_ROOT, capture_output=True, check=True).stdout
    names = [name for name in listed.decode().split("\0") if name and (REPO_ROOT / name).is_file()]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        made = [Path(folder, str(n)) for n in range(number)]
        for copy in made:
            for name in names:
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(REPO_ROOT / name, copy / name)
            # Without one, the command would begin by creating it.
            (copy / ".venv").symlink_to(sys.prefix)
        yield made


def mutant_status(mutant: Mutant, copy: Path) -> int | None:
    """Return pytest's status for the mutant's tests in a copy of the checkout, which is restored afterwards."""
    place = locate(mutant, copy)
    text = place.read_text(encoding="utf-8")
    place.write_text(text.replace(mutant.find, mutant.replace), encoding="utf-8")
    try:
        return pytest_status(find_tests(mutant, copy), mutant.marker, copy, SECONDS)
    finally:
        place.write_text(text, encoding="utf-8")


def pytest_status(tests: Sequence[str], marker: str, copy: Path, seconds: float) -> int | None:
    """Return pytest's status, None if it had to be ended; its output is in the copy's log."""
    argv = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=7"]
    argv += ["-m", marker] if marker else []
    # A file with the same size and the same mtime in seconds would be taken from the cache.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(copy)}
    return status_within(seconds, [*argv, *tests], copy, environment, log_of(copy))


def log_of(copy: Path) -> Path:
    return copy.with_suffix(".log")


def status_within(
    seconds: float, argv: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path
) -> int | None:
    """Run a program and return its status, None if it took too long: then its whole process group is killed."""
    with log.open("wb") as output:
        child = subprocess.Popen(
            argv,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        _groups.add(child.pid)
        try:
            return child.wait(seconds)
        except subprocess.TimeoutExpired:
            _kill(child.pid)
            child.wait()
            return None
        finally:
            _groups.discard(child.pid)


def _kill(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def run(mutants: Sequence[Mutant], places: Sequence[Path]) -> dict[str, str]:
    """Return the fate of each mutant; as many run at once as there are copies of the checkout."""
    fates: dict[str, str] = {}
    free: SimpleQueue[Path] = SimpleQueue()
    for place in places:
        free.put(place)

    def judge(mutant: Mutant) -> tuple[Mutant, str, float]:
        copy, began = free.get(), time.monotonic()
        try:
            return mutant, fate(mutant_status(mutant, copy)), time.monotonic() - began
        finally:
            free.put(copy)

    with ThreadPoolExecutor(len(places)) as pool:
        try:
            for mutant, what, seconds in pool.map(judge, mutants):
                fates[mutant.name] = what
                print(f"{what:9} {seconds:4.0f} s  {mutant.name}", file=sys.stderr, flush=True)
        except BaseException:  # Ctrl-C doesn't reach the tests, which have sessions of their own
            for group in list(_groups):
                _kill(group)
            raise
    return fates


def is_sound(mutants: Sequence[Mutant], copy: Path) -> bool:
    """Return whether the tests pass in a copy without any mutant: otherwise a failure proves nothing."""
    for marker in sorted({mutant.marker for mutant in mutants}):
        tests = sorted({test for m in mutants if m.marker == marker for test in find_tests(m, copy)})
        status = pytest_status(tests, marker, copy, SECONDS * len(tests))
        if status != 0:
            how = "take too long" if status is None else "fail"
            said = log_of(copy).read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
            print(f"the tests {how} without a mutant: {' '.join(tests)}", *said, sep="\n", file=sys.stderr)
            return False
    return True


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("areas", nargs="*", metavar="AREA")
    parser.add_argument("--root", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args(argv)
    chosen = [m for m in load() if m.area in (arguments.areas or [m.area])]
    selected = [m for m in chosen if bool(m.marker) == arguments.root]
    if not selected:
        parser.error("no such area")
    mutants = [m for m in selected if not has_moved(m)]
    moved = [m.name for m in selected if m not in mutants]
    # Two tests that need root may compete for the same part of the machine.
    with copies(1 if arguments.root else arguments.jobs) as places:
        if not is_sound(mutants, places[0]):
            return 2
        fates = run(mutants, places)
    alive = left(fates)
    killed = len(fates) - len(alive)
    skipped = len(chosen) - len(mutants)
    if arguments.json:
        result = {"killed": killed, "total": len(mutants), "moved": moved, "not_run": skipped, "left": alive}
        print(json.dumps(result))
    else:
        others = "without" if arguments.root else "with"
        more = f", {skipped} more {others} --root" if skipped else ""
        print(f"{killed}/{len(mutants)} killed, {len(moved)} moved{more}")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
