"""A publication that is killed continues: one disk, one version, and nothing sent twice except what was in flight."""

from __future__ import annotations

import json
import random
from pathlib import Path
from threading import Event

import pytest

from image_builder.gallery import pages
from image_builder.gallery.upload import STREAMS
from tests.support.arm.kills import Point, publish, started
from tests.support.arm.place import MIB, TRUSTED, Place, write_build

pytestmark = [pytest.mark.root, pytest.mark.process]

DATA = 24 * MIB
of_an_image = pytest.mark.parametrize("security_type", [TRUSTED], indirect=True)


@of_an_image
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
    _require_resumed(azure, inventory, tmp_path / "output", points, DATA)


@of_an_image
@pytest.mark.nightly
def test_a_publication_that_is_killed_twenty_times_goes_on(
    azure: Place, inventory: Path, tmp_path: Path
) -> None:
    """Killed at each request that changes something except the last one, and at random during the pages."""
    azure.store.sizes.clear()
    chance, data = random.Random(1), 192 * MIB
    write_build(tmp_path / "output", size=512 * MIB, data=data)
    points = [Point(received=chance.randrange(1, 6 * MIB)) for _ in range(14)]
    points = [Point(changes=1), *points, Point(changes=1), Point(changes=2), *[Point(changes=1)] * 3]
    _require_resumed(azure, inventory, tmp_path / "output", points, data)


def _require_resumed(azure: Place, inventory: Path, output: Path, points: list[Point], data: int) -> None:
    """Publish a build, killed at each point, and assert that there is one version of its bytes and nothing else."""
    outcome = publish(azure, inventory, output, points)
    assert (outcome.killed, outcome.faithful, outcome.status) == (len(points), True, 0)
    puts = [path for method, path in azure.changes() if method == "PUT"]
    assert len(set(puts)) == 3
    assert [sum(kind in path for path in puts) for kind in ("Compute/images/", "/versions/")] == [1, 1]
    assert [path for path in azure.arm.resources if "/disks/" in path or "compute/images/" in path] == []
    assert azure.host.received <= data + 512 + len(points) * STREAMS * pages.LARGEST


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
