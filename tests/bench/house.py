"""The codebase in figures: where modules are, which imports which, how much code there is, and how it reads.

    .venv/bin/python tests/bench/house.py [--json]

root_modules     modules at the root of image_builder, goal <= 8
layers           layers of the import contract between packages, goal <= 9
ignored_imports  imports that this contract ignores, goal 0; other contracts have their own lists
import_circles   groups of modules that import each other, goal 0; imports for type checking don't count
python_files     Python files of image_builder without the suite, goal <= 220
python_lines     their lines, goal <= 46,200: 40,000 and what trust added (from 45,989 to 52,189)
suite_lines      the lines of the suite, which is counted separately
vague_share      variables, fields and parameters whose name says how the value was obtained, goal <= 0.01
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import grimp

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from tests.support.vague_names import vague  # noqa: E402

PACKAGE = REPO / "image_builder"
GOALS: Mapping[str, float] = {
    "root_modules": 8,
    "layers": 9,
    "ignored_imports": 0,
    "import_circles": 0,
    "python_files": 220,
    "python_lines": 46_200,
    "vague_share": 0.01,
}


def circles(graph: grimp.ImportGraph) -> list[set[str]]:
    """Return the groups of modules that import each other, directly or not."""
    reached = {module: graph.find_upstream_modules(module) for module in graph.modules}
    groups: list[set[str]] = []
    for module in sorted(graph.modules):
        group = {other for other in reached[module] if module in reached[other]}
        if group and not any(module in known for known in groups):
            groups.append({module, *group})
    return groups


def lines(paths: Iterator[Path]) -> tuple[int, int]:
    """Return the number of files and of their lines."""
    counts = [len(path.read_text(encoding="utf-8").splitlines()) for path in paths]
    return len(counts), sum(counts)


def figures() -> dict[str, float]:
    """Return the figures by name."""
    contract = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    graph = grimp.build_graph("image_builder", exclude_type_checking_imports=True, cache_dir=None)
    suite = PACKAGE / "suite"
    files, count = lines(path for path in PACKAGE.rglob("*.py") if suite not in path.parents)
    names, total = vague(PACKAGE)
    return {
        "root_modules": len([path for path in PACKAGE.glob("*.py") if path.name != "__init__.py"]),
        "layers": len(contract["layers"]),
        "ignored_imports": len(contract.get("ignore_imports", ())),
        "import_circles": len(circles(graph)),
        "python_files": files,
        "python_lines": count,
        "suite_lines": lines(suite.rglob("*.py"))[1],
        "vague_share": round(names.total() / total, 5),
    }


def main() -> int:
    """Print the figures; return 1 if one misses its goal."""
    measured = figures()
    if "--json" in sys.argv[1:]:
        print(json.dumps(measured))
    else:
        for name, value in measured.items():
            goal = GOALS.get(name)
            verdict = "" if goal is None else f"goal <= {goal:g}{'' if value <= goal else '  MISSED'}"
            print(f"{name:16} {value:>10g}  {verdict}".rstrip())
    return int(any(measured[name] > goal for name, goal in GOALS.items()))


if __name__ == "__main__":
    sys.exit(main())
