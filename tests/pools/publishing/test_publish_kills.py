"""A publication that is killed continues: one disk, one version, and nothing sent twice except what was in flight."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Event

import pytest

from image_builder.gallery import pages
from image_builder.gallery.upload import STREAMS
from tests.support.arm.kills import Point, publish, started
from tests.support.arm.place import MIB, TRUSTED, Place, write_build

pytestmark = pytest.mark.root

DATA = 24 * MIB


@pytest.mark.parametrize("security_type", [TRUSTED], indirect=True)
def test_a_publication_that_is_killed_goes_on(azure: Place, inventory: Path, tmp_path: Path) -> None:
    """Killed while the disk is made, twice during the pages, when it is released, when it becomes a managed image and
    this one a version, and when the image is deleted.
    """
    azure.store.sizes.clear()
    write_build(tmp_path / "output", size=64 * MIB, data=DATA)
    points = [
        Point(changes=1),
        Point(received=DATA // 3),
        Point(received=DATA // 3),
        Point(changes=2),
        Point(changes=1),
        Point(changes=1),
        Point(changes=1),
    ]
    outcome = publish(azure, inventory, tmp_path / "output", points)
    assert (outcome.killed, outcome.faithful, outcome.status) == (len(points), True, 0)
    puts = [path for method, path in azure.changes() if method == "PUT"]
    assert len(set(puts)) == 3
    assert [sum(kind in path for path in puts) for kind in ("Compute/images/", "/versions/")] == [1, 1]
    assert [path for path in azure.arm.resources if "/disks/" in path or "compute/images/" in path] == []
    assert azure.host.received <= DATA + 512 + len(points) * STREAMS * pages.LARGEST


def test_a_second_publication_waits_for_the_first_one_and_sends_nothing(
    azure: Place, inventory: Path, tmp_path: Path
) -> None:
    azure.store.sizes.clear()
    output, may_end = tmp_path / "output", Event()
    write_build(output, size=64 * MIB, data=4 * MIB)
    azure.host.faults = [lambda page: None if page.length != 512 or may_end.wait(60) else 403]
    with started(azure, inventory, output) as first:
        while not azure.host.received:
            assert first.poll() is None
        with started(azure, inventory, output) as second:
            try:
                assert second.stderr
                line = next(line for line in second.stderr if "waiting" in line)
                assert line == f"waiting for process {first.pid}, which publishes this build\n"
            finally:
                may_end.set()
            versions = [json.loads(child.communicate()[0])["version"] for child in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0)
    assert versions[0] == versions[1]
    assert azure.host.received == 4 * MIB + 512
    assert len([path for method, path in azure.changes() if method == "PUT"]) == 2
