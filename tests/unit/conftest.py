"""Options of the unit tests."""

from __future__ import annotations

from contextlib import suppress

import pytest

from image_builder.definition import problems


def pytest_addoption(parser: pytest.Parser) -> None:
    with suppress(ValueError):  # a conftest above may have it already
        parser.addoption("--update-golden", action="store_true", help="write the golden files anew")


@pytest.fixture
def unread_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the check of what layers' tasks read: it takes most of the time of tests that are about values."""
    monkeypatch.setattr(problems, "reading_problems", lambda *_: [])
