"""A node in its life: it loses power while it seeds, its local disk fails, is replaced, and fills up (``rows.NIGHT``).

What the agent makes of such disks is proven on every commit, by tests/disk/test_power_cuts.py, test_promote_faults.py
and test_preload_seed*.py. Only a machine shows that cloud-init begins anew after the cut, that the kernel's own error
reaches the promotion, that a promotion ends beside a kubelet, which images that kubelet deletes, and what the next boot
makes of it. The whole matrix takes most of an hour: ``.venv/bin/python -m tests.boot.matrix``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.boot.matrix import lab, run_row
from tests.boot.rows import NIGHT, Row
from tests.boot.steps import Lab
from tests.support.images.builds import Workplace
from tests.support.images.fixtures import WHOLE

pytestmark = [pytest.mark.boot, pytest.mark.root, pytest.mark.slow]


@pytest.fixture(scope="module")
def place(request: pytest.FixtureRequest) -> Iterator[Lab]:
    built: Workplace = request.getfixturevalue(WHOLE)
    with lab(built.artefact) as made:
        yield made


# In order: each row depends on the one before it.
@pytest.mark.parametrize("row", NIGHT, ids=[row.name for row in NIGHT])
def test_row(place: Lab, row: Row) -> None:
    outcome = run_row(place, row)
    assert outcome.wrong == [], outcome.facts
