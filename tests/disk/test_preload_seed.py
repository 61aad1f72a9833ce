"""A blank disk, the shipped agent, and an engine that finds every image and runs it."""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from image_builder.bake.lock.model import LockedImage
from tests.support.images.builds import Workplace
from tests.support.registries.pulls import EACH, ENGINES, MB, Lab, family, isolated, with_each_engine
from tests.support.stores.data_roots import layers_in, links_in, state_of, trees, two_images
from tests.support.stores.seeds import (
    AGENT,
    Node,
    Result,
    at_digest,
    bake,
    ctr,
    differences,
    docker,
    exact,
    listing,
    node,
    runnable,
)

pytestmark = pytest.mark.root


# containerd 1.6, from an image that is Debian 12.
_DEBIAN_12 = "containerd_debian12"


@pytest.fixture(
    scope="module",
    params=[
        *EACH,
        *(pytest.param(n, marks=pytest.mark.slow) for n in (*ENGINES, _DEBIAN_12) if n not in EACH),
    ],
)
def programs(request: pytest.FixtureRequest) -> str:
    """Return which release of an engine is tested: Debian 13's others are history's (test_preload_seed_history.py)."""
    return str(request.param)


@pytest.fixture(scope="module")
def place(request: pytest.FixtureRequest, programs: str) -> Workplace:
    """Return the image that the programs come from, or are laid over."""
    found: Workplace = request.getfixturevalue("worker_gpu" if programs == _DEBIAN_12 else "worker")
    return found


@pytest.fixture(scope="module")
def engine(programs: str) -> str:
    return family(programs)


def _members(archive: Path) -> dict[str, str]:
    """Return the layers, configurations and manifests in an image archive, by name, with their hashes."""
    found = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            stream = tar.extractfile(member) if member.isreg() else None
            if stream and "blobs/" in member.name:
                found[member.name] = hashlib.sha256(stream.read()).hexdigest()
    return found


def _saved(here: Node, running: Any, images: list[LockedImage]) -> dict[str, str]:
    out = here.root.path / "run/image-builder/out"
    out.mkdir(parents=True, exist_ok=True)
    target = out / "saved.tar"
    running.save(images, target, lambda _done: None)
    found = _members(target)
    target.unlink()
    return found


# -- a blank disk ----------------------------------------------------------------------------------------------


def live(lab: Lab) -> Result:
    """Seed a blank disk, use it, delete an image, pull it again, reboot."""
    one, two = two_images(lab)
    baked = bake(lab, [one, two], pins=[one.ref])
    images = [one, two]
    with node(lab, baked.opt) as here:
        result: Result = {"seed": here.seed(), "links": links_in(here), "state": state_of(here)}
        result["section"] = here.status()
        store = listing(here.store)
        blank = listing(here.data)
        with here.engine() as running:
            result["has"] = [running.has(image) for image in images]
            # Before any container is created: Docker mounts a layer differently after that.
            result["saved"] = differences(
                _members(baked.opt / "preloaded_docker_images.tar"), _saved(here, running, images)
            )
            result["runs"] = [running.try_out(image) for image in images]
            result["names"] = _names(here, images)
            before = len(lab.proxy.requests)
            result["removed"] = running.keep_only([two])
            result["has_then"] = [running.has(image) for image in images]
            result["links_then"] = links_in(here)
            result["asked"] = len(lab.proxy.requests) - before
        result["store"] = differences(store, listing(here.store))
        here.shut_down()
        result["restored"] = here.seed()
        with here.engine() as running:
            result["has_restored"] = [running.has(image) for image in images]
            result["run_restored"] = running.try_out(one) if running.has(one) else None
            # Deleted and pulled: from here on, the layers are the engine's own.
            running.keep_only([two])
            result["pulled"] = lab.pull(running, [one])["error"]
            result["has_pulled"] = [running.has(image) for image in images]
            result["run_pulled"] = running.try_out(one)
            running.keep_only([one])
        here.shut_down()
        result["after_pull"] = here.seed()
        with here.engine() as running:
            result["has_after_pull"] = [running.has(image) for image in images]
            result["runs_after_pull"] = [running.try_out(i) for i in images if running.has(i)]
        here.blank()
        here.seed()
        result["deterministic"] = differences(blank, listing(here.data))
        here.shut_down()
        before_second = listing(here.disk)
        result["second"] = here.seed()
        result["second_changed"] = differences(before_second, listing(here.disk))
        with here.engine():
            result["files"] = _files(here, one)
    return result


