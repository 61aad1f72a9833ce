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
import random
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

REPO = Path(__file__).resolve().parents[2]
WINGS = (
    "bake definition drain gallery cluster cluster/gate pool pool/run verify machine lab system cli".split()
)
WINGS += [f"node/{part}" for part in "disk seed promote gpu health join preflight preload net".split()]
_DELETED = (ast.Expr, ast.Raise, ast.Assign, ast.AugAssign, ast.Continue, ast.Break, ast.Delete)
_SWAPPED: dict[type[ast.cmpop | ast.boolop], tuple[str, str, str]] = {
    **{ast.Lt: ("boundary", "<", "<="), ast.LtE: ("boundary", "<=", "<")},
    **{ast.Gt: ("boundary", ">", ">="), ast.GtE: ("boundary", ">=", ">")},
    **{ast.Eq: ("flip", "==", "!="), ast.NotEq: ("flip", "!=", "=="), ast.In: ("flip", "in", "not in")},
    **{
        ast.NotIn: ("flip", r"not\s+in", "in"),
        ast.Is: ("flip", "is", "is not"),
        ast.IsNot: ("flip", r"is\s+not", "is"),
    },
    **{ast.And: ("and/or", "and", "or"), ast.Or: ("and/or", "or", "and")},
}
# The marks of the tests, and the seconds after which one hangs, which its mutant did.
_UNIT, _ROOT = ("not root and not boot and not gpu", 120), ("root and not boot and not gpu", 1200)


class Mutant(NamedTuple):
    """A text in place of the bytes of a file from ``start`` to ``end``."""

    path: str
    line: int
    kind: str
    start: int
    end: int
    text: str

    @property
    def name(self) -> str:
        old = (REPO / self.path).read_bytes()[self.start : self.end].decode()
        return f"{self.path}:{self.line}  {self.kind}: {' '.join(old.split())[:70]} -> {self.text}"


def mutants(path: str) -> Iterator[Mutant]:
    """Yield all mutants of a file."""
    source = (REPO / path).read_bytes()
    lines = [0, *(line.end() for line in re.finditer(b"\n", source))]
    nodes = list(ast.walk(ast.parse(source)))
    in_functions = {
        id(part) for node in nodes if isinstance(node, ast.FunctionDef) for part in ast.walk(node)
    }
    # Python 3.11 doesn't know where these are.
    in_texts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}

    def span(node: Any) -> tuple[int, int]:
        return lines[node.lineno - 1] + node.col_offset, lines[node.end_lineno - 1] + node.end_col_offset

    def mutant(start: int, end: int, kind: str, old: str, new: str) -> Mutant:
        text = re.sub(f"(?s){old}", new, source[start:end].decode(), count=1)
        return Mutant(path, source.count(b"\n", 0, start) + 1, kind, start, end, text)

    for node in (node for node in nodes if id(node) not in in_texts):
        match node:
            case ast.Compare():
                for (left, right), operator in zip(
                    pairwise([node.left, *node.comparators]), node.ops, strict=True
                ):
                    yield mutant(span(left)[1], span(right)[0], *_SWAPPED[type(operator)])
            case ast.BoolOp():
                for left, right in pairwise(node.values):
                    yield mutant(span(left)[1], span(right)[0], *_SWAPPED[type(node.op)])
            case ast.UnaryOp(op=ast.Not()):
                yield mutant(*span(node), "not", "not ", "")
            case ast.Constant(value=int(value)) if not isinstance(value, bool):
                yield mutant(*span(node), "constant", ".+", str(value + 1))
            case ast.Return(value=ast.Constant(value=bool(value))):
                yield mutant(*span(node), "return", ".+", f"return {not value}")
            case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
                yield mutant(*span(node), "return", ".+", "return None")
            case ast.stmt() if isinstance(node, _DELETED) and id(node) in in_functions:
                if not isinstance(getattr(node, "value", 0), ast.Constant) or isinstance(
                    node, ast.Assign
                ):  # no docstring
                    yield mutant(*span(node), "deletion", ".+", "pass")


def draw(wing: str, number: int, seed: str) -> list[Mutant]:
    """Return mutants of a wing: kinds with equal chances, then places."""
    kinds: dict[str, list[Mutant]] = defaultdict(list)
    for file in sorted((REPO / "image_builder" / wing).rglob("*.py")):
        for mutant in mutants(str(file.relative_to(REPO))):
            kinds[mutant.kind].append(mutant)
    chance = random.Random(f"{seed} {wing}")
    turns = (chance.choice([kind for kind in sorted(kinds) if kinds[kind]]) for _ in range(number))
    return [kinds[kind].pop(chance.randrange(len(kinds[kind]))) for kind in turns]


