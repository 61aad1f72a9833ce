"""Promotion: copies that match the store exactly, beneath a running container, next to an engine at work."""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from image_builder.node.preload_settings import BYTES_PER_SECOND
from image_builder.node.promote import batches
from image_builder.node.promote.copy import copy_tree
from image_builder.system import namespace
from tests.support.stores.promotion import (
    MB,
    Node,
    Result,
    compare,
    describe,
    diff_id,
    fill_with_everything,
    fill_with_files,
    hex_of,
    isolated,
)

pytestmark = pytest.mark.root


# -- exactly -----------------------------------------------------------------------------------------------------


def everything(node: Node) -> Result:
    fill_with_everything(node.layer("all"))
    fill_with_files(node.layer("more"), 1)
    node.layer("nothing")
    record = node.files / "docker/image/overlay2/layerdb/sha256/chain"
    record.mkdir(parents=True)
    (record / "tar-split.json.gz").write_bytes(random.Random(3).randbytes(70_000))
    names = ["all", "more", "nothing"]
    node.make_disk(256 * MB)
    node.tell(names)
    node.pack()
    node.seed_docker(names)
    mine = node.root / "image/overlay2/layerdb/sha256/chain"
    mine.mkdir(parents=True)
    (mine / "diff").write_text(diff_id("all"))
    (mine / "tar-split.json.gz").symlink_to(
        node.places.store / "docker/image/overlay2/layerdb/sha256/chain/tar-split.json.gz"
    )
    # A container's own link into the store is left alone.
    own = node.root / "overlay2/container/diff"
    own.mkdir(parents=True)
    (own / "diff").symlink_to(node.places.store / "layers")
    old = node.disk / ".node/trash/docker.0/overlay2/x"
    old.mkdir(parents=True)
    (old / "file").write_bytes(bytes(MB))
    (old / "out").symlink_to(node.base)
    before = describe(node.places.store / "layers" / hex_of("all"))
    packed = node.base / "again"
    packed.mkdir()
    namespace.bind(os.fspath(node.places.store), os.fspath(packed), read_only=True)
    section = node.promote()
    diff = node.root / "overlay2/cache-all/diff"
    kinds = {oct(stat.S_IFMT(p.lstat().st_mode)) for p in diff.rglob("*")}
    result = {
        "section": section,
        "kinds": sorted(kinds),
        "entries": len(before),
        "differences": [
            d
            for n in names
            for d in compare(packed / "layers" / hex_of(n), node.root / f"overlay2/cache-{n}/diff")
        ],
        "split": compare(record / "tar-split.json.gz", mine / "tar-split.json.gz"),
        "blocks": {n: (diff / n).stat().st_blocks * 512 for n in ("sparse", "zeros", "big")},
        "left": node.left(),
        "scraps": node.scraps(),
        "trash": os.listdir(node.disk / ".node/trash"),
        "outside": node.base.exists() and node.erofs.exists(),
        "mounted": os.path.ismount(node.places.store),
        "container": (own / "diff").is_symlink(),
        "marker": json.loads((node.disk / ".node/promote.json").read_text()),
    }
    return result | {"again": node.promote()}


def test_a_copy_is_what_the_store_has(tools_tree: Path) -> None:
    found = isolated(everything, tools_tree)
    assert found["entries"] > 90
    assert found["kinds"] == sorted(
        oct(k) for k in (0o10000, 0o20000, 0o40000, 0o60000, 0o100000, 0o120000, 0o140000)
    )
    assert found["differences"] == []
    assert found["split"] == []
    assert found["blocks"]["sparse"] < MB and found["blocks"]["zeros"] == 0
    assert found["blocks"]["big"] >= 5 * MB
    assert found["left"] == [] and found["scraps"] == [] and found["trash"] == [] and found["container"]
    assert found["outside"] and not found["mounted"]
    section = found["section"]
    assert section["state"] == "ok" and section["layers_left"] == [] and section["store"] == "released"
    assert (section["done"], section["total"]) == (4, 4)
    assert found["marker"]["store"] == "feed" and found["marker"]["done"] == 4
    assert found["again"]["state"] == "ok" and found["again"]["done"] == 4