def _names(here: Node, images: list[LockedImage]) -> Result:
    if here.lab.engine == "docker":
        found = [json.loads(docker(here, "image", "inspect", image.ref))[0] for image in images]
        return {
            i.ref: [f["Id"], f["RepoDigests"], f["RootFS"]["Layers"]]
            for i, f in zip(images, found, strict=True)
        }
    names = [name for image in images for name in (image.ref, at_digest(image))]
    checked = {line.split()[0]: line.split()[3:] for line in ctr(here, "images", "check").splitlines()[1:]}
    labels = {line.split()[0]: line.split()[-1] for line in ctr(here, "images", "ls").splitlines()[1:]}
    return {name: [checked.get(name), labels.get(name)] for name in names}


def _files(here: Node, image: LockedImage) -> Result:
    """Return the files that a container of the image sees, by name."""
    found: Result = {}
    if here.lab.engine == "docker":
        made = docker(here, "create", "--network", "none", image.ref).strip()
        docker(here, "export", "--output", "/tmp/root.tar", made)
        docker(here, "rm", made)
        with tarfile.open(here.root.path / "tmp/root.tar") as tar:
            return {m.name: [m.mode, m.size, m.type.decode()] for m in tar if not m.isdir()}
    where = here.root.path / "mnt/image"
    where.mkdir(parents=True)
    ctr(here, "images", "mount", image.ref, "/mnt/image")
    for path in where.rglob("*"):
        if not path.is_dir():
            info = path.lstat()
            found[os.fspath(path.relative_to(where))] = [info.st_mode & 0o7777, info.st_size, ""]
    ctr(here, "images", "unmount", "/mnt/image")
    return found


@pytest.fixture(scope="module")
def lived(place: Workplace, programs: str) -> Result:
    found: Result = with_each_engine(live, place, programs)
    return found


def test_a_blank_disk_is_seeded_by_links_alone(lived: Result, engine: str) -> None:
    seed = lived["seed"]
    assert (seed["state"], seed["action"], seed["exit"]) == ("ok", "seeded", 0)
    # Two chains of three, of which the lowest (pause) is shared: `below` is there twice, on a different parent in
    # each.
    assert lived["links"] == seed["layers"] == 5
    assert lived["state"] == [f"seed/{engine}.json"], "no staging, no trash"
    assert lived["section"]["seed"]["engine"] == engine
    assert f"{engine}: seeded, {seed['layers']} layers" in seed["said"]


def test_the_engine_has_every_image_by_tag_and_digest_and_runs_it(lived: Result, engine: str) -> None:
    assert lived["has"] == [True, True]
    assert all(seconds > 0 for seconds in lived["runs"])
    for name, found in lived["names"].items():
        if engine == "docker":
            assert len(found[1]) == 1 and len(found[2]) == 3, name
        else:
            assert found[0][0] == "complete" and found[0][-1] == "true", name
            pinned = "/one" in name
            assert ("io.cri-containerd.pinned=pinned" in found[1]) == pinned
            assert "io.cri-containerd.image=managed" in found[1]


def test_what_is_saved_is_what_was_pulled(lived: Result) -> None:
    assert lived["saved"] == []


def test_a_container_sees_whiteouts_opaque_directories_and_modes(lived: Result) -> None:
    files = lived["files"]
    assert "etc/kept" in files and "etc/hidden" not in files
    assert "opaque/new" in files and "opaque/old" not in files
    assert files["setuid"][0] == 0o4755 and files["big"][1] == 2_000_000


def test_deleting_an_image_deletes_links_and_nothing_of_the_store(lived: Result) -> None:
    assert any("/one" in name for name in lived["removed"])
    assert lived["has_then"] == [False, True]
    assert 0 < lived["links_then"] < lived["links"]
    assert lived["store"] == []
    assert lived["asked"] == 0


def test_a_deleted_image_is_back_after_the_next_boot(lived: Result, engine: str) -> None:
    restored = lived["restored"]
    assert restored["state"] == "ok"
    if engine == "docker":
        assert restored["action"] == "repaired" and restored["restored"] == ["registry.lab.internal/one:1"]
        assert lived["has_restored"] == [True, True] and lived["run_restored"] > 0
    else:
        # Its databases can't be merged: the archive restores it (node-agent preload).
        assert restored["action"] == "current"
        assert lived["has_restored"] == [False, True]


