"""Packed and rehearsed stores: a pulled data root's exact files, nothing of the daemon that ran, shared bytes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from image_builder.bake.stages.preload_store import run as preload_store
from image_builder.bake.stages.rehearsal import run as rehearsal
from image_builder.errors import ImageBuilderError
from image_builder.system import namespace
from tests.support.images.builds import Workplace
from tests.support.registries.pulls import ENGINES, MB, Lab, isolated, with_each_engine
from tests.support.stores.seeds import EPOCH, Baked, Result, bake, differences, exact, runnable, stage

pytestmark = pytest.mark.root

# What a daemon keeps for itself (specific to each engine's layout), by the first part or parts of its path.
OF_A_DAEMON = (
    "containers",
    "network",
    "engine-id",
    "buildkit",
    "image/overlay2/layerdb/mounts",
    "image/overlay2/layerdb/tmp",
)


def _layered(lab: Lab) -> Path:
    """Return a layer whose properties are hard to preserve."""
    tree = lab.folder("tree")
    for name, size in (("small", 10), ("page", 4096), ("large", 3 * MB), ("empty", 0)):
        (tree / name).write_bytes(os.urandom(size // 2) + bytes(size - size // 2))
    (tree / "setuid").write_text("x")
    (tree / "setuid").chmod(0o6755)
    (tree / "again").hardlink_to(tree / "setuid")
    (tree / "link").symlink_to("../nowhere")
    os.mkfifo(tree / "fifo", 0o640)
    (tree / ".wh.gone").touch()
    (tree / "opaque").mkdir(mode=0o1777)
    (tree / "opaque/.wh..wh..opq").touch()
    (tree / ("n" * 255)).touch()
    return tree


def _mounted(lab: Lab, baked: Baked) -> Path:
    where = lab.folder("store")
    namespace.mount("erofs", os.fspath(baked.file), os.fspath(where), "ro")
    return where


def _resident(lab: Lab, baked: Baked) -> list[list[str]]:
    """Return the resident layers of a freshly mounted store, those once ``large`` was read, and the layer it is in."""
    layers = _mounted(lab, baked) / "layers"
    before = sorted(rehearsal.resident(layers))
    (large,) = layers.glob("*/large")
    large.read_bytes()
    told = [before, sorted(rehearsal.resident(layers)), [f"sha256:{large.parent.name}"]]
    namespace.unmount(os.fspath(layers.parent))
    return told


def _rehearsed(lab: Lab, baked: Baked) -> Result:
    options = {"images": baked.options, "engines": [lab.engine]}
    inputs = {"preload_store": baked.opt.parent.parent, lab.engine: baked.state.parent}
    ctx = stage(lab, lab.folder("rehearsal"), "rehearsal", options, inputs)
    rehearsal.run(ctx)
    told: Result = json.loads((ctx.product / "tree/opt/preload/rehearsal.json").read_bytes())
    return told


def _packed_again(lab: Lab, baked: Baked) -> list[str]:
    """Pack the same data root again; return the digests of the store and its manifest from both runs."""
    options = {"images": baked.options, "verity": True, "source_date_epoch": EPOCH, "salt": ""}
    inputs = {lab.engine: baked.state.parent, "tools": lab.tools.parent}
    again = stage(lab, lab.folder("again"), "preload_store", options, inputs)
    preload_store.run(again)
    folder = again.product / "tree/opt/preload"
    return [
        hashlib.sha256((where / name).read_bytes()).hexdigest()
        for name in (baked.file.name, "store.json")
        for where in (baked.folder, folder)
    ]


def _packed_without_verity(lab: Lab, baked: Baked) -> list[str]:
    """Pack the same data root without a hash tree; return the digest from the manifest, and the file's own."""
    options = {"images": baked.options, "verity": False, "source_date_epoch": EPOCH}
    inputs = {lab.engine: baked.state.parent, "tools": lab.tools.parent}
    ctx = stage(lab, lab.folder("unchecked"), "preload_store", options, inputs)
    preload_store.run(ctx)
    folder = ctx.product / "tree/opt/preload"
    manifest = json.loads((folder / "store.json").read_bytes())
    assert manifest["verity"] is None
    return [manifest["sha256"], hashlib.sha256((folder / baked.file.name).read_bytes()).hexdigest()]


