"""Preloaded images that are odd: each runs and looks like a pulled one, seeded and promoted.

The bench `tests/bench/odd_images.py` has all of them, and Debian's engines as well.
"""

from __future__ import annotations

import pytest

from tests.support.images.builds import Workplace
from tests.support.registries.pulls import EACH, Result, with_each_engine
from tests.support.stores.odd import scenario

pytestmark = pytest.mark.root

# A layer twice, one layer above different directories, and volumes: what a store or a guard got wrong before.
NAMES = (
    *(
        "empty-twice",
        "twice-around-a-whiteout",
        "bare-twice",
        "bare-on-private",
        "bare-on-public",
        "bare-on-marked",
    ),
    *("bare-on-a-whiteout", "volume-relative", "volume-spaces", "volume-dots", "index-without-platform"),
)


@pytest.fixture(scope="module", params=EACH)
def found(request: pytest.FixtureRequest, worker: Workplace) -> Result:
    result: Result = with_each_engine(scenario, worker, str(request.param), *NAMES)
    return result


@pytest.mark.parametrize("state", ["seeded", "promoted"])
def test_a_container_sees_what_a_pull_gives(found: Result, state: str) -> None:
    assert found[state] == dict.fromkeys(NAMES, "")
    assert found["left"] == []


def test_every_pinned_image_is_protected(found: Result) -> None:
    assert found["preload"]["state"] == "ok", found["preload"]
    # Docker gives a relative path a volume in any container; in place of all others, a guard has a tmpfs.
    assert len(found.get("volumes", ["relative"])) == 1
