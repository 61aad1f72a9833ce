"""A disk that fills up under a node: promotion stops, images are deleted, the node is rebooted. Nothing is lost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from image_builder.system import namespace, process
from tests.support.disks.power_cuts import mount_loop
from tests.support.images.builds import Workplace
from tests.support.registries.pulls import ENGINES, MB, Lab, with_each_engine
from tests.support.stores.data_roots import links_in, two_images
from tests.support.stores.seeds import Result, bake, differences, listing, node

pytestmark = pytest.mark.root

_SIZE = 96 << 20


@contextmanager
def _small_disk(lab: Lab) -> Iterator[Path]:
    image, where = lab.base / "small.img", lab.folder("small")
    with image.open("wb") as file:
        file.truncate(_SIZE)
    process.run(["mkfs.ext4", "-q", "-F", "-m0", image])
    mount_loop(image, where)
    try:
        yield where
    finally:
        namespace.unmount(os.fspath(where))


def _fill(file: Path, leave: int = 0) -> None:
    """Write until only ``leave`` bytes are free on the disk."""
    with file.open("ab", buffering=0) as stream:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while os.statvfs(file).f_bavail * 4096 > leave + size:
                    stream.write(b"x" * size)
            except OSError:
                continue


def filled(lab: Lab) -> Result:
    one, two = two_images(lab)
    baked = bake(lab, [one, two])
    pulled = lab.push("pulled", 3 * MB)
    found: Result = {}
    with _small_disk(lab) as disk, node(lab, baked.opt, disk) as here:
        here.settings(kubelet_healthz="", promote={"reserve_percent": 15, "settle_seconds": 0})
        found["seed"] = here.seed()
        here.told_of_disk()
        # More than 85 % full, so promotion stops.
        _fill(disk / "scratch", leave=_SIZE // 10)
        child = here.agent("promote")
        child.communicate()
        found["promotion"] = here.status()["promotion"]
        found["links"] = links_in(here)
        os.truncate(disk / "scratch", 40 * MB)
        with here.engine() as running:
            # The kubelet deletes an image that was never used; a pod's image is pulled, a volume created.
            running.keep_only([two])
            found["pull"] = lab.pull(running, [pulled])["error"]
        volume = here.data / "volumes/mine/_data"
        volume.mkdir(parents=True)
        (volume / "precious").write_text("precious")
        # The disk is full, and the node is rebooted.
        _fill(disk / "scratch")
        here.shut_down()
        before = listing(here.data)
        found["full"] = here.seed()
        # A repair may have left something new, but nothing that existed is gone or changed.
        after = listing(here.data)
        found["lost"] = differences(before, {name: after.get(name) for name in before})
        found["trash"] = [path.name for path in here.disk.glob(".node/trash/*")]
        # Space is freed, and the unit is started again.
        os.truncate(disk / "scratch", 0)
        found["healed"] = here.seed()
        with here.engine() as running:
            child = here.agent("preload")
            found["said"] = child.communicate()[0].decode()
            found["has"] = [running.has(image) for image in (one, two, pulled)]
            found["runs"] = [running.try_out(image) for image in (one, two)]
        found["precious"] = (volume / "precious").read_text()
    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_a_full_disk_costs_nothing_and_heals(worker: Workplace, engine: str) -> None:
    found = with_each_engine(filled, worker, engine)
    assert found["seed"]["state"] == "ok" and found["pull"] == ""
    assert found["promotion"]["code"] == "promote.space" and found["links"] > 0
    full = found["full"]
    assert found["lost"] == [] and found["trash"] == []
    if engine == "docker":
        assert (full["state"], full["code"], full["exit"]) == ("degraded", "seed.disk", 1), full
        assert "No space left on device" in full["reason"] and "seed.disk" in full["said"]
        assert found["healed"]["action"] == "repaired" and found["healed"]["exit"] == 0, found["healed"]
    else:
        # For containerd, nothing is repaired before it runs, so nothing is written.
        assert (full["state"], full["action"]) == ("ok", "current"), full
    assert found["has"] == [True, True, True], found["said"]
    assert all(seconds > 0 for seconds in found["runs"]) and found["precious"] == "precious"
