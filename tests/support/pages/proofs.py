"""docs/reference/proofs.md: what runs that are no part of CI have shown, each with its commit and date.

A table of that page lies between `<!-- NAME -->` and `<!-- /NAME -->`. Its heading names its columns, and the first
cell of a row the row. A command replaces the rows of its own runs; nothing else writes them.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from image_builder.settings import REPO_ROOT

PAGE = REPO_ROOT / "docs/reference/proofs.md"
HOLDS, FAILS = "holds", "**does not hold**"


class Stamp(NamedTuple):
    """When a run began, and with which commit; a + stands for changes that aren't part of it."""

    date: str
    commit: str


def stamp() -> Stamp:
    """Return the stamp of a run that begins now."""
    commit = _git("rev-parse", "--short=8", "HEAD") or "unknown"
    changes = _git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{PAGE}")
    return Stamp(f"{datetime.now(UTC):%Y-%m-%d}", f"`{commit}{'+' if changes else ''}`")


def _git(*words: str) -> str:
    done = subprocess.run(
        ["git", "-C", REPO_ROOT, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    return done.stdout.strip()


def record(command: str, facts: Mapping[str, str], result: str, began: Stamp, page: Path = PAGE) -> None:
    """Replace the facts of a command, and its row in the table of runs; ``result`` is its result in a few words."""
    write(command, {fact: {"result": shown} for fact, shown in facts.items()}, kept=(), page=page)
    write("runs", {f"`{command}`": {"result": result, **began._asdict()}}, page=page)


def write_slow(seconds: Mapping[str, float], began: Stamp, page: Path = PAGE) -> None:
    """Keep the files of tests that a run of `test --slow` passed, with their seconds; files that are gone go."""
    rows = {f"`{file}`": {"seconds": f"{took:.0f}", **began._asdict()} for file, took in seconds.items()}
    files = [f"`{path.relative_to(REPO_ROOT)}`" for path in (REPO_ROOT / "tests").rglob("test_*.py")]
    write("slow", rows, kept=files, page=page)


def write(
    table: str, rows: Mapping[str, Mapping[str, str]], *, kept: Iterable[str] | None = None, page: Path = PAGE
) -> None:
    """Write cells, by row and column, into a table. Of the rows it has, those in ``kept`` stay, by default all.

    Cells of these that aren't given stay as they are. Raises ValueError for a table or a column that the page lacks.
    """
    text = page.read_text(encoding="utf-8")
    begin, end = f"<!-- {table} -->\n", f"<!-- /{table} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"the page {page} has no {begin.strip()} … {end}")
    head, _, rest = text.partition(begin)
    inside, _, tail = rest.partition(end)
    heading, rule, *lines = inside.splitlines()
    _, *columns = _cells(heading)
    there = {name: dict(zip(columns, cells, strict=True)) for name, *cells in map(_cells, lines)}
    if kept is not None:
        stay = set(kept)
        there = {name: cells for name, cells in there.items() if name in stay}
    for name, cells in rows.items():
        if unknown := cells.keys() - set(columns):
            raise ValueError(f"the table {table} has no column {', '.join(sorted(unknown))}")
        there.setdefault(name, {}).update({key: _escaped(cell) for key, cell in cells.items()})
    made = [_line(name, *(there[name].get(column, "") for column in columns)) for name in there]
    page.write_text("\n".join([f"{head}{begin}{heading}", rule, *made, f"{end}{tail}"]), encoding="utf-8")


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.replace(r"\|", "\0").strip("|").split("|")]


def _escaped(cell: str) -> str:
    return " ".join(cell.split()).replace("|", r"\|")


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |".replace("\0", r"\|")
