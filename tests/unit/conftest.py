"""Options of the unit tests."""

from __future__ import annotations

from contextlib import suppress

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    with suppress(ValueError):  # a conftest above may have it already
        parser.addoption("--update-golden", action="store_true", help="write the golden files anew")