def test_an_image_that_was_pulled_again_is_left_alone(lived: Result, engine: str) -> None:
    assert lived["pulled"] == "" and lived["run_pulled"] > 0
    assert lived["has_pulled"] == [True, True]
    assert lived["after_pull"]["state"] == "ok"
    # Docker: `two` came back next to a pulled `one`; their common layer has a different parent in each.
    assert lived["has_after_pull"] == [True, engine == "docker"]
    assert all(seconds > 0 for seconds in lived["runs_after_pull"])


def test_a_seed_is_deterministic_and_a_second_one_changes_nothing(lived: Result) -> None:
    assert lived["deterministic"] == []
    assert lived["second"]["action"] == "current"
    assert lived["second_changed"] == []


# -- modes -------------------------------------------------------------------------------------------------------


def modes(lab: Lab) -> Result:
    """Seed one image by copying and one by links; another is only in the archive."""
    below, above, other = trees(lab)
    one, two = runnable(lab, "one", below, above), runnable(lab, "two", other)
    three = lab.push("three", MB, 2 * MB)
    baked = bake(lab, [one, two, three], modes={one.ref: "copy", three.ref: "archive"})
    result: Result = {"manifest": baked.manifest(), "three": [layer.diff_id for layer in three.layers]}
    with node(lab, baked.opt) as here:
        result["seed"] = here.seed()
        result["stored"] = sorted(path.name for path in (here.store / "layers").iterdir())
        shown = {}
        for path in layers_in(lab.engine, here.data):
            shown[os.fspath(path.relative_to(here.data))] = path.is_symlink()
        result["links"] = sum(shown.values())
        result["copies"] = len(shown) - result["links"]
        result["exact"] = _compare_copies(here)
        with here.engine() as running:
            result["has"] = [running.has(image) for image in (one, two, three)]
            result["runs"] = [running.try_out(image) for image in (one, two)]
            words = ["image", "load", "-i"] if lab.engine == "docker" else ["images", "import"]
            (docker if lab.engine == "docker" else ctr)(here, *words, "/opt/preloaded_docker_images.tar")
            names = docker(here, "image", "ls") if lab.engine == "docker" else ctr(here, "images", "ls")
            result["loaded"] = "lab.internal/three" in names
            result["files"] = _files(here, one)
    return result


def _compare_copies(here: Node) -> list[list[str]]:
    """Compare each copied layer with the store's layers: it must exactly match one of them."""
    stored = [exact(path) for path in (here.store / "layers").iterdir()]
    copies = [exact(path) for path in layers_in(here.lab.engine, here.data) if not path.is_symlink()]
    return [differences(stored[0], copy) for copy in copies if copy not in stored]


def test_modes_of_images(place: Workplace, programs: str) -> None:
    found = with_each_engine(modes, place, programs)
    assert found["seed"]["state"] == "ok" and found["seed"]["by_archive"] == ["registry.lab.internal/three:1"]
    assert not {name for name in found["stored"] if f"sha256:{name}" in found["three"]}
    # pause, below and above are copied; `other`, which belongs to two, is a link.
    assert (found["copies"], found["links"]) == (3, 1)
    assert found["exact"] == []
    assert found["has"] == [True, True, False] and found["loaded"]
    assert found["files"]["setuid"][0] == 0o4755 and "etc/hidden" not in found["files"]


def compiled(lab: Lab) -> Result:
    """Compile the agent twice, the second time from the result of the first."""
    baked = lab.folder("opt")
    with node(lab, baked) as here:
        agent = here.root.path / AGENT.lstrip("/")
        first = agent.read_bytes()
        said = here.root.run([AGENT, "compile", AGENT]).stdout
        result = {"said": said, "same": agent.read_bytes() == first, "mode": agent.stat().st_mode & 0o777}
        result["seed"] = here.seed()
    return result


def test_compiling_again_changes_nothing_and_no_store_is_named(worker: Workplace) -> None:
    found = isolated(compiled, worker, "docker")
    assert (found["said"], found["same"], found["mode"]) == ("unchanged\n", True, 0o755)
    assert (found["seed"]["state"], found["seed"]["action"]) == ("ok", "none")
