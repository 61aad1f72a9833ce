"""The cost of a promotion: its own time, and that of a concurrent reader. Part of the benchmark preload.py."""

from __future__ import annotations

import operator
import os
import signal
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from image_builder.node import files, layout
from image_builder.system import namespace, process
from tests.bench.blank_disks import blank_disk, drop_caches
from tests.bench.first_runs import ROUNDS
from tests.support.registries.pulls import Lab
from tests.support.stores.seeds import AGENT, Baked, Node, node

PAIRS = 12  # of a short measurement
Found = dict[str, Any]


def promotion(lab: Lab, large: Baked) -> Found:
    """Time promoting without a rate limit, and copying the same layers to the same disk with cp and a sync.

    ``promote_copying`` is the promotion's time by its own clock, without the agent's start and the store's unmounting.
    """
    gigabytes = 1 + 1.5 * large.manifest()["images"][0]["bytes"] / 1e9
    ours: list[float] = []
    theirs: list[float] = []
    copying: list[float] = []
    for _ in range(ROUNDS):
        for seconds, work in ((ours, _promote), (theirs, _copy)):
            with blank_disk(lab.folder("ssd"), gigabytes) as ssd, node(lab, large.opt, ssd.path) as here:
                unpaced(here, 0)
                here.seed()
                drop_caches()
                started = time.monotonic()
                work(here)
                seconds.append(time.monotonic() - started)
                if work is _promote:
                    section = here.status()["promotion"]
                    assert section["state"] == "ok" and section["layers_left"] == [], section
                    copying.append(section["seconds"])
    return {
        "promote_ours": round(statistics.median(ours), 2),
        "promote_copying": round(statistics.median(copying), 2),
        "promote_reference": round(statistics.median(theirs), 2),
        "promote_ratio": round(statistics.median(theirs) / statistics.median(ours), 2),
    }


def _promote(here: Node) -> None:
    here.root.run([AGENT, "promote"])


def _copy(here: Node) -> None:
    target = here.disk / "copy"
    target.mkdir()
    names = "\0".join(os.fspath(path) for path in (here.store / layout.LAYERS).iterdir())
    # At the priority of the promotion's workers.
    process.run(
        ["nice", "-n", "19", "xargs", "-0", "-P", "2", "-I", "{}", "cp", "-a", "{}", target], input=names
    )
    files.syncfs(target)


def unpaced(here: Node, rate: int | None) -> None:
    values: Found = {"enabled": True, "settle_seconds": 0, "wait_seconds": 0, "reserve_percent": 1}
    if rate is not None:
        values["bytes_per_second"] = rate
    here.settings(promote=values)
    here.told_of_disk()


def reader(lab: Lab, large: Baked, small: Baked) -> Found:
    """Read the small image cold through an overlay, with the large one's promotion alternately stopped and running.

    The promotion runs at its default rate. The median of pairs counts, since other load on the machine affects both
    reads of a pair.
    """
    gigabytes = 1 + 1.5 * large.manifest()["images"][0]["bytes"] / 1e9
    alone, beside = [], []
    where = lab.folder("small-store")
    namespace.mount("erofs", os.fspath(small.file), os.fspath(where), "ro")
    try:
        with blank_disk(lab.folder("ssd"), gigabytes) as ssd, node(lab, large.opt, ssd.path) as here:
            unpaced(here, None)
            here.seed()
            child = here.agent("promote")
            time.sleep(2)
            for _ in range(PAIRS):
                os.killpg(child.pid, signal.SIGSTOP)
                alone.append(_read_overlay(lab, where))
                os.killpg(child.pid, signal.SIGCONT)
                time.sleep(0.5)
                beside.append(_read_overlay(lab, where))
                assert child.poll() is None, "the promotion ended before the reader"
            child.terminate()
            child.communicate()
    finally:
        namespace.unmount(os.fspath(where))
    return {
        "reader_alone": round(statistics.median(alone), 3),
        "reader_beside": round(statistics.median(beside), 3),
        "reader_slowdown": round(statistics.median(map(operator.truediv, beside, alone)), 2),
    }


def _read_overlay(lab: Lab, store: Path) -> float:
    lowers = ":".join(os.fspath(path) for path in sorted((store / layout.LAYERS).iterdir()))
    merged, upper, work = (lab.folder(name) for name in ("merged", "upper", "work"))
    namespace.mount(
        "overlay", "overlay", os.fspath(merged), f"lowerdir={lowers},upperdir={upper},workdir={work}"
    )
    try:
        drop_caches()
        started = time.monotonic()
        read(merged)
        return time.monotonic() - started
    finally:
        namespace.unmount(os.fspath(merged))


def read(tree: Path) -> None:
    """Read every file below a directory, two at a time."""
    with subprocess.Popen(["find", tree, "-xdev", "-type", "f", "-print0"], stdout=subprocess.PIPE) as files:
        subprocess.run(
            ["xargs", "-0", "-n", "200", "-P", "2", "cat"],
            stdin=files.stdout,
            stdout=subprocess.DEVNULL,
            check=True,
        )
    assert files.returncode == 0
