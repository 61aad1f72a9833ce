"""Make each recorded defect in a copy of the checkout and run its tests: ``python -m tests.mutations [AREA ...]``.

``--root`` makes those whose tests need root and no others, ``--json`` prints one object. Ends with 1 where a mutant
survives.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from image_builder.settings import REPO_ROOT
from tests.mutations import Mutant, load, locate

# Twice what the slowest of them took on two busy cores.
SECONDS = 600


def checkout(target: Path) -> Path:
    """Copy the files of the checkout that git knows or would add."""
    argv = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(argv, cwd=REPO_ROOT, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (source := REPO_ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)
    return target


def status(mutant: Mutant, copy: Path) -> int:
    """Return pytest's status for the mutant's tests in a copy of the checkout, which is as it was afterwards."""
    place = locate(mutant, copy)
    text = place.read_text(encoding="utf-8")
    place.write_text(text.replace(mutant.find, mutant.replace), encoding="utf-8")
    try:
        return pytest_status(mutant.tests, mutant.marker, copy)
    finally:
        place.write_text(text, encoding="utf-8")


def pytest_status(tests: Sequence[str], marker: str, copy: Path) -> int:
    argv = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=7"]
    argv += ["-m", marker] if marker else []
    # A file whose size and second of change are as they were would be taken from the cache.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(copy)}
    try:
        return subprocess.run(
            [*argv, *tests], cwd=copy, env=environment, capture_output=True, timeout=SECONDS
        ).returncode
    except subprocess.TimeoutExpired:
        return 1  # a program that doesn't end any more is noticed


def run(mutants: Sequence[Mutant], jobs: int) -> dict[str, str]:
    """Return what became of each mutant: killed, survived, or that its tests could not be run."""
    fates: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(jobs) as pool:
        # Tests look for programs beside the checkout, and are skipped where there are none.
        Path(folder, "shared").symlink_to(REPO_ROOT.parent / "shared")
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(jobs):
            copies.put(checkout(Path(folder, str(number))))

        def judge(mutant: Mutant) -> tuple[Mutant, str]:
            copy = copies.get()
            try:
                code = status(mutant, copy)
                return mutant, {0: "survived", 1: "killed"}.get(code, f"pytest ended with {code}")
            finally:
                copies.put(copy)

        for mutant, fate in pool.map(judge, mutants):
            fates[mutant.name] = fate
            print(f"{fate:9} {mutant.name}", file=sys.stderr, flush=True)
    return fates


def sound(mutants: Sequence[Mutant]) -> bool:
    """Tell whether the tests pass without any mutant: else a red one proves nothing."""
    for marker in sorted({mutant.marker for mutant in mutants}):
        tests = sorted({test for mutant in mutants if mutant.marker == marker for test in mutant.tests})
        if pytest_status(tests, marker, REPO_ROOT):
            print(f"the tests fail without a mutant: {' '.join(tests)}", file=sys.stderr)
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
    mutants = [m for m in chosen if bool(m.marker) == arguments.root]
    if not mutants:
        parser.error("no such area")
    if not sound(mutants):
        return 2
    # Two tests that need root may want the same of the machine.
    fates = run(mutants, 1 if arguments.root else arguments.jobs)
    killed = sum(fate == "killed" for fate in fates.values())
    left = {name: fate for name, fate in fates.items() if fate != "killed"}
    skipped = len(chosen) - len(mutants)
    if arguments.json:
        print(json.dumps({"killed": killed, "total": len(mutants), "not_run": skipped, "left": left}))
    else:
        others = "without" if arguments.root else "with"
        print(f"{killed}/{len(mutants)} killed" + (f", {skipped} more {others} --root" if skipped else ""))
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
