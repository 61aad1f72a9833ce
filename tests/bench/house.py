"""The codebase in figures: where modules are, which imports which, how much code there is, and how it reads.

    .venv/bin/python tests/bench/house.py [--smallest] [--json]

root_modules     modules at the root of image_builder, goal <= 8
layers           layers of the import contract between packages, goal <= 9
ignored_imports  imports that this contract ignores, goal 0; other contracts have their own lists
import_circles   groups of modules that import each other, goal 0; imports for type checking don't count
python_files     Python files of image_builder without the suite, goal <= 220
python_lines     their lines, goal <= 46,200: 40,000 and what trust added (from 45,989 to 52,189)
suite_lines      the lines of the suite, which is counted separately
code_FEATURE     lines of code of each package below image_builder, without comments, docstrings and blank lines: a
                 change that raises one says why
vague_share      variables, fields and parameters whose name says how the value was obtained, goal <= 0.01
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import grimp

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from tests.bench import report  # noqa: E402
from tests.support.vague_names import vague  # noqa: E402

PACKAGE = REPO / "image_builder"
GOALS = {
    "root_modules": ("<=", 8),
    "layers": ("<=", 9),
    "ignored_imports": ("<=", 0),
    "import_circles": ("<=", 0),
    "python_files": ("<=", 220),
    "python_lines": ("<=", 46_200),
    "vague_share": ("<=", 0.01),
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


def code_lines(path: Path) -> int:
    """Return the number of lines that statements begin or go on in, without docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    held: set[int] = set()
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.stmt) and not is_text:
            body = getattr(node, "body", None)
            held.update(range(node.lineno, body[0].lineno if body else (node.end_lineno or node.lineno) + 1))
    return len(held)


def features() -> dict[str, int]:
    """Return the lines of code of each package."""
    packages = sorted(path.parent for path in PACKAGE.glob("*/__init__.py"))
    return {f"code_{p.name}": sum(map(code_lines, p.rglob("*.py"))) for p in packages}


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
        **features(),
    }


def main() -> int:
    """Print the figures; return 1 if one misses its goal."""
    return report.conclude(report.parse(report.parser(__doc__)), figures(), GOALS)


if __name__ == "__main__":
    sys.exit(main())
