"""A copy of a store with a finished build of the small image, which a test may break."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.images.builds import Workplace


@pytest.fixture
def workplace(copies: Callable[[Workplace], Workplace], minimal: Workplace) -> Workplace:
    """A copy of the small image's store."""
    return copies(minimal)


@pytest.fixture
def published(workplace: Workplace, minimal: Workplace) -> dict[str, str]:
    """An artefact of an earlier, good build."""
    return workplace.take_artefact(minimal)
