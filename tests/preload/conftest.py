"""The engines that pull."""

from __future__ import annotations

import pytest

from tests.support.registries.pulls import EACH


@pytest.fixture(scope="module", params=EACH)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)
