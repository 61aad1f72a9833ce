"""A node that loses power, or whose local disk fails, fills up or is replaced: some rows of the boot matrix
(``rows.NIGHT``).

Runs at night; the whole matrix takes most of an hour: ``.venv/bin/python -m tests.boot.matrix``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.boot.matrix import lab, run_row
from tests.boot.node import read_image
from tests.boot.rows import NIGHT, Row
from tests.boot.steps import Lab
from tests.support.images import programs
from tests.support.images.builds import Workplace

pytestmark = [pytest.mark.boot, pytest.mark.root, pytest.mark.nightly]
IMAGES = [
    pytest.param("whole_worker", marks=pytest.mark.image("whole_worker")),
    pytest.param("worker_current", marks=[pytest.mark.image("worker_current"), programs.needs_programs]),
]


@pytest.fixture(scope="module", params=IMAGES)
def place(request: pytest.FixtureRequest) -> Iterator[Lab]:
    if "IMAGE_BUILDER_ARTEFACT" in os.environ:
        artefact = Path(os.environ["IMAGE_BUILDER_ARTEFACT"]).resolve()
        if read_image(artefact).told["image"] != request.param:
            pytest.skip("IMAGE_BUILDER_ARTEFACT is a build of another image")
    else:
        built: Workplace = request.getfixturevalue(request.param)
        artefact = built.artefact
    with lab(artefact) as made:
        yield made


# In order: each row depends on the one before it.
@pytest.mark.parametrize("row", NIGHT, ids=[row.name for row in NIGHT])
def test_row(place: Lab, row: Row) -> None:
    outcome = run_row(place, row)
    assert outcome.wrong == [], outcome.facts
