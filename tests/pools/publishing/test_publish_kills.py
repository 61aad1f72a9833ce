"""A publication that is killed goes on: one disk, one version, and nothing sent twice but what was in flight."""

from __future__ import annotations

from pathlib import Path

import pytest

from image_builder.gallery import pages
from image_builder.gallery.upload import STREAMS
from tests.support.arm.kills import Point, publish
from tests.support.arm.place import MIB, Place, write_build

pytestmark = [pytest.mark.root, pytest.mark.process]

DATA = 24 * MIB


def test_a_publication_that_is_killed_goes_on(azure: Place, inventory: Path, tmp_path: Path) -> None:
    """Killed while the disk is made, twice among the pages, when it is released, and when it becomes a version."""
    azure.store.sizes.clear()
    write_build(tmp_path / "output", size=64 * MIB, data=DATA)
    points = [
        Point(changes=1),
        Point(received=DATA // 3),
        Point(received=DATA // 3),
        Point(changes=2),
        Point(changes=1),
    ]
    outcome = publish(azure, inventory, tmp_path / "output", points)
    assert (outcome.killed, outcome.faithful, outcome.status) == (5, True, 0)
    puts = [path for method, path in azure.changes() if method == "PUT"]
    assert len(set(puts)) == 2 and sum("/versions/" in path for path in puts) == 1
    assert [path for path in azure.arm.resources if "/disks/" in path] == []
    assert azure.host.received <= DATA + 512 + len(points) * STREAMS * pages.LARGEST
