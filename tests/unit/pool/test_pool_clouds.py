"""Azure's other clouds: the setting that the documentation names is the one that the SDK reads."""

from __future__ import annotations

import re

import pytest
from azure.core.settings import settings
from typer.testing import CliRunner

from image_builder.cli.main import app
from image_builder.settings import REPO_ROOT


def test_people_are_told_what_the_sdk_looks_at(monkeypatch: pytest.MonkeyPatch) -> None:
    name = settings.azure_cloud.env_var
    assert name
    assert name in CliRunner().invoke(app, ["pool", "snapshot", "--help"]).stdout
    how_to = (REPO_ROOT / "docs" / "how-to" / "snapshot-a-pool.md").read_text()
    match = re.search(rf"`{name}` \(([^)]*)\)", how_to)
    assert match
    for value in re.findall(r"`(\w+)`", match[1]):
        monkeypatch.setenv(name, value)
        assert settings.azure_cloud().name == value
