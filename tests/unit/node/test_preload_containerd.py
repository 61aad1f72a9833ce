"""What is made of containerd's answers: recorded ones of 1.7.24 of Debian 13, 1.6 of Debian 12 writes the same."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from image_builder.node.preload import containerd
from image_builder.node.preload.images import Image
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
    """Return what containerd lists of a good image, with other names changed."""
    labels = frozenset({containerd.MANAGED, containerd.PINNED})
    names = {TWO: containerd.Listed(INDEX, labels), IMAGE.by_digest: containerd.Listed(INDEX, labels)}
    return {**names, **changes}


def containerd_fault(
    names: dict[str, Any], checked: dict[str, str], content: dict[str, dict[str, Any]] = CONTENT
) -> str:
    return containerd.containerd_fault(IMAGE, names, checked, content.get)


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
    # Without a program: ctr is asked for what is not there, or damaged.
    assert containerd.Containerd("k8s.io", tmp_path)._content(f"sha256:{digest}") == CONTENT[MANIFEST]
