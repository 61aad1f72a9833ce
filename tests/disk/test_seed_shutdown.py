"""A disk that is cut off right after a repair of Docker's data root, on XFS, which is the default."""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from image_builder.node.seed.docker import fill, lacking
from tests.support.disks.loop_devices import LARGE, Desk, mounted, run, run_scenario
from tests.support.images.builds import Workplace
from tests.unit.node.stores import docker_store, stored

pytestmark = [pytest.mark.root, pytest.mark.slow]

IMAGES = [stored("one", "base", "a"), stored("two", "base", "b")]
_GOINGDOWN, _NO_LOG_FLUSH = 0x8004587D, 2


def repaired_and_cut_off(desk: Desk) -> Any:
    """Delete all records, repair them, and shut the filesystem down without anything more being written."""
    store, disk = docker_store(desk.base / "store", IMAGES), desk.disk(LARGE)
    run("mkfs.xfs", "-q", disk.path)
    with mounted(disk, "xfs", desk.base / "mnt") as place:
        fill(IMAGES, place / "docker", store=store)
        os.sync()
        shutil.rmtree(place / "docker/image")
        fd = os.open(place / "docker", os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
        repaired = fill(IMAGES, place / "docker", store=store).images
        fd = os.open(place, os.O_RDONLY)
        fcntl.ioctl(fd, _GOINGDOWN, struct.pack("I", _NO_LOG_FLUSH))
        os.close(fd)
    with mounted(disk, "xfs", desk.base / "mnt") as place:
        files = [
            path for path in (place / "docker/image").rglob("*") if path.is_file() and not path.is_symlink()
        ]
        return {
            "repaired": repaired,
            "records": len(files),
            "empty": [path.name for path in files if not path.stat().st_size],
            "lacking": lacking(IMAGES, place / "docker"),
        }


def test_what_has_its_name_has_its_contents(worker: Workplace, tmp_path: Path) -> None:
    found = run_scenario(repaired_and_cut_off, worker, tmp_path)
    assert found["repaired"] == [image.ref for image in IMAGES] and found["records"] > 10
    assert (found["empty"], found["lacking"]) == ([], [])
