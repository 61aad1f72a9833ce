"""The control plane of a test process, and its loan to a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.control_plane.gates import Cluster, healthy, running
from tests.support.control_plane.lending import Lender


@pytest.fixture(scope="session")
def control_plane() -> Iterator[Lender]:
    """A control plane with controllers, to be borrowed (``lent``) for as long as its borrower likes."""
    with running(controllers=True) as plane:
        yield Lender(plane)


@pytest.fixture(scope="module")
def cluster(control_plane: Lender) -> Iterator[Cluster]:
    """The control plane, borrowed by a module."""
    with control_plane.lent() as lease:
        yield lease


@pytest.fixture(scope="session")
def healthz() -> Iterator[str]:
    """The URL of a health endpoint that answers like that of a working kubelet."""
    with healthy() as address:
        yield address
