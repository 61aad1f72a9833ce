"""The reading of containerd's answers: recorded from 1.7.24 on Debian 13; 1.6 on Debian 12 writes the same."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from image_builder.node import child
from image_builder.node.child import Completed
from image_builder.node.data_root import scan
from image_builder.node.errors import ProgramError
from image_builder.node.preload import containerd
from image_builder.node.store import Image, chain
from tests.unit.node.preload_answers import CONFIG, IMAGE, INDEX, LAYERS, MANIFEST, PAUSE, PAUSE_MANIFEST, TWO

ONE_TYPE = "application/vnd.docker.distribution.manifest.v2+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
BOTH = "io.cri-containerd.image=managed,io.cri-containerd.pinned=pinned"

# ctr -n k8s.io images list
LIST = f"""\
REF TYPE DIGEST SIZE PLATFORMS LABELS
{PAUSE} {ONE_TYPE} {PAUSE_MANIFEST} 10.8 KiB linux/amd64             io.cri-containerd.image=managed
{TWO}   {INDEX_TYPE} {INDEX} 4.8 MiB  linux/amd64,linux/arm64 {BOTH},x=y
{CONFIG} {INDEX_TYPE} {INDEX} 4.8 MiB  linux/amd64,linux/arm64 -
"""

# ctr -n k8s.io images check --snapshotter overlayfs
CHECK = f"""\
REF TYPE DIGEST STATUS SIZE UNPACKED
{PAUSE} {ONE_TYPE} {PAUSE_MANIFEST} complete (2/2)   10.3 KiB/10.3 KiB true
{TWO} {INDEX_TYPE} {INDEX} incomplete (2/3) 421.0 B/4.8 MiB   true
{CONFIG} {INDEX_TYPE} {INDEX} complete (3/3) 4.8 MiB/4.8 MiB   false
"""

# ctr -n k8s.io content get
CONTENT: dict[str, dict[str, Any]] = {
    INDEX: {"schemaVersion": 2, "manifests": [{"digest": MANIFEST}, {"digest": f"sha256:{'1' * 64}"}]},
    MANIFEST: {"schemaVersion": 2, "config": {"digest": CONFIG}},
}


def listed(**changes: Any) -> dict[str, Any]:
    """Return containerd's list for a good image, with some names changed or added."""
    labels = frozenset({containerd.MANAGED, containerd.PINNED})
    names = {TWO: containerd.Listed(INDEX, labels), IMAGE.by_digest: containerd.Listed(INDEX, labels)}
    return {**names, **changes}


def containerd_fault(
    names: dict[str, Any], checked: dict[str, str], content: dict[str, dict[str, Any]] = CONTENT
) -> str:
    return containerd.containerd_fault(IMAGE, names, checked, lambda digest: content.get(digest, {}))


def test_containerds_list_is_read() -> None:
    found = containerd.parse_list(LIST)
    assert set(found) == {PAUSE, TWO, CONFIG}
    assert found[PAUSE].digest == PAUSE_MANIFEST
    assert found[TWO].labels == {containerd.MANAGED, containerd.PINNED, "x=y"}
    assert found[CONFIG].labels == frozenset()
    assert containerd.parse_list("REF TYPE DIGEST SIZE PLATFORMS LABELS \n") == {}


def test_containerds_check_is_read() -> None:
    assert containerd.parse_check(CHECK) == {
        PAUSE: "",
        TWO: "has not all its content: incomplete (2/3)",
        CONFIG: "is not unpacked: false",
    }


def test_containerd_image_is_good() -> None:
    assert containerd_fault(listed(), {TWO: ""}) == ""


def test_containerd_image_that_was_pulled_by_its_manifest_is_good() -> None:
    names = listed(**{TWO: containerd.Listed(MANIFEST, frozenset())})
    assert containerd_fault(names, {TWO: ""}) == ""


def test_containerd_image_is_missing() -> None:
    assert containerd_fault({}, {}) == "is missing"


def test_containerd_image_is_another() -> None:
    names = listed(**{TWO: containerd.Listed(PAUSE_MANIFEST, frozenset())})
    assert containerd_fault(names, {TWO: ""}) == f"is another image: {PAUSE_MANIFEST}, not {INDEX}"
    other = {**CONTENT, MANIFEST: {"config": {"digest": "sha256:0"}}}
    assert containerd_fault(listed(), {TWO: ""}, other) == f"is another image: sha256:0, not {CONFIG}"


def test_containerd_image_without_a_manifest() -> None:
    without = {INDEX: CONTENT[INDEX]}
    assert "is not there" in containerd_fault(listed(), {TWO: ""}, without)
    assert "does not name" in containerd_fault(listed(), {TWO: ""}, {**CONTENT, INDEX: {"manifests": []}})


def test_containerd_image_in_an_index_of_an_index() -> None:
    inner = {"mediaType": containerd.INDEXES[0], "digest": PAUSE_MANIFEST}
    nested = {**CONTENT, INDEX: {"manifests": [inner]}, PAUSE_MANIFEST: CONTENT[INDEX]}
    assert containerd_fault(listed(), {TWO: ""}, nested) == ""
    assert "does not name" in containerd_fault(listed(), {TWO: ""}, {**nested, PAUSE_MANIFEST: {}})


