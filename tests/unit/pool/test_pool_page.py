"""docs/reference/pools.md says what the code says; ``--update-golden`` rewrites its tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from image_builder.pool.plan.model import CLASSES
from tests.support.pages.pool_tables import with_tables


def test_the_reference_page_is_current(repo_root: Path, request: pytest.FixtureRequest) -> None:
    file = repo_root / "docs/reference/pools.md"
    text = file.read_text(encoding="utf-8")
    if request.config.getoption("--update-golden"):
        file.write_text(with_tables(text), encoding="utf-8")
    text = file.read_text(encoding="utf-8")
    assert text == with_tables(text), "rewrite it: pytest tests/unit --update-golden"
    assert text.count("| `same_share` |") == 1
    assert [kind for kind in CLASSES if f"`{kind}`" not in text] == []
