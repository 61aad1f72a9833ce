"""Pulls that are ended from outside: by a failure of another one, by the build, by a full disk."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from image_builder.bake.pull import retry
from image_builder.bake.pull.puller import Request
from image_builder.lab.registry import HOST
from image_builder.system import namespace, process
from tests.support.disks.power_cuts import mount_loop
from tests.support.images.builds import Workplace
from tests.support.registries.plan import Fault
from tests.support.registries.pull_cases import (
    PATIENT,
    SIZE,
    layer_fault,
    placed,
    unknown,
)
from tests.support.registries.pulls import CONTAINERD, MB, Lab, Result, isolated, wait_until

pytestmark = pytest.mark.root


def end_early(lab: Lab) -> Result:
    """Let an optional image fail, a required one, and the build, each while another pull goes on."""
    optional, required, cancelled = (lab.push(n, SIZE) for n in ("optional", "required", "cancelled"))
    good = lab.push("good", MB)
    lab.proxy.faults = [
        placed(layer_fault("stall"), "required", required),
        # Neither the manifest nor whether there is one.
        *(Fault("silence", path="^/v2/cancelled/", method=method) for method in ("GET", "HEAD")),
    ]
    result: Result = {}
    stop = threading.Event()

    def stop_when_asked() -> None:
        wait_until(lambda: any(r.path.startswith("/v2/cancelled/") for r in lab.proxy.requests), 600)
        stop.set()

    with lab.running(lab.folder("state")) as engine:
        wanted = [Request(unknown(optional), required=False), Request(good)]
        result["optional"] = lab.pull(engine, wanted, limits=PATIENT, attempts=1)
        result["optional"]["has"] = [engine.has(w.image) for w in wanted]
        result["required"] = lab.pull(engine, [unknown(good), required], limits=PATIENT)
        thread = threading.Thread(target=stop_when_asked)
        thread.start()
        result["cancelled"] = lab.pull(engine, [cancelled], limits=PATIENT, stop=stop)
        thread.join()
    return result


@pytest.fixture(scope="module")
def ended(worker: Workplace) -> Result:
    result: Result = isolated(end_early, worker, CONTAINERD)
    return result


def test_an_image_that_is_not_required_may_fail(ended: Result) -> None:
    found = ended["optional"]
    assert not found["bug"] and not found["error"]
    assert found["has"] == [False, True]
    assert list(found["failed"]) == [f"{HOST}/optional:1"]
    assert "not found" in found["failed"][f"{HOST}/optional:1"]


def test_the_first_required_image_that_fails_ends_the_others(ended: Result) -> None:
    found = ended["required"]
    assert not found["bug"]
    assert found["error"].startswith(f"{HOST}/good:1: ") and "not found" in found["error"]
    assert "\n" not in found["error"], "the other one did not fail, it was ended"
    assert sorted(r["outcome"] for r in found["records"]) == ["failed", "stopped"]


def test_stop_ends_a_pull(ended: Result) -> None:
    found = ended["cancelled"]
    assert not found["bug"]
    assert found["error"].startswith(f"{HOST}/cancelled:1: the build ends")
    assert len(found["records"][0]["attempts"]) == 1


# -- a full disk -----------------------------------------------------------------------------------------------


@contextmanager
def small_disk(lab: Lab, mib: int) -> Iterator[Path]:
    """Mount a separate filesystem of this size."""
    file, place = lab.base / "disk.img", lab.folder("disk")
    with file.open("wb") as stream:
        stream.truncate(mib << 20)
    process.run(["mkfs.ext4", "-q", file])
    mount_loop(file, place)
    try:
        yield place
    finally:
        namespace.unmount(os.fspath(place))


def fill_disk(lab: Lab) -> Result:
    """Pull an image that doesn't fit when it is unpacked, then one that does."""
    large = lab.push("large", zeros=300 << 20)
    small = lab.push("small", MB)
    mib = 128
    with small_disk(lab, mib) as disk:
        state = disk / "state"
        state.mkdir()
        with lab.running(state) as engine:
            result = lab.pull(engine, [large], limits=PATIENT, attempts=5)
            result["blobs"] = len([r for r in lab.proxy.requests if r.path.startswith("/v2/large/blobs/")])
            result["layers"] = len(large.layers)
            # containerd frees space a moment after it has reported that there is none.
            result["freed"] = wait_until(lambda: shutil.disk_usage(disk).free > (mib << 20) / 2)
            result["small"] = lab.pull(engine, [small], limits=PATIENT, attempts=1)
            result["has"] = [engine.has(large), engine.has(small)]
    return result


def test_a_full_disk_is_told_and_not_tried_again(worker: Workplace) -> None:
    found = isolated(fill_disk, worker, CONTAINERD)
    assert not found["bug"]
    assert found["error"].startswith(f"{HOST}/large:1: ") and "no space left on device" in found["error"]
    assert retry.classify(found["error"]) == "full", "by this a build exits as for a full disk"
    assert len(found["records"][0]["attempts"]) == 1
    assert found["blobs"] == found["layers"] + 1, "each layer and the configuration once"
    # What didn't fit has been removed, so something smaller fits.
    assert found["freed"]
    assert not found["small"]["error"] and found["has"] == [False, True], found["small"]