@cache
def importers() -> dict[str, set[str]]:
    """Return by each file of ``image_builder`` and ``tests`` those that import it."""
    files = [
        file.relative_to(REPO) for top in ("image_builder", "tests") for file in (REPO / top).rglob("*.py")
    ]
    modules = {".".join(file.with_suffix("").parts).removesuffix(".__init__"): str(file) for file in files}
    found: dict[str, set[str]] = defaultdict(set)
    for file in files:
        for node in ast.walk(ast.parse((REPO / file).read_bytes())):
            package = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            for name in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
                found[modules.get(f"{package}.{name.name}".strip(".")) or modules.get(package, "")].add(
                    str(file)
                )
    return found


def tests_of(path: str, folders: str, imports: int) -> list[str]:
    """Return the files of tests that are at most so many imports away from a file, the nearest first."""
    ring, found = {path}, [path]
    for _ in range(imports):
        ring = {other for file in ring for other in importers()[file]} - set(found)
        found += sorted(ring)
    return [file for file in found if re.match(f"tests/({folders})/(.+/)?test_", file)]


def noticed(place: Path, tests: Sequence[str], marks: str, seconds: int) -> str:
    """Return the first test that fails in a copy, or how pytest ended; nothing if all pass."""
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "--hypothesis-seed=7",
        "-m",
        marks,
    ]
    argv += ["-o", f"faulthandler_timeout={seconds}", "-o", "faulthandler_exit_on_timeout=true", *tests]
    environment = {**os.environ, "PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(argv, cwd=place, env=environment, capture_output=True, text=True) if tests else None
    if done is None or done.returncode in (0, 5):
        return ""
    first = re.search(r"^(?:FAILED|ERROR) ([^\s\[]+)", done.stdout, re.MULTILINE)
    return first[1] if first else f"status {done.returncode}"


def judge(mutant: Mutant, places: list[Path], roots: str) -> str:
    """Return what notices a mutant in one of the copies, which is restored afterwards; nothing if it survives."""
    source, place = (REPO / mutant.path).read_bytes(), places.pop()
    try:
        (place / mutant.path).write_bytes(
            source[: mutant.start] + mutant.text.encode() + source[mutant.end :]
        )
        units = tests_of(mutant.path, f"unit/{mutant.path.split('/')[1]}", 3)
        return noticed(place, units, *_UNIT) or noticed(place, tests_of(mutant.path, roots, 2), *_ROOT)
    finally:
        (place / mutant.path).write_bytes(source)
        places.append(place)


def main() -> int:
    """Mutate, and print each wing's share of killed mutants and its survivors."""

    def git(*argv: str) -> str:
        return subprocess.run(["git", *argv], cwd=REPO, capture_output=True, check=True, text=True).stdout

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wings", nargs="*", metavar="WING", default=WINGS)
    parser.add_argument("--seed", default=git("rev-parse", "HEAD").strip())
    for name, number in (("--number", 20), ("--jobs", 1)):
        parser.add_argument(name, type=int, default=number)
    for name in ("--root", "--json"):
        parser.add_argument(name, action="store_true")
    options = parser.parse_args()
    wings: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as top, ThreadPoolExecutor(options.jobs) as threads:
        places = [Path(top, str(number)) for number in range(options.jobs)]
        for place in places:
            place.mkdir()
            subprocess.run(
                ["cp", "-P", "--parents", "-t", place, *git("ls-files").split()], cwd=REPO, check=True
            )
            (place / ".venv").symlink_to(sys.prefix)
        for wing in options.wings:
            drawn = draw(wing, options.number, options.seed)
            roots = "bake|disk|gpu|pools|preload" if options.root else "-"
            verdicts = list(threads.map(lambda mutant: judge(mutant, places, roots), drawn))  # noqa: B023
            alive = [m.name for m, verdict in zip(drawn, verdicts, strict=True) if not verdict]
            wings[wing] = {"killed": len(drawn) - len(alive), "total": len(drawn), "survivors": alive}
            print(
                f"{wing:16} {len(drawn) - len(alive)}/{len(drawn)}",
                *alive,
                sep="\n  ",
                file=sys.stderr,
                flush=True,
            )
            killers = sorted({verdict for verdict in verdicts if verdict.startswith("tests/")})
            units = [killer for killer in killers if killer.startswith("tests/unit/")]
            if wrong := noticed(places[0], units, *_UNIT) or noticed(
                places[0], [k for k in killers if k not in units], *_ROOT
            ):
                print(f"{wrong} fails without a mutant, too", file=sys.stderr)
                return 2
    print(json.dumps({"seed": options.seed, "wings": wings}) if options.json else f"seed {options.seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
