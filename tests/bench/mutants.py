"""Random mutations of the program, and how many of them its tests notice: a survivor wants a test, or is equivalent.

    .venv/bin/python tests/bench/mutants.py [WING ...] [--number 20] [--seed TEXT] [--root] [--jobs 1] [--json]

A wing is a folder of image_builder. Kinds, with equal chances, and places are drawn by the seed, the commit's hash. A
mutant, in a copy of the checkout, meets the unit tests of its folder, nearest imports first; with ``--root`` survivors
meet the root tests that import the module. The status is 2 if what noticed a mutant fails without one, too, else 0.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from tests.bench.mutating import Mutant, draw  # noqa: E402

PACKAGES = sorted([*REPO.glob("image_builder/*/__init__.py"), *REPO.glob("image_builder/node/*/__init__.py")])
WINGS = [str(file.parent.relative_to(REPO / "image_builder")) for file in PACKAGES]
WINGS.remove("node")
_GIT = (("rev-parse", "HEAD"), ("ls-files",))
# The marks of tests, and the seconds after which one hangs, which its mutant did.
_UNIT, _ROOT = ("not root and not boot and not gpu", 120), ("(root or boot) and not gpu and not slow", 1200)


@cache
def importers() -> dict[str, set[str]]:
    """Return by each file of ``image_builder`` and ``tests`` those that import it."""
    tops = (REPO / "image_builder", REPO / "tests")
    files = [str(file.relative_to(REPO)) for top in tops for file in top.rglob("*.py")]
    modules = {file.removesuffix(".py").removesuffix("/__init__").replace("/", "."): file for file in files}
    found: dict[str, set[str]] = defaultdict(set)
    for file in files:
        for node in ast.walk(ast.parse((REPO / file).read_bytes())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                parent = f"{node.module}" if isinstance(node, ast.ImportFrom) else ""
                names = [f"{parent}.{name.name}".removeprefix(".") for name in node.names]
                for module in (modules.get(name) or modules.get(parent, "") for name in names):
                    found[module].add(file)
    return found


def tests_of(path: str, folders: str, imports: int) -> list[str]:
    """Return the files of tests that are at most so many imports away from a file, the nearest first."""
    ring, found = {path}, [path]
    for _ in range(imports):
        ring = {other for file in ring for other in importers()[file]} - set(found)
        found += sorted(ring)
    return [file for file in found if re.match(f"tests/({folders})/(.+/)?test_", file)]


def noticed(place: Path, tests: list[str], marks: str, seconds: int) -> str:
    """Return the first test that fails in a copy, or how pytest ended; nothing if all pass."""
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-xq",
        "-p",
        "no:cacheprovider",
        "--hypothesis-seed=7",
        "-m",
        marks,
        *tests,
    ]
    argv += ["-o", f"faulthandler_timeout={seconds}", "-o", "faulthandler_exit_on_timeout=true"]
    environment = {**os.environ, "PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(argv, cwd=place, env=environment, capture_output=True, text=True) if tests else None
    first = re.search(r"^(?:FAILED|ERROR) ([^\s\[]+)", done.stdout if done else "", re.MULTILINE)
    return (
        ""
        if done is None or done.returncode in (0, 5)
        else first[1]
        if first
        else f"status {done.returncode}"
    )


def judge(mutant: Mutant, places: list[Path], roots: str) -> str:
    """Return what notices a mutant in one of the copies; nothing if it survives."""
    source, place = (REPO / mutant.path).read_bytes(), places.pop()
    (place / mutant.path).write_bytes(source[: mutant.start] + mutant.text.encode() + source[mutant.end :])
    units = tests_of(mutant.path, f"unit/{mutant.path.split('/')[1]}", 3)
    units += [file for file in tests_of(mutant.path, "unit", 1) if file not in units]
    verdict = noticed(place, units, *_UNIT) or noticed(place, tests_of(mutant.path, roots, 2), *_ROOT)
    (place / mutant.path).write_bytes(source)
    places.append(place)
    return verdict


def main() -> int:
    """Mutate, and print each wing's survivors and how many mutants were killed."""
    commit, files = (subprocess.check_output(["git", *argv], cwd=REPO, text=True).split() for argv in _GIT)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wings", nargs="*", metavar="WING", default=WINGS)
    parser.add_argument("--number", type=int, default=20)
    parser.add_argument("--seed", default=commit[0])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--root", action="store_true")
    parser.add_argument("--json", action="store_true")
    options, wings, wrong = parser.parse_args(), dict[str, Any](), ""
    roots = "bake|disk|gpu|pools|preload" if options.root else "none"
    with tempfile.TemporaryDirectory(prefix="mutants-") as top, ThreadPoolExecutor(options.jobs) as threads:
        for place in (places := [Path(top, str(number)) for number in range(options.jobs)]):
            place.mkdir()
            subprocess.run(["cp", "-P", "--parents", "-t", place, *files], cwd=REPO, check=True)
            (place / ".venv").symlink_to(sys.prefix)
        for wing in options.wings:
            drawn = draw(wing, options.number, options.seed)
            verdicts = list(threads.map(lambda mutant: judge(mutant, places, roots), drawn))
            left = [mutant.name for mutant, verdict in zip(drawn, verdicts, strict=True) if not verdict]
            wings[wing] = {"killed": len(drawn) - len(left), "total": len(drawn), "survivors": left}
            print(
                f"{wing} {len(drawn) - len(left)}/{len(drawn)}",
                *left,
                sep="\n  ",
                file=sys.stderr,
                flush=True,
            )
            for marks, units in ((_UNIT, True), (_ROOT, False)):
                killers = {
                    v for v in verdicts if v.startswith("tests/") and v.startswith("tests/unit/") is units
                }
                wrong = wrong or noticed(places[0], sorted(killers), *marks)
    print(json.dumps({"seed": options.seed, "wings": wings}) if options.json else f"seed {options.seed}")
    if wrong:
        print(f"{wrong} fails without a mutant, too", file=sys.stderr)
    return 2 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
