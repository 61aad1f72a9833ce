"""Names that say how a value came about, not what it is, and how many of a program's bindings have one."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# `found_disks` is fine.
VAGUE = frozenset(
    {
        *(
            "found",
            "made",
            "told",
            "said",
            "wanted",
            "known",
            "what",
            "words",
            "one",
            "there",
            "seen",
            "given",
            "asked",
        ),
        *("kept", "taken", "left", "mine", "theirs", "whose", "which"),
    }
)


def bindings(tree: ast.AST) -> Iterator[str]:
    """Yield each name that a module binds to a value: variables, fields and parameters."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name
            case ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)):
                yield name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name
            case _:
                pass


def vague(root: Path) -> tuple[Counter[str], int]:
    """Return how often each vague name is bound below a directory, and the number of all bindings."""
    names = Counter(
        name.strip("_").lower()
        for path in sorted(root.rglob("*.py"))
        for name in bindings(ast.parse(path.read_text(encoding="utf-8")))
    )
    return Counter({name: count for name, count in names.items() if name in VAGUE}), names.total()