def test_containerd_image_that_is_not_whole() -> None:
    assert containerd_fault(listed(), {TWO: "is not unpacked: false"}) == "is not unpacked: false"
    assert containerd_fault(listed(), {}) == "was not checked"


def test_nothing_lacks_of_a_named_and_pinned_image() -> None:
    assert list(containerd.lacking(IMAGE, listed())) == []


def test_pin_is_wanted_on_both_names() -> None:
    bare = containerd.Listed(INDEX, frozenset({containerd.MANAGED}))
    assert list(containerd.lacking(IMAGE, {TWO: bare, IMAGE.by_digest: bare})) == [
        f"io.cri-containerd.pinned=pinned on {TWO}",
        f"io.cri-containerd.pinned=pinned on {IMAGE.by_digest}",
    ]


def test_name_by_digest_is_wanted() -> None:
    names = listed()
    del names[IMAGE.by_digest]
    assert list(containerd.lacking(IMAGE, names)) == [f"the name {IMAGE.by_digest}"]
    stale = listed(**{IMAGE.by_digest: containerd.Listed(PAUSE_MANIFEST, frozenset())})
    assert list(containerd.lacking(IMAGE, stale)) == [f"the name {IMAGE.by_digest}"]


def test_unpinned_image_wants_no_pin() -> None:
    image = Image(TWO, INDEX, MANIFEST, CONFIG, False, LAYERS)
    assert containerd.labels(image) == {containerd.MANAGED}


def test_manifest_is_read_from_the_disk(tmp_path: Path) -> None:
    data = json.dumps(CONTENT[MANIFEST]).encode()
    digest = hashlib.sha256(data).hexdigest()
    place = tmp_path / "io.containerd.content.v1.content/blobs/sha256" / digest
    place.parent.mkdir(parents=True)
    place.write_bytes(data)
    # No program runs: ctr is only asked for content that is missing or damaged.
    assert containerd.Containerd("k8s.io", tmp_path)._content(f"sha256:{digest}") == CONTENT[MANIFEST]


def test_lost_layers_are_a_fault() -> None:
    assert containerd.lost_fault(IMAGE, frozenset()) == ""
    assert containerd.lost_fault(IMAGE, frozenset(["ab" * 32])) == "", "another image's"
    assert containerd.lost_fault(IMAGE, frozenset([LAYERS[1][7:]])) == f"has lost layers: {LAYERS[1]}"


# ctr -n k8s.io snapshots --snapshotter overlayfs list: two layers, a container on top, an unpack that was killed
SNAPSHOTS = f"""\
KEY PARENT KIND
{LAYERS[0]}            Committed
sha256:{"c" * 64} {LAYERS[0]} Committed
ended         sha256:{"c" * 64} Active
extract-538217543-b7UT sha256:{"d" * 64} {LAYERS[0]} Active
"""


def test_containerds_snapshots_are_read() -> None:
    found = containerd.parse_snapshots(SNAPSHOTS)
    top = f"sha256:{'c' * 64}"
    assert found == {LAYERS[0]: "", top: LAYERS[0], "ended": top, "extract-538217543-b7UT": LAYERS[0]}
    for key in found:
        assert containerd.stands_on(key, {LAYERS[0]}, found), key
    assert [key for key in found if containerd.stands_on(key, {top}, found)] == [top, "ended"]
    assert not containerd.stands_on("gone", {top}, found)


