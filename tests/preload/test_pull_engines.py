"""Each engine as the bake drives it: what it pulls, keeps, hands over, saves and reports."""

from __future__ import annotations

import json
import tarfile
from typing import Any

import pytest

from image_builder.bake.lock.model import LockedImage
from image_builder.bake.pull.registry import locate
from image_builder.errors import PullError
from image_builder.lab import images
from image_builder.lab.registry import HOST
from tests.support.images.builds import Workplace
from tests.support.registries.pulls import (
    MB,
    PLATFORM,
    Lab,
    Pictures,
    Result,
    family,
    requests_of,
    with_each_engine,
)
from tests.support.registries.raw_images import RawRepository, index
from tests.support.stores.seeds import runnable

pytestmark = pytest.mark.root

_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"


def use_engine(lab: Lab) -> Result:
    """Pull images, remove all but three; continue with a copy of the data root."""
    one, two, three = lab.push("one", 8 * MB, 2 * MB), lab.push("two", MB), lab.push("three", MB)
    pause = lab.base / "pause.tar.gz"
    images.push(lab.registry, "pause", "1.0", images.pause_image(pause))
    four = lab.locate(f"{HOST}/pause:1.0")
    # Eight names of one image share all blobs and the configuration.
    names = [runnable(lab, "same", tag=str(number)) for number in range(8)]
    assert len({image.config for image in names}) == 1
    locked, both = lock_another_platform(lab)
    first, second = lab.folder("state"), lab.folder("state")
    pictures = Pictures()
    lab.proxy.rate = 3 * MB
    with lab.running(first) as engine:
        result = lab.pull(engine, [one, two, three, four], monitor=pictures)
        result["version"] = engine.version()
        # By the index's digest: the engine chooses the platform itself.
        lab.proxy.rate = None
        result["more"] = lab.pull(engine, [both, *names], attempts=1)
        result["has_more"] = [engine.has(image) for image in (both, *names)]
        result["has"] = [engine.has(i) for i in (one, two, three, four)]
        result["removed"] = engine.keep_only([one, two, four])
        result["has_then"] = [engine.has(i) for i in (one, two, three, four)]
        result["stranger"] = engine.has(one.model_copy(update={"digest": two.digest}))
        for image in (one, four):
            engine.mark(image, pin=image is one)
    lab.module.strip(first)
    lab.module.copy(first, second)
    before = len(lab.proxy.requests)
    with lab.running(second) as engine:
        result["taken"] = [engine.has(i) for i in (one, two, three, four)]
        for image in (one, two, four):
            engine.mark(image, pin=image is four)
        result["pinned"] = _pinned(engine) if lab.engine == "containerd" else []
        result["bytes"] = [engine.unpacked_bytes(i) for i in (one, two, four)]
        told: list[int] = []
        target = lab.out / "images.tar"
        result["saved"] = engine.save([one, two, four], target, told.append)
        result["told"] = told[-1]
        result["size"] = target.stat().st_size
        with tarfile.open(target) as archive:
            manifest = archive.extractfile("manifest.json")
            assert manifest
            result["manifest"] = json.load(manifest)
            result["names"] = archive.getnames()
    result["requests"] = requests_of(lab.proxy, "/")[before:]
    result["shown"] = {
        ref: [(p.done, p.total, p.action) for p in parts] for ref, parts in pictures.shown.items()
    }
    result["images"] = [json.loads(i.model_dump_json()) for i in (one, two, four)]
    return {**result, "locked": locked}


def lock_another_platform(lab: Lab) -> tuple[Result, LockedImage]:
    """Lock an image for another processor, both on its own and as part of an index; return an index with ours, too."""
    found: Result = {}
    try:
        lab.push("arm", MB, settings={"architecture": "arm64"})
    except PullError as error:
        found["alone"] = error.message
    # Only its manifest was refused; by now it is in the registry.
    arm = locate(f"{HOST}/arm:1", "linux/arm64", lab.behind)
    amd = lab.push("arm", MB, tag="amd")
    place = RawRepository(lab, "arm")
    entries = [
        (place.described(image.manifest), platform)
        for image, platform in ((arm, "linux/arm64"), (amd, PLATFORM))
    ]
    for tag, listed in (("both", entries), ("other", entries[:1])):
        place.document({**index(listed), "mediaType": _LIST}, tag)
    both = lab.locate(f"{HOST}/arm:both")
    found["chosen"] = [both.manifest == amd.manifest, both.digest != both.manifest, both.config == amd.config]
    try:
        lab.locate(f"{HOST}/arm:other")
    except PullError as error:
        found["index"] = error.message
    return found, both