def containerd(node: Node) -> Result:
    fill_with_everything(node.layer("all"))
    blobs = node.files / "containerd/io.containerd.content.v1.content/blobs/sha256"
    blobs.mkdir(parents=True)
    (blobs / "b10b").write_bytes(random.Random(3).randbytes(3 * MB))
    (blobs / "b10b").chmod(0o444)
    node.make_disk(256 * MB)
    node.tell(["all"])
    wanted = json.loads((node.base / "preload.json").read_text()) | {"engine": "containerd"}
    (node.base / "preload.json").write_text(json.dumps(wanted))
    node.pack()
    fs = [node.root / "io.containerd.snapshotter.v1.overlayfs/snapshots" / n / "fs" for n in ("1", "17")]
    for path in fs:
        path.parent.mkdir(parents=True)
        path.symlink_to(node.places.store / "layers" / hex_of("all"))
    blob = node.root / "io.containerd.content.v1.content/blobs/sha256/b10b"
    blob.parent.mkdir(parents=True)
    blob.symlink_to(node.places.store / "containerd" / blob.relative_to(node.root))
    section = node.promote()
    node.mount_store()
    return {
        "section": section,
        "differences": [
            d for path in fs for d in compare(node.places.store / "layers" / hex_of("all"), path)
        ],
        "apart": fs[0].stat().st_ino != fs[1].stat().st_ino,
        "blob": blob.read_bytes() == (blobs / "b10b").read_bytes() and not blob.is_symlink(),
        "mode": stat.S_IMODE(blob.stat().st_mode),
    }


def test_snapshots_and_blobs_of_containerd(tools_tree: Path) -> None:
    found = isolated(containerd, tools_tree)
    assert found["section"]["state"] == "ok" and found["section"]["done"] == 3
    assert found["differences"] == [] and found["apart"] and found["blob"] and found["mode"] == 0o444


def part(one: Path, other: Path) -> None:
    """Turn two names of one file into two equal files."""
    other.unlink()
    shutil.copy2(one, other)


CHANGES: dict[str, Callable[[Path], object]] = {
    "mode": lambda t: (t / "usr/bin/su").chmod(0o755),
    "owner": lambda t: os.lchown(t / "dangling", 77, 79),
    "time": lambda t: os.utime(t / "big", ns=(1, (t / "big").stat().st_mtime_ns + 1)),
    "time of a directory": lambda t: os.utime(t / "usr", ns=(1, 1)),
    "attribute": lambda t: os.removexattr(t / "usr/bin/ping", "security.capability"),
    "opaque": lambda t: os.removexattr(t / "opaque", "trusted.overlay.opaque"),
    "content": lambda t: (t / "exact").open("r+b").write(b"??"),
    "hard link": lambda t: part(t / "plain", t / "usr/plain too"),
    "entry": lambda t: (t / "whiteout").unlink(),
}


def changes(node: Node) -> Result:
    fill_with_everything(node.layer("all"))
    node.make_disk(512 * MB)
    top = node.files / "layers" / hex_of("all")
    found = {}
    for name, change in CHANGES.items():
        copy = node.disk / name
        copy_tree(top, copy)
        same = compare(top, copy)
        change(copy)
        found[name] = [len(same), len(compare(top, copy))]
    return found


def test_the_comparison_sees_every_kind_of_change(tools_tree: Path) -> None:
    found = isolated(changes, tools_tree)
    assert {name: same for name, (same, _) in found.items()} == dict.fromkeys(CHANGES, 0)
    assert [name for name, (_, changed) in found.items() if not changed] == []


# -- a container that runs ---------------------------------------------------------------------------------------

_READER = """
import hashlib, os, sys, time
top, stop = sys.argv[1:]
kept = open(top + "/d1/f1", "rb")
wanted = {n: hashlib.sha256(open(f"{top}/d1/{n}", "rb").read()).hexdigest() for n in os.listdir(top + "/d1")}
rounds = wrong = 0
print("ready", flush=True)
while not os.path.exists(stop):
    kept.seek(0)
    wrong += hashlib.sha256(kept.read()).hexdigest() != wanted["f1"]
    for name, digest in wanted.items():
        wrong += hashlib.sha256(open(f"{top}/d1/{name}", "rb").read()).hexdigest() != digest
    open(top + "/written", "a").write("x")
    rounds += 1
print(rounds, wrong)
"""


