"""What errors say to people: the sentences of their calls stand in one golden file, to be reviewed as text.

Other tests compare codes, exit statuses, places and numbers. ``--update-golden`` writes the file anew.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from image_builder.settings import REPO_ROOT

GOLDEN = Path(__file__).with_name("sentences.txt")


def _template(node: ast.expr) -> str:
    """Return the text of a string with the expressions in it in braces; "" for any other expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            f"{{{ast.unparse(part.value)}}}" if isinstance(part, ast.FormattedValue) else _template(part)
            for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _template(node.left) + _template(node.right)
    if isinstance(node, ast.IfExp):
        return " | ".join(filter(None, (_template(node.body), _template(node.orelse))))
    return ""


def _sentences(source: str) -> Iterator[str]:
    """Yield the sentences of the errors and problems that a module makes, in order of their lines."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    for call in sorted(calls, key=lambda call: (call.lineno, call.col_offset)):
        name = ast.unparse(call.func).rpartition(".")[2]
        if not name.endswith(("Error", "Problem", "BadParameter", "Finding")):
            continue
        values = [*call.args, *(keyword.value for keyword in call.keywords)]
        if texts := [text for text in map(_template, values) if " " in text]:
            yield f"{name}: {' / '.join(texts)}".replace("\n", "\\n")


def test_the_sentences_of_errors(request: pytest.FixtureRequest) -> None:
    lines = [
        f"{path.relative_to(REPO_ROOT).as_posix()}  {sentence}\n"
        for path in sorted((REPO_ROOT / "image_builder").rglob("*.py"))
        for sentence in _sentences(path.read_text(encoding="utf-8"))
    ]
    if request.config.getoption("--update-golden"):
        GOLDEN.write_text("".join(lines), encoding="utf-8")
    assert GOLDEN.read_text(encoding="utf-8") == "".join(lines)
