"""Names say what a value is: bindings named by a bare participle or pronoun are counted, and may only get fewer."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from image_builder.settings import REPO_ROOT

# Names that say how a value came about, not what it is. `found_disks` is fine.
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
# The largest share of all bindings that may be vague.
MOST = 0.005


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


def test_few_names_are_vague() -> None:
    counted, total = vague(REPO_ROOT / "image_builder")
    share = counted.total() / total
    assert share <= MOST, f"{share:.1%} of {total} bindings: {counted.most_common()}"


def test_every_kind_of_binding_is_counted() -> None:
    source = (
        "found = 1\n"
        "def f(one, *what, seen=0, **given): kept = 2\n"
        "for left in x: pass\n"
        "with a as taken: pass\n"
        "try: pass\nexcept E as said: pass\n"
        "match x:\n case {'a': wanted}: pass\n"
        "y = [known for known in z if (asked := known)]\n"
        "import m as made\n"
        "class C:\n told: int = 0\n"
    )
    names = {name.lower() for name in bindings(ast.parse(source))}
    assert names & VAGUE == VAGUE - {"words", "there", "mine", "theirs", "whose", "which"}
