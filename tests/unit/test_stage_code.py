"""A stage's id covers every module of this program that its stage module imports, directly or not."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from image_builder.plan.code import CODE

PACKAGE = Path(__file__).resolve().parents[2] / "image_builder"
# Modules that decide how a stage is run, watched or refused, but no byte of what it makes; a definition's
# values and a lock's digests are in the options.
NEUTRAL = {
    "__init__.py",
    "errors.py",
    "events.py",
    "lock.py",
    "namespace.py",
    "plan/__init__.py",
    "plan/model.py",
    "process.py",
    "settings.py",
    "stages/__init__.py",
    "store.py",
    "formats/__init__.py",
}


def _imports(module: str) -> set[str]:
    """Return the files of this package that a file imports, type-checking imports excepted."""
    tree = ast.parse((PACKAGE / module).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "image_builder":
            base = (node.module or "").split(".")[1:]
            found |= {_file([*base, alias.name]) or _file(base) or "__init__.py" for alias in node.names}
    return found


def _file(parts: list[str]) -> str | None:
    path = "/".join(parts)
    for name in (f"{path}.py", f"{path}/__init__.py"):
        if (PACKAGE / name).is_file():
            return name
    return None


def _closure(module: str) -> set[str]:
    done: set[str] = set()
    queue = {module}
    while queue:
        name = queue.pop()
        done.add(name)
        if name not in NEUTRAL and not name.startswith("definition/"):
            queue |= _imports(name) - done
    return {n for n in done if n not in NEUTRAL and not n.startswith("definition/")}


@pytest.mark.parametrize("kind", sorted(CODE))
def test_every_imported_module_is_covered(kind: str) -> None:
    covered = set(CODE[kind])
    folders = tuple(f"{name}/" for name in covered if (PACKAGE / name).is_dir())
    missing = {
        n for n in _closure(f"stages/{kind}.py") if n not in covered and not n.startswith(folders or ("\0",))
    }
    assert missing == set()


@pytest.mark.parametrize("kind", sorted(CODE))
def test_every_covered_file_exists(kind: str) -> None:
    assert [name for name in CODE[kind] if not (PACKAGE / name).exists()] == []
