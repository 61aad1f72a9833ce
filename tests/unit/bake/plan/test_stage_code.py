"""A stage's id covers every module of this program that its ``run`` imports, even indirectly, except neutral ones."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from image_builder.bake.plan.closure import DECIDING, NEUTRAL, PACKAGE, Code, _imports, imported, is_neutral
from image_builder.bake.plan.resolve import kinds
from image_builder.bake.stages.kind import StageKind
from image_builder.cli.command import extensions
from image_builder.settings import REPO_ROOT
from image_builder.system.trees import executed

PROGRAM = REPO_ROOT / PACKAGE
KINDS = kinds(extensions())
PRELOADS = {"preload", "preload_store", "rehearsal"}
PLAYS = {"layer", "seal"}


def _code(kind: StageKind, root: Path = REPO_ROOT) -> dict[str, str]:
    return Code(root).of_stage(kind.module, kind.data)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_imported_module_is_in_the_id_or_neutral(kind: StageKind) -> None:
    code = _code(kind)
    assert f"{kind.module.replace('.', '/')}.py" in code
    for name in code:
        for file in imported(REPO_ROOT / name, PACKAGE) if name.endswith(".py") else ():
            below = file.relative_to(PROGRAM).as_posix()
            assert f"{PACKAGE}/{below}" in code or is_neutral(below), f"{name} imports {below}"


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_no_plan_is_in_an_id(kind: StageKind) -> None:
    """What a stage needs, how large it is and where it runs may change without rebuilding anything."""
    plans = {REPO_ROOT / f"{k.module.replace('.', '/')}.py" for k in KINDS.values()}
    names = {path.with_name("__init__.py").relative_to(REPO_ROOT).as_posix() for path in plans}
    assert not names & _code(kind).keys()


def test_the_neutral_list_has_what_stages_import_and_nothing_else() -> None:
    met = {
        file.relative_to(PROGRAM).as_posix()
        for kind in KINDS.values()
        for name in _code(kind)
        if name.endswith(".py")
        for file in imported(REPO_ROOT / name, PACKAGE)
    }
    for part in NEUTRAL:
        assert [name for name in met if name == part or name.startswith(f"{part}/")], part
    assert [name for name in DECIDING if name not in met] == []
    assert [name for name in DECIDING if not any(name.startswith(f"{part}/") for part in NEUTRAL)] == []
    assert all(NEUTRAL.values()) and len(NEUTRAL) <= 12


@pytest.mark.parametrize(
    ("file", "reached"),
    [
        ("system/environment.py", set(KINDS)),
        ("system/sandbox.py", set(KINDS)),
        ("system/process.py", set()),
        ("system/namespace.py", set()),
        ("errors.py", set()),
        ("bake/executor.py", set()),
        ("bake/pull/puller.py", set()),
        ("bake/pull/registry.py", set()),
        ("bake/pull/docker_engine.py", PRELOADS),
        ("bake/pull/containerd_engine.py", PRELOADS),
        ("bake/lock/repository.py", {"tools", "base", "module_build", *PLAYS}),
        ("bake/stages/root/run.py", {"tools", "base"}),
        ("bake/ansible.py", PLAYS),
        ("bake/plugins/connection/sandbox.py", PLAYS),
        ("bake/stages/go/run.py", {"go"}),
        ("bake/stages/go/openapi.py", {"go"}),
        ("bake/stages/layer/run.py", PLAYS),
        ("lab/pause.py", {"lab_images"}),
        ("lab/service.py", set()),
        ("verify/runner.py", {"verify"}),
        ("verify/boot.py", set()),
        ("node/layout.py", PRELOADS),
        ("node/__main__.py", {"rehearsal"}),
    ],
)
def test_which_stages_a_file_reaches(file: str, reached: set[str]) -> None:
    """The agent and the suite go into other stages as files: that of a role by the role's play."""
    assert {name for name, kind in KINDS.items() if f"{PACKAGE}/{file}" in _code(kind)} == reached


def test_the_suite_and_what_it_imports_decide_the_verdict() -> None:
    code = _code(KINDS["verify"])
    assert {"image_builder/suite/plugin.py", "image_builder/bake/formats/pe.py"} <= code.keys()


def test_a_comment_changes_no_digest_and_a_statement_does(tmp_path: Path) -> None:
    shutil.copytree(PROGRAM, tmp_path / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    before = _code(KINDS["base"], tmp_path)
    file = tmp_path / PACKAGE / "system/sandbox.py"
    file.write_text(file.read_text() + "\n# A comment.\n")
    assert _code(KINDS["base"], tmp_path) == before
    file.write_text(file.read_text() + "\nx = 1\n")
    after = _code(KINDS["base"], tmp_path)
    assert {name for name in after if after[name] != before[name]} == {"image_builder/system/sandbox.py"}


def _parsed_imports(source: str, package: str) -> Iterator[tuple[str, ...]]:
    """Yield the same as ``_imports``, using Python's own parser."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((a.name,) for a in node.names if a.name.split(".")[0] == package)
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "no relative imports here"
            if node.module and node.module.split(".")[0] == package:
                yield from ((f"{node.module}.{a.name}", node.module) for a in node.names)


def test_imports_are_read_as_python_reads_them() -> None:
    for path in PROGRAM.rglob("*.py"):
        source = path.read_text("utf-8")
        assert set(_parsed_imports(source, PACKAGE)) == _imports(source, PACKAGE), path


def _meant(source: str) -> str:
    """Return what a file means to Python, ignoring docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            ast.get_docstring(node, clean=False) is not None
        ):
            node.body[0] = ast.Expr(ast.Constant(""))
    return ast.dump(tree)


def test_only_comments_and_docstrings_of_a_program_do_not_count() -> None:
    """The result is compared with Python's own parser, for every file that may be part of an id."""
    for path in PROGRAM.rglob("*.py"):
        source = path.read_text("utf-8")
        assert _meant(executed(source)) == _meant(source), path


def test_a_comment_like_text_in_a_string_counts() -> None:
    assert executed('a = "# one"  # two\n') == 'a = "# one"\n'
    assert executed("a = 1\n\n\n  # two\nb = 2\n") == "a = 1\nb = 2\n"
    text = '_FSTAB = """\\\n# Written by us.\n"""\n'
    assert executed(text) != executed(text.replace("Written", "Made"))
    table = 'a = {\n    "b":\n        """text"""\n}\n'
    assert executed(table) != executed(table.replace("text", "other"))