def pack(lab: Lab) -> Result:
    """Pack one engine's data root, rehearse it, and compare."""
    one, two = runnable(lab, "one", _layered(lab)), lab.push("two", 2 * MB, MB)
    baked = bake(lab, [one, two], pins=[one.ref])
    pulled = baked.state.parent
    where = _mounted(lab, baked)
    folders = json.loads((pulled / "layers.json").read_bytes())
    found: Result = {"manifest": baked.manifest()}
    found["exact"] = {
        layer.diff_id: differences(exact(baked.state / path), exact(where / "layers" / layer.diff_id[7:]))
        for image in (one, two)
        for path, layer in zip(folders[image.ref], image.layers, strict=True)
    }
    found["kinds"] = sorted({oct(path.lstat().st_mode >> 12) for path in (where / "layers").rglob("*")})
    found["opaque"] = [
        os.getxattr(path, "trusted.overlay.opaque").decode() for path in (where / "layers").glob("*/opaque")
    ]
    found["daemon"] = [name for name in OF_A_DAEMON if (where / lab.engine / name).exists()]
    found["owners"] = sorted({(p.lstat().st_uid, p.lstat().st_gid) for p in (where / lab.engine).rglob("*")})
    found["dangling"] = [
        os.fspath(p) for p in (where / lab.engine).rglob("*") if p.is_symlink() and not p.exists()
    ]
    found["top"] = sorted(path.name for path in where.iterdir())
    namespace.unmount(os.fspath(where))
    found["again"] = _packed_again(lab, baked)
    found["without_verity"] = _packed_without_verity(lab, baked)
    found["resident"] = _resident(lab, baked)
    found["rehearsal"] = _rehearsed(lab, baked)
    # A kernel that reclaims memory proactively may have evicted the pages before they were checked: try again.
    for _ in range(2):
        if not found["rehearsal"]["images"][0]["read"]:
            found["rehearsal"] = _rehearsed(lab, baked)
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    found["left"] = [line for line in mounts if f"{lab.base}/rehearsal" in line]
    found["diff_ids"] = {i.ref: [layer.diff_id for layer in i.layers] for i in (one, two)}
    return found


@pytest.fixture(scope="module", params=ENGINES)
def packed(request: pytest.FixtureRequest, worker: Workplace) -> Result:
    found: Result = with_each_engine(pack, worker, str(request.param))
    return found


def test_a_layers_files_are_packed_exactly(packed: Result) -> None:
    # Type, mode, owner, bytes, time in nanoseconds, hard links, extended attributes, device numbers.
    assert {diff_id: wrong for diff_id, wrong in packed["exact"].items() if wrong} == {}
    assert len(packed["exact"]) == 5
    # FIFO, character device (a whiteout), directory, file, symbolic link.
    assert packed["kinds"] == ["0o1", "0o10", "0o12", "0o2", "0o4"]
    assert packed["opaque"] == ["y"]


def test_nothing_of_the_daemon_that_pulled_is_packed(packed: Result) -> None:
    assert packed["daemon"] == []
    assert packed["owners"] == [[0, 0]]
    assert packed["dangling"] == []
    assert packed["top"] == sorted([*packed["manifest"]["engines"], "layers"])


def test_the_manifest_lists_every_layer_with_its_bytes(packed: Result) -> None:
    manifest = packed["manifest"]
    assert {layer["diff_id"] for layer in manifest["layers"]} == set(packed["exact"])
    sizes = sorted(layer["bytes"] for layer in manifest["layers"])
    assert sizes[-1] >= 3 * MB and all(size >= 4096 for size in sizes)
    assert [image["pin"] for image in manifest["images"]] == [True, False]
    verity = manifest["verity"]
    assert verity["hash_offset"] % 4096 == 0 and 0 < verity["hash_offset"] < manifest["bytes"]


