"""A node whose power is cut, and whose local disk fails: some rows of the boot matrix (``rows.CI``).

For the night; the whole matrix takes most of an hour: ``.venv/bin/python -m tests.boot.matrix``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.boot.matrix import lab, run_row
from tests.boot.rows import CI, Row
from tests.boot.steps import Lab
from tests.builds import Workplace

pytestmark = [pytest.mark.boot, pytest.mark.root, pytest.mark.nightly, pytest.mark.image("worker")]


@pytest.fixture(scope="module")
def place(request: pytest.FixtureRequest) -> Iterator[Lab]:
    if "IMAGE_BUILDER_ARTEFACT" in os.environ:
        artefact = Path(os.environ["IMAGE_BUILDER_ARTEFACT"]).resolve()
    else:
        built: Workplace = request.getfixturevalue("worker")
        artefact = built.artefact
    with lab(artefact) as made:
        yield made


# In their order: each stands on the one before it.
@pytest.mark.parametrize("row", CI, ids=[row.name for row in CI])
def test_row(place: Lab, row: Row) -> None:
    outcome = run_row(place, row)
    assert outcome.wrong == [], outcome.facts
