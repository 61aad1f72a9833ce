"""The engines whose images are preloaded."""

from __future__ import annotations

import pytest

from tests.support.registries.pulls import ENGINES


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)