def container(node: Node) -> Result:
    fill_with_files(node.layer("below"), 1)
    above = node.layer("above")
    fill_with_everything(above)
    # In an opaque directory, overlay lists a whiteout that it then doesn't find.
    (above / "opaque/whiteout too").unlink()
    node.make_disk(256 * MB)
    node.tell(["below", "above"])
    node.pack()
    node.seed_docker(["below", "above"])
    merged = node.base / "merged"
    layers = [str(node.root / f"overlay2/cache-{n}/diff") for n in ("above", "below")]
    for name in ("upper", "work"):
        (node.disk / name).mkdir()
    merged.mkdir()
    options = f"lowerdir={':'.join(layers)},upperdir={node.disk}/upper,workdir={node.disk}/work"
    namespace.mount("overlay", "overlay", os.fspath(merged), options)
    before = describe(merged)
    stop = node.base / "stop"
    reader = subprocess.Popen(
        [sys.executable, "-c", _READER, merged, stop], stdout=subprocess.PIPE, text=True
    )
    assert reader.stdout and reader.stdout.readline() == "ready\n"
    _wait_for_a_round(reader, merged / "written")
    section = node.promote()
    _wait_for_a_round(reader, merged / "written")
    stop.touch()
    rounds, wrong = map(int, reader.communicate()[0].split())
    (merged / "written").unlink()
    os.utime(merged, ns=(before["."][3],) * 2)  # type: ignore[arg-type]
    left = describe(merged)
    namespace.unmount(os.fspath(merged))
    new = node.base / "new"
    new.mkdir()
    (node.disk / "upper2").mkdir()
    namespace.mount("overlay", "overlay", os.fspath(new), f"lowerdir={':'.join(layers)}")
    after = describe(new)
    return {
        "section": section,
        "rounds": rounds,
        "wrong": wrong,
        "kept": sorted(n for n in before if n != "." and left.get(n) != before[n]),
        "new": sorted(n for n in before if n != "." and _seen(after.get(n)) != _seen(before[n])),
        "entries": len(before),
    }


def _wait_for_a_round(reader: subprocess.Popen[str], written: Path) -> None:
    """Wait until the reader has begun and ended a round; it writes a byte after each."""
    rounds = written.stat().st_size if written.exists() else 0
    while reader.poll() is None and not (written.exists() and written.stat().st_size > rounds + 1):
        time.sleep(0.01)


def _seen(facts: tuple[object, ...] | None) -> tuple[object, ...]:
    """Leave out what overlay makes up: a directory's link count."""
    return facts[:8] if facts else ()


def test_a_running_container_does_not_notice(tools_tree: Path) -> None:
    found = isolated(container, tools_tree)
    assert found["section"]["state"] == "ok" and found["section"]["layers_left"] == []
    assert found["rounds"] >= 2 and found["wrong"] == 0
    assert found["entries"] > 200 and found["kept"] == [] and found["new"] == []


# -- an engine at work -------------------------------------------------------------------------------------------


def changed_names(node: Node) -> Result:
    """Cover what an engine may do between the search for links and the exchange."""
    node.make_disk(96 * MB)
    store, found = Path("/store/layers/x"), {}
    for name in ("link", "gone", "pulled"):
        copy, link = node.disk / f"copy-{name}", node.disk / name
        copy.mkdir()
        (copy / "copy").touch()
        if name == "link":
            link.symlink_to(store)
        elif name == "pulled":
            link.mkdir()
            (link / "pulled").touch()
        exchanged = batches.exchange(copy, link, store)
        found[name] = [exchanged, os.listdir(link) if link.is_dir() else None, os.path.lexists(copy)]
    return found


def test_the_engines_own_changes_stay(tools_tree: Path) -> None:
    assert isolated(changed_names, tools_tree) == {
        "link": [True, ["copy"], False],
        "gone": [False, None, True],
        "pulled": [False, ["pulled"], True],
    }


def test_the_default_rate_is_a_number_of_megabytes() -> None:
    assert 16 * MB <= BYTES_PER_SECOND <= 128 * MB
