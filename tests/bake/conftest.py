"""A copy of a store with a finished build of the smallest image, which a test may break."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.images.builds import Workplace


@pytest.fixture
def workplace(copies: Callable[[Workplace], Workplace], tiny: Workplace) -> Workplace:
    """Return a copy of the smallest image's store."""
    return copies(tiny)


@pytest.fixture
def published(workplace: Workplace, tiny: Workplace) -> dict[str, str]:
    """Provide an earlier, good build's artifact."""
    return workplace.take_artefact(tiny)