def _pinned(engine: Any) -> list[str]:
    rows = [line.split() for line in engine._ctr("images", "ls").splitlines()[1:]]
    return sorted(row[0] for row in rows if "io.cri-containerd.pinned=pinned" in row[-1].split(","))


@pytest.fixture(scope="module")
def used(worker: Workplace, engine: str) -> Result:
    result: Result = with_each_engine(use_engine, worker, engine)
    return result


def test_images_are_there_as_they_were_locked(used: Result) -> None:
    assert not used["bug"] and not used["error"]
    assert used["has"] == [True, True, True, True]
    assert not used["stranger"], "the same tag, another digest"
    assert used["version"][0].isdigit()


def test_what_is_not_wanted_any_more_is_removed(used: Result) -> None:
    assert used["has_then"] == [True, True, False, True]
    assert f"{HOST}/three:1" in used["removed"]
    assert not [name for name in used["removed"] if not any(n in name for n in ("/three", "/arm", "/same"))]


def test_a_copied_data_root_has_the_images_without_a_request(used: Result) -> None:
    assert used["taken"] == [True, True, False, True]
    assert used["requests"] == []


def test_pins_are_those_of_the_last_bake(used: Result, engine: str) -> None:
    """Docker has no pins."""
    name, digest = f"{HOST}/pause", used["images"][-1]["digest"]
    expected = sorted([f"{name}:1.0", f"{name}@{digest}"]) if family(engine) == "containerd" else []
    assert used["pinned"] == expected


def test_archive_has_the_images_under_their_names(used: Result) -> None:
    size, sha256 = used["saved"]
    assert size == used["size"] == used["told"] and len(sha256) == 64
    tags = {tag: entry for entry in used["manifest"] for tag in entry["RepoTags"]}
    for image in used["images"]:
        entry = tags[image["ref"]]
        assert image["config"].removeprefix("sha256:") in entry["Config"]
        assert len(entry["Layers"]) == len(image["layers"])
        assert set(entry["Layers"]) <= set(used["names"])
    assert not [tag for tag in tags if "/three" in tag]


def test_unpacked_bytes_are_those_of_the_files(used: Result) -> None:
    one, two, pause = used["bytes"]
    assert 10 * MB <= one < 11 * MB and MB <= two < 1.2 * MB and pause < 100_000


def test_every_layer_was_seen_on_its_way(used: Result, engine: str) -> None:
    records = {record["ref"]: record for record in used["records"]}
    for image in used["images"][:2]:
        (attempt,) = records[image["ref"]]["attempts"]
        for layer in image["layers"]:
            name = layer["digest"] if family(engine) == "containerd" else layer["digest"][7:19]
            phases = attempt["layers"][name]["phases"]
            assert "done" in phases
            if layer["size"] > 4 * MB:
                assert "downloading" in phases, phases
                assert attempt["layers"][name]["downloaded_bytes"] > layer["size"] / 4
                first, last = phases["downloading"]
                assert 0 <= first < last <= phases["done"][1]
    layers = records[used["images"][0]["ref"]]["attempts"][0]["layers"].values()
    if family(engine) == "docker":
        assert any("extracting" in layer["phases"] for layer in layers)


def test_progress_is_shown_in_bytes(used: Result) -> None:
    image = used["images"][0]
    shown = used["shown"][image["ref"]]
    size = sum(layer["size"] for layer in image["layers"])
    assert {total for _, total, _ in shown} == {size}
    assert len({done for done, _, _ in shown}) > 3, "more than begun and done"
    assert shown[-1] == [size, size, "done"]


def test_another_platform_is_refused_and_named(used: Result) -> None:
    locked = used["locked"]
    assert locked["alone"] == f"{HOST}/arm:1: is for linux/arm64, not for {PLATFORM}"
    assert locked["index"] == f"{HOST}/arm:other: none for {PLATFORM}; the registry has linux/arm64"
    assert locked["chosen"] == [True, True, True]


def test_an_index_and_names_of_one_image_are_pulled_at_once(used: Result) -> None:
    assert not used["more"]["error"] and not used["more"]["bug"], used["more"]
    assert used["has_more"] == [True] * 9