@dataclass
class Engine:
    """containerd as ctr shows it: names, containers (running or not) and snapshots, which its GC collects.

    A layer is a directory in the data root, or a dangling link. ``tops`` has each image's last chain id.
    """

    root: Path
    names: dict[str, str] = field(default_factory=dict)
    tops: dict[str, str] = field(default_factory=dict)
    running: dict[str, bool] = field(default_factory=dict)
    parents: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, *layers: str, lost: Sequence[str] = (), index: bool = False) -> Image:
        """Add an image. The files of ``lost`` layers are gone; an ``index`` lists another platform that isn't here."""
        diff_ids = tuple(_digest(layer.encode()) for layer in layers)
        config = self._blob({"rootfs": {"type": "layers", "diff_ids": list(diff_ids)}, "config": {"x": name}})
        digest = manifest = self._blob({"schemaVersion": 2, "config": {"digest": config}})
        if index:
            entries = [{"digest": f"sha256:{'1' * 64}"}, {"digest": manifest}]
            digest = self._blob({"schemaVersion": 2, "manifests": entries})
        for layer, made in zip(layers, chain(diff_ids), strict=True):
            self._snapshot(made.chain, made.parent, made.diff_id if layer in lost else "")
            self.tops[digest] = made.chain
        self.names[f"lab/{name}:1"] = digest
        return Image(f"lab/{name}:1", digest, manifest, config, False, diff_ids)

    def contain(self, name: str, image: Image, *, running: bool = False) -> None:
        self._snapshot(name, self.tops[image.digest])
        self.running[name] = running

    def _blob(self, content: dict[str, Any]) -> str:
        data = json.dumps(content).encode()
        path = self.root / "io.containerd.content.v1.content/blobs/sha256" / _digest(data)[7:]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return _digest(data)

    def _files(self, key: str) -> Path:
        return self.root / "io.containerd.snapshotter.v1.overlayfs/snapshots" / _digest(key.encode())[7:19]

    def _snapshot(self, key: str, parent: str, lost: str = "") -> None:
        if key in self.parents:
            return
        self.parents[key] = parent
        self._files(key).mkdir(parents=True)
        if lost:
            (self._files(key) / "fs").symlink_to(f"/nowhere/layers/{lost[7:]}")
        else:
            (self._files(key) / "fs").mkdir()

    def run(self, argv: Sequence[str], *, ok: Container[int] = (0,), **_: object) -> Completed:
        status, said = self._ctr(list(argv[3:]))
        if status not in ok:
            raise ProgramError(f"`{' '.join(argv)}` ended with {status}", status, said)
        return Completed(status, said, "")

    def _ctr(self, words: list[str]) -> tuple[int, str]:
        match words:
            case ["images", "list"]:
                rows = [f"{name} type {digest} 1 B linux/amd64 -" for name, digest in self.names.items()]
                return 0, "\n".join(["REF TYPE DIGEST SIZE PLATFORMS LABELS", *rows])
            case ["snapshots", "--snapshotter", "overlayfs", "list"]:
                rows = [f"{key} {parent} Committed" for key, parent in self.parents.items()]
                return 0, "\n".join(["KEY PARENT KIND", *rows])
            case ["containers", "list", "--quiet"]:
                return 0, "".join(f"{name}\n" for name in self.running)
            case ["containers", "delete", *names]:
                for name in [name for name in names if not self.running[name]]:
                    del self.running[name]
                    self._remove(name)
                left = [name for name in names if name in self.running]
                return (1, f"cannot delete a non stopped container: {left}") if left else (0, "")
            case ["images", "remove", "--sync", *names]:
                for name in names:
                    del self.names[name]
                self._collect()
                return 0, ""
            case _:
                raise AssertionError(words)

    def _collect(self) -> None:
        """Delete the snapshots that no image or container leads to."""
        used: set[str] = set()
        for key in [*(self.tops[digest] for digest in self.names.values()), *self.running]:
            below = key
            while below:
                used.add(below)
                below = self.parents[below]
        for key in set(self.parents) - used:
            self._remove(key)

    def _remove(self, key: str) -> None:
        del self.parents[key]
        shutil.rmtree(self._files(key))


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine(tmp_path)
    monkeypatch.setattr(child, "run", made.run)
    return made


def _forget(engine: Engine, *images: Image) -> frozenset[str]:
    """Forget images; return the layers that are lost afterwards."""
    containerd.Containerd("k8s.io", engine.root).forget(images)
    return scan(engine.root, "containerd").broken


@pytest.mark.parametrize("index", [False, True], ids=["manifest", "index"])
def test_lost_layers_go_with_the_containers_and_the_pulled_images_above_them(
    index: bool, engine: Engine
) -> None:
    one = engine.add("one", "base", "a", lost=["base", "a"])
    pulled = engine.add("pulled", "base", "b", index=index)
    other = engine.add("other", "base of its own", "b")
    engine.names["lab/one@sha256:1"] = one.digest
    engine.contain("of-one", one)
    engine.contain("of-pulled", pulled)
    engine.contain("of-other", other)
    assert len(scan(engine.root, "containerd").broken) == 2
    assert _forget(engine, one, other) == set(), "an import unpacks them"
    assert engine.names == {other.ref: other.digest} and engine.running == {"of-other": False}
    assert [layer.chain for layer in chain(other.diff_ids)] == [
        key for key in engine.parents if key != "of-other"
    ]


def test_a_container_that_runs_stays_and_the_others_go(engine: Engine) -> None:
    one = engine.add("one", "base", lost=["base"])
    engine.contain("ended", one)
    engine.contain("running", one, running=True)
    assert _forget(engine, one) == {one.diff_ids[0][7:]}
    assert engine.running == {"running": True}


def test_without_a_lost_layer_nothing_goes(engine: Engine) -> None:
    one, two = engine.add("one", "base", "a"), engine.add("two", "base", "b", lost=["b"])
    engine.contain("of-one", one)
    assert _forget(engine, one) == {two.diff_ids[1][7:]}, "an image that isn't asked for"
    assert set(engine.names) == {one.ref, two.ref} and engine.running == {"of-one": False}


def test_a_preloaded_image_goes_by_its_digest_where_its_configuration_is_lost_too(engine: Engine) -> None:
    one = engine.add("one", "base", lost=["base"])
    (engine.root / "io.containerd.content.v1.content/blobs/sha256" / one.id[7:]).unlink()
    assert _forget(engine, one) == set() and engine.names == {}
