"""Names say what a value is: bare participles and pronouns may only get fewer. Docstrings say what a module is."""

from __future__ import annotations

import ast
import re

from image_builder.settings import REPO_ROOT
from tests.support.vague_names import VAGUE, bindings, vague

# The largest share of all bindings that may be vague.
MOST = 0.005
# A module's docstring that begins with a question word.
QUESTION = re.compile(r'(?:#.*\n)*r?"""(?:How|What|When|Where|Whether|Which|Who|Whom|Whose|Why)\b')


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


def test_no_module_is_described_by_a_question() -> None:
    paths = [
        path for folder in ("image_builder", "roles", "tests") for path in (REPO_ROOT / folder).rglob("*.py")
    ]
    assert not [str(path) for path in paths if QUESTION.match(path.read_text(encoding="utf-8"))]
