"""A copy of a store with a finished build of the small image, which a test may break."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.images.builds import Workplace


@pytest.fixture
def workplace(copies: Callable[[Workplace], Workplace], minimal: Workplace) -> Workplace:
    """Return a copy of the small image's store."""
    return copies(minimal)


@pytest.fixture
def published(workplace: Workplace, minimal: Workplace) -> dict[str, str]:
    """Provide an earlier, good build's artifact."""
    return workplace.take_artefact(minimal)
