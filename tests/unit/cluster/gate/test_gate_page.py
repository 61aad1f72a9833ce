"""The page about bad nodes says what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from image_builder.cluster.gate.policy import CONDITIONS, Policy
from image_builder.strict_yaml import load
from tests.support.pages.pool_tables import with_health_tables


@pytest.fixture
def page(repo_root: Path) -> Path:
    return repo_root / "docs/how-to/bad-nodes.md"


def test_tables_are_current(page: Path, request: pytest.FixtureRequest) -> None:
    text = page.read_text(encoding="utf-8")
    if request.config.getoption("--update-golden"):
        page.write_text(with_health_tables(text), encoding="utf-8")
    assert page.read_text(encoding="utf-8") == with_health_tables(text), "pytest tests/unit --update-golden"


def test_it_names_each_condition_and_its_example_is_a_policy(page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [kind for kind in CONDITIONS if f"`{kind}`" not in text] == []
    (tmp_path / "health.yml").write_text(text.partition("```yaml\n")[2].partition("```")[0])
    assert load(tmp_path / "health.yml", Policy, "health").nvsentinel == ("h100",)
