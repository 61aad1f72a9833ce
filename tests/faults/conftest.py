"""A copy of a store with a finished build of the small image, which a test may break."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.builds import Workplace


@pytest.fixture
def workplace(copies: Callable[[Workplace], Workplace], minimal: Workplace) -> Workplace:
    """A copy of the small image's store."""
    return copies(minimal)
