"""Pulls that are ended from outside: by a failure of another one, by the build, with their engine, by a full disk."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from image_builder.bake.pull import retry
from image_builder.bake.pull.puller import Request
from image_builder.errors import CommandError
from image_builder.lab.registry import HOST
from image_builder.system import process
from tests.support.images.builds import Workplace
from tests.support.registries.pull_cases import (
    AFTER,
    HASTY,
    PATIENT,
    SIZE,
    large_layer,
    layer_fault,
    partial,
    placed,
    unknown,
)
from tests.support.registries.pulls import MB, Lab, Result, kill, wait_until, with_each_engine

pytestmark = pytest.mark.root


def end_early(lab: Lab) -> Result:
    """End pulls from outside, and the engine itself; then pull with a new engine on the same data root."""
    names = ("optional", "required", "cancelled", "killed")
    stuck = {name: lab.push(name, SIZE) for name in names}
    good = {name: lab.push(f"good{name}", MB) for name in names}
    lab.proxy.faults = [placed(layer_fault("stall"), name, image) for name, image in stuck.items()]
    state = lab.folder("state")
    result: Result = {}

    def during(
        engine: Any, name: str, act: Callable[[], None], stop: threading.Event | None = None
    ) -> Result:
        def wait_and_act() -> None:
            large = large_layer(stuck[name])
            wait_until(lambda: any(large in r.path and r.sent >= AFTER for r in lab.proxy.requests))
            time.sleep(1)
            acted.append(time.monotonic())
            act()

        acted: list[float] = []
        thread = threading.Thread(target=wait_and_act)
        thread.start()
        found = lab.pull(engine, [stuck[name]], stop=stop, limits=PATIENT)
        ended = time.monotonic()
        thread.join()
        return {**found, "after": ended - acted[0]}

    with lab.running(state) as engine:
        optional = [Request(stuck["optional"], required=False), Request(good["optional"])]
        result["optional"] = lab.pull(engine, optional, limits=HASTY, attempts=1)
        result["optional"]["has"] = [engine.has(w.image) for w in optional]
        required = [unknown(good["required"]), stuck["required"]]
        result["required"] = lab.pull(engine, required, limits=PATIENT)
        stop = threading.Event()
        result["cancelled"] = during(engine, "cancelled", stop.set, stop)
        daemon = "dockerd" if lab.engine == "docker" else "containerd"
        result["killed"] = during(engine, "killed", lambda: kill(daemon))
    lab.proxy.faults = ()
    with lab.running(state) as engine:
        everything = [*stuck.values(), *good.values()]
        result["kept"] = engine.has(good["optional"])
        missing = [image for image in everything if not engine.has(image)]
        result["again"] = lab.pull(engine, missing, limits=PATIENT, attempts=1)
        result["again"]["has"] = [engine.has(image) for image in everything]
    lab.module.strip(state)
    result["partial"] = partial(state)
    return result


@pytest.fixture(scope="module")
def ended(worker: Workplace, engine: str) -> Result:
    result: Result = with_each_engine(end_early, worker, engine)
    return result


def test_an_image_that_is_not_required_may_fail(ended: Result) -> None:
    found = ended["optional"]
    assert not found["bug"] and not found["error"]
    assert found["has"] == [False, True]
    assert list(found["failed"]) == [f"{HOST}/optional:1"]
    assert "no progress" in found["failed"][f"{HOST}/optional:1"]


def test_the_first_required_image_that_fails_ends_the_others(ended: Result) -> None:
    found = ended["required"]
    assert not found["bug"]
    assert found["error"].startswith(f"{HOST}/goodrequired:1: ") and "not found" in found["error"]
    assert "\n" not in found["error"], "the other one did not fail, it was ended"
    assert sorted(r["outcome"] for r in found["records"]) == ["failed", "stopped"]


def test_stop_ends_a_pull_within_seconds(ended: Result) -> None:
    found = ended["cancelled"]
    assert not found["bug"] and found["after"] < 5
    assert found["error"].startswith(f"{HOST}/cancelled:1: the build ends")
    assert len(found["records"][0]["attempts"]) == 1


def test_an_engine_that_is_killed_is_told_at_once(ended: Result, engine: str) -> None:
    found = ended["killed"]
    assert not found["bug"] and found["after"] < 5
    assert found["error"].startswith(f"{HOST}/killed:1: {engine} is gone"), found["error"]


def test_a_new_engine_goes_on_where_all_of_this_ended(ended: Result) -> None:
    assert ended["kept"]
    again = ended["again"]
    assert not again["bug"] and not again["error"] and all(again["has"]), again
    assert ended["partial"] == []


# -- a full disk -----------------------------------------------------------------------------------------------


@contextmanager
def small_disk(lab: Lab, mib: int) -> Iterator[Path]:
    """Mount a separate filesystem of this size."""
    file, place = lab.base / "disk.img", lab.folder("disk")
    with file.open("wb") as stream:
        stream.truncate(mib << 20)
    process.run(["mkfs.ext4", "-q", file])
    process.run(["mount", _loop_of(file), place])
    try:
        yield place
    finally:
        process.run(["umount", "--detach-loop", place])
        file.unlink()


def _loop_of(file: Path) -> str:
    """Return a loop device for a file, which is released on unmount; another test may take a free one first."""
    # The namespace's /dev has none of the host's devices.
    if not os.path.exists("/dev/loop-control"):
        os.mknod("/dev/loop-control", 0o20600, os.makedev(10, 237))
    while True:
        loop = process.run(["losetup", "--find"]).stdout.strip()
        if not os.path.exists(loop):
            os.mknod(loop, 0o60600, os.makedev(7, int(loop.removeprefix("/dev/loop"))))
        try:
            process.run(["losetup", loop, file])
        except CommandError:
            if loop == process.run(["losetup", "--find"]).stdout.strip():
                raise
        else:
            return loop


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


def test_a_full_disk_is_told_and_not_tried_again(worker: Workplace, engine: str) -> None:
    found = with_each_engine(fill_disk, worker, engine)
    assert not found["bug"]
    assert found["error"].startswith(f"{HOST}/large:1: ") and "no space left on device" in found["error"]
    assert retry.classify(found["error"]) == "full", "by this a build exits as for a full disk"
    assert len(found["records"][0]["attempts"]) == 1
    assert found["blobs"] == found["layers"] + 1, "each layer and the configuration once"
    # What didn't fit has been removed, so something smaller fits.
    assert found["freed"]
    assert not found["small"]["error"] and found["has"] == [False, True], found["small"]
