"""Which files of this checkout a Python file imports, directly or not."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from image_builder.settings import REPO_ROOT


def imported(file: Path, package: str, root: Path = REPO_ROOT) -> set[Path]:
    """Return the files of a package that a file imports, wherever in it, but for type checking."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = []
    return {
        found
        for node in ast.walk(tree)
        for names in _names(node)
        if names[0].split(".")[0] == package and (found := _file(names, root))
    }


def _names(node: ast.AST) -> Iterator[tuple[str, ...]]:
    """Yield what an import may mean, each time what it means first: a module of that name, or the package with it."""
    if isinstance(node, ast.Import):
        yield from ((alias.name,) for alias in node.names)
    if isinstance(node, ast.ImportFrom) and node.module:
        yield from ((f"{node.module}.{alias.name}", node.module) for alias in node.names)


def _file(names: Iterable[str], root: Path) -> Path | None:
    places = (
        place
        for name in names
        for base in [root / name.replace(".", "/")]
        for place in (base.with_name(f"{base.name}.py"), base / "__init__.py")
    )
    return next((place for place in places if place.is_file()), None)


def closure(
    starts: Iterable[Path],
    package: str,
    root: Path = REPO_ROOT,
    is_left_out: Callable[[Path], bool] = lambda _: False,
) -> set[Path]:
    """Return the files that are imported from these on, these among them; what is left out is not followed either."""
    done: set[Path] = set()
    queue = set(starts)
    while queue:
        file = queue.pop()
        if not is_left_out(file):
            done.add(file)
            queue |= imported(file, package, root) - done
    return done