def test_the_same_data_root_gives_the_same_bytes(packed: Result) -> None:
    """The dm-verity salt, the filesystem's UUID and its directory times depend on what is packed, not on when."""
    store, store_again, manifest, manifest_again = packed["again"]
    assert store == store_again
    assert manifest == manifest_again


def test_a_store_without_a_hash_tree_has_its_own_hash(packed: Result) -> None:
    told, digest = packed["without_verity"]
    assert told == digest and packed["manifest"]["sha256"] is None


def test_the_rehearsal_tells_what_ran_and_what_was_read(packed: Result) -> None:
    told = packed["rehearsal"]
    one, two = told["images"]
    (engine,) = told["seed"]
    assert one["started"] == {engine: True} and two["started"] == {engine: False}, "the second has no command"
    assert told["seed"][engine]["layers"] == 5
    # Only the pause program was read, not the layer above it.
    assert one["read"] == packed["diff_ids"][one["ref"]][:1] and two["read"] == []
    assert packed["left"] == []


def test_a_layer_is_resident_when_a_file_of_it_was_read(packed: Result) -> None:
    before, after, read = packed["resident"]
    assert before == [] and after == read


def both(lab: Lab) -> Result:
    """Pack what both engines pulled from one list."""
    images = [runnable(lab, "one", _layered(lab)), lab.push("two", MB)]
    products: dict[str, Baked] = {}
    for name, module in ENGINES.items():
        lab.engine, lab.module = name, module
        products[name] = bake(lab, images)
        (products[name].opt / "preload/store.json").unlink()
    inputs = {name: made.state.parent for name, made in products.items()}
    options = {"images": products["docker"].options, "verity": True, "source_date_epoch": EPOCH}
    ctx = stage(lab, lab.folder("both"), "preload_store", options, {**inputs, "tools": lab.tools.parent})
    preload_store.run(ctx)
    document = json.loads((ctx.product / "tree/opt/preload/store.json").read_bytes())
    alone = {name: made.file.stat().st_size for name, made in products.items()}
    return {"manifest": document, "alone": alone, "blobs": _blobs(products["containerd"])}


def _blobs(baked: Baked) -> int:
    folder = baked.state / "io.containerd.content.v1.content/blobs/sha256"
    return sum(path.stat().st_size for path in folder.iterdir())


def test_both_engines_share_their_layers(worker: Workplace) -> None:
    found = isolated(both, worker, "docker")
    manifest: Mapping[str, Any] = found["manifest"]
    assert set(manifest["engines"]) == {"docker", "containerd"}
    assert len(manifest["layers"]) == 4
    # Docker's layers, and what containerd keeps in addition to its own: no layer twice.
    assert manifest["bytes"] < found["alone"]["docker"] + found["blobs"] + 300_000


def foreign(lab: Lab) -> Result:
    """Pack metadata that isn't owned by root."""
    baked = bake(lab, [lab.push("one", 1000)])
    path = next(path for path in (baked.state / "image/overlay2").rglob("*") if path.is_file())
    os.chown(path, 1000, 1000)
    inputs = {"docker": baked.state.parent, "tools": lab.tools.parent}
    options = {"images": baked.options, "verity": False, "source_date_epoch": EPOCH}
    ctx = stage(lab, lab.folder("foreign"), "preload_store", options, inputs)
    try:
        preload_store.run(ctx)
    except ImageBuilderError as error:
        return {"error": error.message, "name": path.name}
    return {"error": ""}


def test_metadata_that_is_not_roots_is_refused(worker: Workplace) -> None:
    found = isolated(foreign, worker, "docker")
    assert "belongs to 1000:1000, not to root" in found["error"] and found["name"] in found["error"]
