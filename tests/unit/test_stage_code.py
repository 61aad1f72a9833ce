"""A stage's id covers every module of this program that its stage module imports, directly or not."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from image_builder.bake.plan.code import CODE
from image_builder.system.digests import executed
from tests.imports import closure

PACKAGE = Path(__file__).resolve().parents[2] / "image_builder"
# Modules that decide how a stage is run, watched or refused, but no byte of what it makes; a definition's
# values and a lock's digests are in the options.
NEUTRAL = {
    "__init__.py",
    "system/cgroups.py",
    "errors.py",
    "events.py",
    "bake/lock/model.py",
    "system/namespace.py",
    "node/mounts.py",
    "bake/plan/__init__.py",
    "bake/plan/model.py",
    "system/process.py",
    "bake/pull/__init__.py",
    "bake/pull/attempt.py",
    "bake/pull/credentials.py",
    "bake/pull/deadline.py",
    "bake/pull/docker_events.py",
    "bake/pull/gateway.py",
    "bake/pull/mirrors.py",
    "bake/pull/model.py",
    "bake/pull/outbound.py",
    "bake/pull/puller.py",
    "bake/pull/registry.py",
    "bake/pull/retry.py",
    "settings.py",
    "bake/stages/__init__.py",
    "bake/store.py",
    "system/web.py",
    "bake/formats/__init__.py",
    "bake/__init__.py",
    "bake/lock/__init__.py",
    "canonical.py",
    "system/__init__.py",
    "system/trees.py",
    "system/digests.py",
    "verify/__init__.py",
}


def _closure(module: str) -> set[str]:
    def is_neutral(file: Path) -> bool:
        name = file.relative_to(PACKAGE).as_posix()
        return name in NEUTRAL or name.startswith("definition/")

    found = closure([PACKAGE / module], PACKAGE.name, PACKAGE.parent, is_neutral)
    return {file.relative_to(PACKAGE).as_posix() for file in found}


@pytest.mark.parametrize("kind", sorted(CODE))
def test_every_imported_module_is_covered(kind: str) -> None:
    covered = set(CODE[kind])
    folders = tuple(f"{name}/" for name in covered if (PACKAGE / name).is_dir())
    missing = {
        n
        for n in _closure("verify/runner.py" if kind == "verify" else f"bake/stages/{kind}/run.py")
        if n not in covered and not n.startswith(folders or ("\0",))
    }
    assert missing == set()


@pytest.mark.parametrize("kind", sorted(CODE))
def test_every_covered_file_exists(kind: str) -> None:
    assert [name for name in CODE[kind] if not (PACKAGE / name).exists()] == []


def _meant(source: str) -> str:
    """Return what a file means to Python, docstrings apart."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            ast.get_docstring(node, clean=False) is not None
        ):
            node.body[0] = ast.Expr(ast.Constant(""))
    return ast.dump(tree)


def test_only_comments_and_docstrings_of_a_program_do_not_count() -> None:
    """Compared with Python's own parser, over every file that may be in an id."""
    for path in [*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "image_builder/suite").glob("*.py")]:
        source = path.read_text("utf-8")
        assert _meant(executed(source)) == _meant(source), path


def test_a_comment_like_text_in_a_string_counts() -> None:
    assert executed('a = "# one"  # two\n') == 'a = "# one"\n'
    assert executed("a = 1\n\n\n  # two\nb = 2\n") == "a = 1\nb = 2\n"
    text = '_FSTAB = """\\\n# Written by us.\n"""\n'
    assert executed(text) != executed(text.replace("Written", "Made"))
    table = 'a = {\n    "b":\n        """text"""\n}\n'
    assert executed(table) != executed(table.replace("text", "other"))
