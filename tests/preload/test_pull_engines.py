"""Both engines of a worker as the bake drives them: what they pull, keep, hand over, save and report."""

from __future__ import annotations

import json
import tarfile
from typing import Any

import pytest

from image_builder.bake.pull.registry import locate
from image_builder.errors import PullError
from image_builder.lab import images
from image_builder.lab.registry import HOST
from tests.support.images.builds import Workplace
from tests.support.registries.pulls import (
    MB,
    NEWER,
    PLATFORM,
    Lab,
    Pictures,
    Result,
    every_engine,
    family,
    isolated,
    requests_of,
    with_each_engine,
)
from tests.support.stores.data_roots import two_images
from tests.support.stores.seeds import bake, node, runnable

pytestmark = pytest.mark.root


def use_engine(lab: Lab) -> Result:
    """Pull four images, remove the third; continue with a copy of the data root."""
    one, two, three = lab.push("one", 8 * MB, 2 * MB), lab.push("two", MB), lab.push("three", MB)
    pause = lab.base / "pause.tar.gz"
    images.push(lab.registry, "pause", "1.0", images.pause_image(pause))
    four = lab.locate(f"{HOST}/pause:1.0")
    first, second = lab.folder("state"), lab.folder("state")
    pictures = Pictures()
    lab.proxy.rate = 3 * MB
    with lab.running(first) as engine:
        result = lab.pull(engine, [one, two, three, four], monitor=pictures)
        result["version"] = engine.version()
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
    return result


def _pinned(engine: Any) -> list[str]:
    rows = [line.split() for line in engine._ctr("images", "ls").splitlines()[1:]]
    return sorted(row[0] for row in rows if "io.cri-containerd.pinned=pinned" in row[-1].split(","))


@pytest.fixture(scope="module", params=every_engine())
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


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
    assert all("/three" in name for name in used["removed"])


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
    if engine == "docker":
        assert any("extracting" in layer["phases"] for layer in layers)


def test_progress_is_shown_in_bytes(used: Result) -> None:
    image = used["images"][0]
    shown = used["shown"][image["ref"]]
    size = sum(layer["size"] for layer in image["layers"])
    assert {total for _, total, _ in shown} == {size}
    assert len({done for done, _, _ in shown}) > 3, "more than begun and done"
    assert shown[-1] == [size, size, "done"]


def lock_another_platform(lab: Lab) -> Result:
    """Lock an image for another processor, both on its own and as part of an index."""
    found: Result = {}
    try:
        lab.push("arm", MB, settings={"architecture": "arm64"})
    except PullError as error:
        found["alone"] = error.message
    # Only its manifest was refused; by now it is in the registry.
    arm = locate(f"{HOST}/arm:1", "linux/arm64", lab.behind)
    amd = lab.push("arm", MB, tag="amd")
    for tag, ours in (("both", [arm, amd]), ("other", [arm])):
        entries = []
        for image in ours:
            os, _, architecture = ("linux/arm64" if image is arm else PLATFORM).partition("/")
            with lab.registry.connect() as pool:
                size = int(
                    pool.request(
                        "GET",
                        f"/v2/arm/manifests/{image.manifest}",
                        headers={"Host": HOST, "Accept": images.MANIFEST_TYPE},
                    ).headers["Content-Length"]
                )
            entries.append(
                {
                    "mediaType": images.MANIFEST_TYPE,
                    "digest": image.manifest,
                    "size": size,
                    "platform": {"os": os, "architecture": architecture},
                }
            )
        kind = "application/vnd.docker.distribution.manifest.list.v2+json"
        index = {"schemaVersion": 2, "mediaType": kind, "manifests": entries}
        with lab.registry.connect() as pool:
            put = pool.request(
                "PUT",
                f"/v2/arm/manifests/{tag}",
                body=json.dumps(index).encode(),
                headers={"Host": HOST, "Content-Type": kind},
            )
            assert put.status == 201, put.data
    both = lab.locate(f"{HOST}/arm:both")
    found["chosen"] = [both.manifest == amd.manifest, both.digest != both.manifest, both.config == amd.config]
    try:
        lab.locate(f"{HOST}/arm:other")
    except PullError as error:
        found["index"] = error.message
    state = lab.folder("state")
    with lab.running(state) as engine:
        # By the index's digest: the engine chooses the platform itself.
        found["pulled"] = lab.pull(engine, [both], attempts=1)
        found["has"] = engine.has(both)
    return found


def test_another_platform_is_refused_and_named(worker: Workplace, engine: str) -> None:
    found = isolated(lock_another_platform, worker, engine)
    assert found["alone"] == f"{HOST}/arm:1: is for linux/arm64, not for {PLATFORM}"
    assert found["index"] == f"{HOST}/arm:other: none for {PLATFORM}; the registry has linux/arm64"
    assert found["chosen"] == [True, True, True]
    assert not found["pulled"]["error"] and not found["pulled"]["bug"] and found["has"], found["pulled"]


def pull_names_of_one_image(lab: Lab) -> Result:
    """Pull the same image under eight names at once, which share all blobs and the configuration."""
    names = [runnable(lab, "same", tag=str(number)) for number in range(8)]
    assert len({image.config for image in names}) == 1
    with lab.running(lab.folder("state")) as engine:
        result = lab.pull(engine, names, attempts=1)
        result["has"] = [engine.has(image) for image in names]
    return result


def test_names_of_one_image_are_pulled_at_once(worker: Workplace, engine: str) -> None:
    found = isolated(pull_names_of_one_image, worker, engine)
    assert not found["bug"] and not found["error"], found
    assert all(found["has"])


def rehearse(lab: Lab) -> Result:
    """Pack what was pulled, seed a blank disk with it, and run a container of each image."""
    pushed = two_images(lab)
    baked = bake(lab, pushed)
    with node(lab, baked.opt) as here:
        seeded = here.seed()
        with here.engine() as engine:
            has = [engine.has(image) for image in pushed]
            seconds = [engine.try_out(image) for image in pushed]
    return {"seeded": seeded, "has": has, "seconds": seconds}


# The archive's versions are rehearsed by tests/disk/test_preload_seed.py.
@pytest.mark.parametrize("engine", [e for e in every_engine() if e.values[0] in NEWER], indirect=True)
def test_what_a_newer_engine_pulled_is_seeded_and_runs(worker: Workplace, engine: str) -> None:
    found = isolated(rehearse, worker, engine)
    assert found["has"] == [True, True], found
    assert all(seconds is not None for seconds in found["seconds"]), found
