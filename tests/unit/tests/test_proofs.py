"""The page *Proofs*: a command replaces its own rows, and only these."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pages import proofs
from tests.support.pages.proofs import Stamp

NOW = Stamp("2026-01-02", "`0a1b2c3d`")
TEXT = r"""# Proofs
<!-- runs -->
| command | what | result | date | commit |
| --- | --- | --- | --- | --- |
| `one` | [first](#one) \| part | 1 of 2 facts | 2025-01-01 | `old` |
| `two` | second | 3 of 3 facts | 2025-01-01 | `old` |
<!-- /runs -->
Text.
<!-- one -->
| shown | result |
| --- | --- |
| gone | holds |
<!-- /one -->
<!-- slow -->
| file | seconds | date | commit |
| --- | --- | --- | --- |
| `tests/unit/tests/test_gone.py` | 1 | 2025-01-01 | `old` |
| `tests/unit/tests/test_proofs.py` | 1 | 2025-01-01 | `old` |
<!-- /slow -->
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    file = tmp_path / "proofs.md"
    file.write_text(TEXT)
    return file


def test_a_run_replaces_its_facts_and_its_row(page: Path) -> None:
    proofs.record("one", {"a": proofs.HOLDS, "b": "1 | 2\n3"}, "2 of 2 facts", NOW, page)
    old = "1 of 2 facts | 2025-01-01 | `old`"
    assert page.read_text() == TEXT.replace(old, "2 of 2 facts | 2026-01-02 | `0a1b2c3d`").replace(
        "| gone | holds |", "| a | holds |\n| b | 1 \\| 2 3 |"
    )


def test_slow_files_keep_their_last_run_as_long_as_they_exist(page: Path) -> None:
    proofs.write_slow({"tests/unit/test_new.py": 61.4}, NOW, page)
    assert page.read_text().splitlines()[-3:] == [
        "| `tests/unit/tests/test_proofs.py` | 1 | 2025-01-01 | `old` |",
        "| `tests/unit/test_new.py` | 61 | 2026-01-02 | `0a1b2c3d` |",
        "<!-- /slow -->",
    ]


@pytest.mark.parametrize(("table", "column"), [("three", "result"), ("one", "other")])
def test_a_table_or_column_that_the_page_lacks_is_an_error(page: Path, table: str, column: str) -> None:
    with pytest.raises(ValueError, match=f"{table}|{column}"):
        proofs.write(table, {"a": {column: "x"}}, page=page)
    assert page.read_text() == TEXT
