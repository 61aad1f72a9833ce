"""One ID, one tree: stages that are made again, later, elsewhere, by a caller with a different umask.

What may differ is named here and in docs/decisions/0006 and 0007: which layers containers were seen to read in the
rehearsal. An engine's own records and archive may, too, so all of these use the same data root.
"""

from __future__ import annotations

import gzip
import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.images.builds import Workplace
from tests.support.images.fixtures import WHOLE

pytestmark = pytest.mark.root

REHEARSAL = "tree/opt/preload/rehearsal.json"


class Entry(NamedTuple):
    """What a manifest says about a file; times after the build's date become that date, in every image format."""

    mode: int
    owner: int
    group: int
    size: int
    time: int
    device: int
    content: str
    attributes: str


def _meta(store: Path, stage_id: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((store / "objects" / stage_id / "meta.json").read_bytes())
    return found


def _entries(store: Path, stage_id: str, epoch: int) -> dict[str, Entry]:
    """Return what the manifest of a stage has, by path below its product."""
    found = {}
    with gzip.open(store / "objects" / stage_id / "manifest.gz", "rt", encoding="utf-8") as stream:
        for path, mode, owner, group, size, time, *rest in map(json.loads, stream):
            found[path] = Entry(mode, owner, group, size, min(time, epoch * 10**9), *rest)
    return found


def _sealed(store: Path, seal: str) -> dict[str, Entry]:
    """Return the whole tree of an image, as its layers show it together: each path as the topmost one has it."""
    meta = _meta(store, seal)
    shown: dict[str, Entry] = {}
    hidden: set[str] = set()
    for stage_id in (seal, *meta["lowers"]):
        below: set[str] = set()
        for path, entry in _entries(store, stage_id, meta["options"]["source_date_epoch"]).items():
            if not path.startswith("tree/") or path in shown or hidden.intersection(_above(path)):
                continue
            if stat.S_ISCHR(entry.mode) and entry.device == 0:  # overlayfs: deleted
                below.add(path)
                continue
            marks = [word for word in entry.attributes.split() if word.startswith("trusted.overlay.opaque=")]
            if marks or not stat.S_ISDIR(entry.mode):
                below.add(f"{path}/" if marks else path)
            kept = [word for word in entry.attributes.split() if word not in marks]
            shown[path] = entry._replace(attributes=" ".join(kept))
        hidden |= below
    return shown


def _above(path: str) -> Iterator[str]:
    """Yield a path and its ancestors; with a slash, an ancestor stands for its contents without itself."""
    yield path
    while "/" in path:
        path = path.rpartition("/")[0]
        yield from (path, f"{path}/")


def _differences(one: dict[str, Entry], other: dict[str, Entry]) -> list[str]:
    """Return the differences, one line each: only those lines are shown when a test fails."""
    return [
        f"{path}: {one.get(path)} / {other.get(path)}"
        for path in sorted(one.keys() | other.keys())
        if one.get(path) != other.get(path)
    ]


@contextmanager
def _umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def _make_again(place: Workplace, until: str, *names: str) -> None:
    place.forget(*names)
    with _umask(0o077):
        done = place.build("--locked", place.lock, "--stop-after", until)
    assert done.status == 0, done.stderr
    made = {stage["name"] for stage in done.result["stages"] if not stage["cached"]}
    assert made == set(names)


def _assert_same_products(one: Workplace, other: Workplace, *names: str) -> None:
    for name in names:
        stage_id = one.object(name).name
        epoch = _meta(one.store, stage_id)["options"].get("source_date_epoch", 0)
        first, second = (_entries(place.store, stage_id, epoch) for place in (one, other))
        for entries in (first, second):
            entries.pop(REHEARSAL, None)
        assert first, name
        assert _differences(first, second) == [], name


def _assert_same_sealed(one: Workplace, other: Workplace) -> None:
    seal = one.object("seal").name
    first, second = (_sealed(place.store, seal) for place in (one, other))
    for entries in (first, second):
        entries.pop(REHEARSAL, None)
    assert len(first) > 10_000
    assert {"tree/etc/image-release", "tree/usr/bin/dpkg"} <= first.keys()
    assert not [path for path in first if path.startswith("tree/etc/ssh/ssh_host_")]
    assert _differences(first, second) == []


def _assert_same_rehearsals(one: Workplace, other: Workplace) -> None:
    name = one.object("rehearsal").name
    found = []
    for place in (one, other):
        document = json.loads((place.store / "objects" / name / "product" / REHEARSAL).read_bytes())
        found.append(document | {"images": [{**image, "read": None} for image in document["images"]]})
    assert found[0] == found[1] and found[0]["images"]


def test_seal_disk_and_artefacts_are_the_same_again(
    copies: Callable[[Workplace], Workplace], minimal: Workplace
) -> None:
    place = copies(minimal)
    _make_again(place, "convert", "seal", "disk", "convert")
    _assert_same_sealed(minimal, place)
    _assert_same_products(minimal, place, "disk", "convert")


def test_preload_store_and_rehearsal_are_the_same_again(
    copies: Callable[[Workplace], Workplace], request: pytest.FixtureRequest
) -> None:
    built: Workplace = request.getfixturevalue(WHOLE)
    place = copies(built)
    _make_again(place, "rehearsal", "preload_store", "rehearsal")
    _assert_same_products(built, place, "preload_store", "rehearsal")
    _assert_same_rehearsals(built, place)


@pytest.mark.slow
def test_a_whole_worker_is_the_same_again(
    copies: Callable[[Workplace], Workplace], whole_worker: Workplace
) -> None:
    """Make all but the pulled data root again: compile the kubelet, make the initramfs, list the modules."""
    place = copies(whole_worker)
    _make_again(
        place,
        "seal",
        *("tools", "base", "build_root", "kubelet_build", "system", "container_runtime", "preload_store"),
        *("rehearsal", "node", "kubernetes", "seal"),
    )
    _assert_same_products(whole_worker, place, "tools", "base", "preload_store", "rehearsal")
    _assert_same_rehearsals(whole_worker, place)
    _assert_same_sealed(whole_worker, place)
