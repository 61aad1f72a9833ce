"""The page about drains says what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pages.pool_tables import with_drain_tables


def test_tables_are_current(repo_root: Path, request: pytest.FixtureRequest) -> None:
    file = repo_root / "docs/how-to/drain.md"
    text = file.read_text(encoding="utf-8")
    if request.config.getoption("--update-golden"):
        file.write_text(with_drain_tables(text), encoding="utf-8")
    assert file.read_text(encoding="utf-8") == with_drain_tables(text), "pytest tests/unit --update-golden"
