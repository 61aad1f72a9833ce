"""Power cuts at every write of a seed and of a promotion: what counts is intact, on every disk that a cut leaves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from image_builder.node.promote import batches
from tests.support.disks.power_cuts import Cut, recorded
from tests.support.images.builds import Workplace
from tests.support.registries.pulls import ENGINES, Lab, with_each_engine
from tests.support.stores.data_roots import two_images
from tests.support.stores.promotion import Node as Promotion
from tests.support.stores.promotion import fill_with_files, isolated
from tests.support.stores.seeds import DISK, Node, Result, bake, differences, listing, node

pytestmark = pytest.mark.root

_SIZE = 24 << 20
# On how many of the copies the agent resumes; all of them are compared.
_RESUMED = 8


# -- promotion ---------------------------------------------------------------------------------------------------


def promotion(here: Promotion) -> Result:
    names = ["first", "second", "third"]
    for number, name in enumerate(names):
        fill_with_files(here.layer(name), number, count=30, size=9000)
    here.disk.mkdir()
    _sync_after_each_exchange(here.disk / "somebody's")
    with recorded(here.base, here.disk, _SIZE) as record:
        (here.disk / ".node").mkdir(mode=0o700)
        here.root.mkdir()
        here.tell(names, workers=1)
        here.pack()
        here.seed_docker(names)
        section = here.promote()
    here.mount_store()
    wrong: list[list[object]] = []
    counts = set()
    for cut in record.cuts():
        with record.disk(cut, here.disk):
            if here.root.exists():
                counts.add(len(here.left()))
                if found := _wrong(here, names):
                    wrong.append([cut.name, *found[:3]])
    return {
        "section": section,
        "writes": len(record.writes),
        "flushes": len(record.flushes),
        "counts": sorted(counts),
        "wrong": wrong,
    }


def _sync_after_each_exchange(file: Path) -> None:
    """Let another program sync a file of its own: names reach the disk then, contents only if they were synced."""
    exchange = batches.exchange

    def exchange_and_sync(copy: Path, link: Path, target: Path) -> bool:
        done = exchange(copy, link, target)
        fd = os.open(file, os.O_WRONLY | os.O_CREAT)
        os.write(fd, b"x")
        os.fsync(fd)
        os.close(fd)
        return done

    batches.exchange = exchange_and_sync


def _wrong(here: Promotion, names: list[str]) -> list[str]:
    """Return the differences from the store, for the layers whose names the seed has created on this copy."""
    return here.differences([n for n in names if os.path.lexists(here.root / f"overlay2/cache-{n}/diff")])


def test_a_promoted_layer_is_whole_wherever_the_power_is_cut(tools_tree: Path) -> None:
    found = isolated(promotion, tools_tree)
    assert found["section"]["state"] == "ok" and found["section"]["done"] == 3, found
    assert found["wrong"] == []
    # The copies show the promotion in progress: each exchange is on the disk before the next begins.
    assert {0, 1, 2, 3} == set(found["counts"]), found
    assert found["writes"] > 20 and found["flushes"] > 8, found


# -- seed --------------------------------------------------------------------------------------------------------


def seed(lab: Lab) -> Result:
    baked = bake(lab, two_images(lab))
    found: Result = {"wrong": [], "resumed": []}
    with node(lab, baked.opt) as here:
        here.disk = here.root.path / DISK.lstrip("/")
        with recorded(lab.base, here.disk, _SIZE) as record:
            found["seed"] = here.seed()
            good, marker = listing(here.data), here.marker()
        here.shut_down()
        cuts = record.cuts()
        resumed = cuts[:: max(1, len(cuts) // _RESUMED)]
        for cut in cuts:
            with record.disk(cut, here.disk):
                if here.data.exists() and (wrong := differences(good, listing(here.data))):
                    found["wrong"].append([cut.name, "the data root is not whole", *wrong[:3]])
                if here.marker() and not here.data.exists():
                    found["wrong"].append([cut.name, "a marker without a data root"])
                if cut in resumed:
                    found["wrong"] += _resume(here, cut, good, marker, found)
        found |= {"writes": len(record.writes), "flushes": len(record.flushes)}
    return found


def _resume(here: Node, cut: Cut, good: Result, marker: str, found: Result) -> list[list[object]]:
    """Let the agent resume on a copy; return where its result differs from that of an uninterrupted seed."""
    again = here.seed()
    found["resumed"].append(again.get("action"))
    wrong = differences(good, listing(here.data))
    here.shut_down()
    staging = (here.disk / ".node/staging/seed").exists()
    if wrong or staging or again["state"] != "ok" or here.marker() != marker:
        return [[cut.name, "going on", wrong[:3], staging, again]]
    return []


@pytest.mark.parametrize("engine", ENGINES)
def test_a_data_root_is_whole_or_not_there_wherever_the_power_is_cut(worker: Workplace, engine: str) -> None:
    found = with_each_engine(seed, worker, engine)
    assert found["seed"]["state"] == "ok" and found["wrong"] == []
    assert {"seeded", "current"} == set(found["resumed"]), found["resumed"]
    assert found["writes"] > 10 and found["flushes"] > 2, found
