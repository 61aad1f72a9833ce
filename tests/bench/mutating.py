"""Mutants of the program: a comparison, a condition, a number, a result or a statement that is another or gone.

Only for ``tests/bench/mutants.py``, which lets the tests look for them.
"""

from __future__ import annotations

import ast
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

REPO = Path(__file__).resolve().parents[2]
_PAIRS = ((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn), (ast.Is, ast.IsNot))
_SWAPS: Any = {a: b for x, y in (*_PAIRS, (ast.And, ast.Or)) for a, b in ((x, y), (y, x))}
_DELETED = (ast.Expr, ast.Raise, ast.Assign, ast.AugAssign, ast.Continue, ast.Break, ast.Delete)


class Mutant(NamedTuple):
    """A text in place of the bytes of a file from ``start`` to ``end``."""

    name: str
    path: str
    start: int
    end: int
    text: str


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def changes(node: Any) -> Iterator[tuple[str, str]]:
    """Yield what a part of a program may become, with the kind of the mutation."""
    match node:
        case ast.Compare(left, operators, sides):
            for at, old in enumerate(map(type, operators)):
                new = ast.Compare(left, [*operators[:at], _SWAPS[old](), *operators[at + 1 :]], sides)
                yield "boundary" if "t" in old.__name__[:2] else "comparison", f"({ast.unparse(new)})"
        case ast.BoolOp(operator, values):
            yield "and/or", f"({ast.unparse(ast.BoolOp(_SWAPS[type(operator)](), values))})"
        case ast.UnaryOp(ast.Not(), operand):
            yield "not", f"({ast.unparse(operand)})"
        case ast.Constant(value) if type(value) is int:
            yield "constant", str(value + 1)
        case ast.Return(ast.Constant(bool(value))):
            yield "return", f"return {not value}"
        case ast.Return(value) if value and ast.unparse(value) != "None":
            yield "return", "return None"
        case ast.stmt() if isinstance(node, _DELETED) and node.col_offset and not _is_docstring(node):
            yield "deletion", "pass"
        case _:
            pass


def draw(wing: str, number: int, seed: str) -> list[Mutant]:
    """Return mutants of a wing."""
    kinds: dict[str, list[Mutant]] = defaultdict(list)
    for file in sorted((REPO / "image_builder" / wing).rglob("*.py")):
        source, path = file.read_bytes(), str(file.relative_to(REPO))
        lines = [0, *(line.end() for line in re.finditer(b"\n", source))]
        nodes: list[Any] = list(ast.walk(ast.parse(source)))
        # Python 3.11 doesn't know where the parts of these are.
        texts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
        for node in (node for node in nodes if id(node) not in texts):
            for kind, text in changes(node):
                start, end = (
                    lines[node.lineno - 1] + node.col_offset,
                    lines[node.end_lineno - 1] + node.end_col_offset,
                )
                name = f"{path}:{node.lineno} {kind}: {ast.unparse(node)[:90]} -> {text[:90]}"
                kinds[kind].append(Mutant(name, path, start, end, text))
    chance = random.Random(f"{seed} {wing}")
    turns = (chance.choice([kind for kind in sorted(kinds) if kinds[kind]]) for _ in range(number))
    return [kinds[kind].pop(chance.randrange(len(kinds[kind]))) for kind in turns]
