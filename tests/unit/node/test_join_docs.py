"""The reference page lists every code as the program defines it."""

from __future__ import annotations

from image_builder.node.__main__ import parse
from image_builder.node.join.codes import CODES, PHASES
from image_builder.node.join.config import default_deadlines
from image_builder.node.join.record import kind
from tests.support.images.builds import REPO

PAGE = REPO / "docs/reference/node-config.md"


def test_the_page_has_the_codes() -> None:
    rows = ["| code | phase | class | meaning |", "|---|---|---|---|"]
    rows += [
        f"| {number} | {code.phase or 'any'} | {code.kind} | {code.meaning} |"
        for number, code in CODES.items()
    ]
    wanted = "<!-- codes: begin -->\n" + "\n".join(rows) + "\n<!-- codes: end -->"
    assert wanted in PAGE.read_text(), f"the table must be:\n{wanted}"


def test_the_tens_of_a_code_are_its_phase() -> None:
    assert {number for number, code in CODES.items() if not code.phase} == {1, 2}
    for number, code in CODES.items():
        assert not code.phase or PHASES[number // 10 - 1] == code.phase
    assert kind(0) == "" and kind(65) == "configuration"


def test_the_page_has_the_deadlines() -> None:
    text = PAGE.read_text()
    for phase, seconds in default_deadlines().items():
        row = next(line for line in text.splitlines() if line.startswith(f"| `{phase}` |"))
        assert f"| {seconds:g} s |" in row or phase == "join"


def test_the_command_line() -> None:
    assert not parse(["join"]).status and parse(["join", "--status"]).status
