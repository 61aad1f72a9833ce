"""A blank disk, the shipped agent, an engine that finds every image; whatever happened to the disk before."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from image_builder.lock import LockedImage
from tests.builds import Workplace
from tests.pulls import ENGINES, MB, Lab, isolated
from tests.seeds import (
    AGENT,
    Baked,
    Node,
    Result,
    at_digest,
    bake,
    ctr,
    differences,
    docker,
    exact,
    full_disk,
    kill_after,
    kill_when,
    listing,
    node,
    runnable,
)

pytestmark = pytest.mark.root

# Where a data root of each engine names a layer's files.
LAYERS = {
    "docker": ("overlay2", "diff"),
    "containerd": ("io.containerd.snapshotter.v1.overlayfs/snapshots", "fs"),
}
NAMES = {"docker": "image/overlay2/repositories.json", "containerd": "io.containerd.metadata.v1.bolt/meta.db"}
OTHER_VERSION = {
    "docker": "Docker version 27.0.1, build 1234567",
    "containerd": "containerd github.com/containerd/containerd 2.1.4 1234567",
}
OTHER_PATCH = {
    "docker": "Docker version 26.1.99, build 1234567",
    "containerd": "containerd github.com/containerd/containerd 1.7.99~ds1 1234567",
}


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def trees(lab: Lab) -> tuple[Path, Path, Path]:
    """Return three layers: files; what hides some of them and more; others."""
    below, above, other = lab.folder("below"), lab.folder("above"), lab.folder("other")
    for name in ("etc/hidden", "etc/kept", "opaque/old"):
        (below / name).parent.mkdir(exist_ok=True)
        (below / name).write_text(f"{name}\n" * 1000)
    (above / "etc").mkdir()
    (above / "etc/.wh.hidden").touch()
    (above / "opaque").mkdir()
    (above / "opaque/.wh..wh..opq").touch()
    (above / "opaque/new").write_text("new\n")
    (above / "setuid").write_bytes(b"#!/bin/false\n")
    (above / "setuid").chmod(0o4755)
    (above / "setuid2").hardlink_to(above / "setuid")
    (above / "link").symlink_to("/etc/kept")
    (above / "big").write_bytes(b"text " * 400_000)
    (other / "other").write_text("other\n")
    return below, above, other


def two_images(lab: Lab) -> tuple[LockedImage, LockedImage]:
    """Push two images that share a layer, with another one below it in each."""
    below, above, other = trees(lab)
    return runnable(lab, "one", below, above), runnable(lab, "two", other, below)


def _layers(engine: str, data: Path) -> list[Path]:
    """Return each layer's files or link; a link leads somewhere only inside of the root."""
    folder, name = LAYERS[engine]
    places = [path / name for path in (data / folder).iterdir()] if (data / folder).is_dir() else []
    return [path for path in places if os.path.lexists(path)]


def _links(here: Node) -> int:
    return sum(path.is_symlink() for path in _layers(here.lab.engine, here.data))


def _state(here: Node) -> list[str]:
    """Return what of the agent's own is on the disk."""
    kept = here.disk / ".node"
    return sorted(os.fspath(path.relative_to(kept)) for path in kept.glob("*/*"))


def _members(archive: Path) -> dict[str, str]:
    """Return the layers, configurations and manifests in an archive of images, by name, with their hashes."""
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
    """Seed a blank disk, use it, delete an image, pull it again, boot again."""
    one, two = two_images(lab)
    baked = bake(lab, [one, two], pins=[one.ref])
    images = [one, two]
    with node(lab, baked.opt) as here:
        result: Result = {"seed": here.seed(), "links": _links(here), "state": _state(here)}
        result["section"] = here.status()
        store = listing(here.store)
        blank = listing(here.data)
        with here.engine() as running:
            result["has"] = [running.has(image) for image in images]
            # Before any container was made: Docker mounts a layer in another way then.
            result["saved"] = differences(
                _members(baked.opt / "preloaded_docker_images.tar"), _saved(here, running, images)
            )
            result["runs"] = [running.try_out(image) for image in images]
            result["names"] = _names(here, images)
            before = len(lab.proxy.requests)
            result["removed"] = running.keep_only([two])
            result["has_then"] = [running.has(image) for image in images]
            result["links_then"] = _links(here)
            result["asked"] = len(lab.proxy.requests) - before
        result["store"] = differences(store, listing(here.store))
        here.shut_down()
        result["restored"] = here.seed()
        with here.engine() as running:
            result["has_restored"] = [running.has(image) for image in images]
            result["run_restored"] = running.try_out(one) if running.has(one) else None
            # Deleted and pulled: the layers are the engine's own from here on.
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
    """Return what a container of the image sees, by the names of its files."""
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
def lived(worker: Workplace, engine: str) -> Result:
    found: Result = isolated(live, worker, engine, seconds=600)
    return found


def test_a_blank_disk_is_seeded_by_links_alone(lived: Result, engine: str) -> None:
    seed = lived["seed"]
    assert (seed["state"], seed["action"], seed["exit"]) == ("ok", "seeded", 0)
    # Two chains of three, the lowest (pause) is one: `below` is there twice, above another parent in each.
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
        # Its databases can't be merged: the archive brings it (node-agent preload).
        assert restored["action"] == "current"
        assert lived["has_restored"] == [False, True]


def test_an_image_that_was_pulled_again_is_left_alone(lived: Result, engine: str) -> None:
    assert lived["pulled"] == "" and lived["run_pulled"] > 0
    assert lived["has_pulled"] == [True, True]
    assert lived["after_pull"]["state"] == "ok"
    # Docker: `two` came back beside an `one` that was pulled; their common layer has another parent in each.
    assert lived["has_after_pull"] == [True, engine == "docker"]
    assert all(seconds > 0 for seconds in lived["runs_after_pull"])


def test_a_seed_is_deterministic_and_a_second_one_changes_nothing(lived: Result) -> None:
    assert lived["deterministic"] == []
    assert lived["second"]["action"] == "current"
    assert lived["second_changed"] == []


# -- a disk with a history ---------------------------------------------------------------------------------------


def disks(lab: Lab) -> Result:
    """Seed disks that are not blank, and with an engine that is another."""
    one, two = two_images(lab)
    baked = bake(lab, [one, two])
    other = bake(lab, [one, two, lab.push("three", MB)], salt="another")
    result: Result = {}
    with node(lab, baked.opt) as here:
        here.seed()
        blank = listing(here.data)
        # Another image's store.
        with here.engine():
            pass
        here.shut_down()
        here.use(other.opt)
        result["other"] = here.seed()
        with here.engine() as running:
            result["other_has"] = [running.has(image) for image in other.images]
        result["other_state"] = _state(here)
        result["other_trash"] = len(_layers(lab.engine, here.disk / ".node/trash/data.0"))
        here.use(baked.opt)
        # Of an engine that ran without a store.
        here.blank()
        (here.data / "containers").mkdir(parents=True)
        (here.data / "containers/mine").write_text("precious")
        result["foreign"] = here.seed()
        result["foreign_kept"] = (here.disk / ".node/trash/data.0/containers/mine").read_text()
        result["foreign_data"] = differences(blank, listing(here.data))
        # An empty directory, as a mount point's.
        here.blank()
        here.data.mkdir()
        result["empty"] = here.seed()
        result["empty_state"] = _state(here)
        # What a dead agent left.
        here.blank()
        left = here.disk / ".node/staging/seed/overlay2"
        left.mkdir(parents=True)
        (left / "half").write_text("x")
        result["left"] = here.seed()
        result["left_data"] = differences(blank, listing(here.data))
        result["left_state"] = _state(here)
        # A marker that says nothing.
        here.shut_down()
        (here.disk / f".node/seed/{lab.engine}.json").write_text("[]")
        result["marker"] = here.seed()
        # A data root that lost everything but its marker.
        here.shut_down()
        shutil.rmtree(here.data)
        here.data.mkdir()
        result["lost"] = here.seed()
        result["lost_data"] = differences(blank, listing(here.data))
        # Names that a power cut left empty.
        here.shut_down()
        (here.data / NAMES["docker"]).parent.mkdir(parents=True, exist_ok=True)
        if lab.engine == "docker":
            (here.data / NAMES["docker"]).write_bytes(b"")
            result["cut"] = here.seed()
            with here.engine() as running:
                result["cut_has"] = [running.has(image) for image in (one, two)]
        result |= _clock(here, baked) | _race(here, blank) | _versions(here) | _full(lab, baked)
    return result


def _clock(here: Node, baked: Baked) -> Result:
    """Let every file that the agent reads be of 1970. It never asks a clock for the date."""
    here.blank()
    for path in baked.folder.iterdir():
        os.utime(path, (0, 0))
    seeded = here.seed()
    here.shut_down()
    for path in (*here.data.rglob("*"), *(here.disk / ".node").rglob("*")):
        os.utime(path, (0, 0), follow_symlinks=False)
    return {"clock": [seeded["action"], here.seed()["action"]]}


def _race(here: Node, blank: Result) -> Result:
    here.blank()
    agents = [here.agent() for _ in range(4)]
    said = sorted(agent.communicate(timeout=60)[0].decode() for agent in agents)
    return {
        "race": said,
        "race_exits": [agent.returncode for agent in agents],
        "race_data": differences(blank, listing(here.data)),
        "race_state": _state(here),
    }


def _versions(here: Node) -> Result:
    """Install another program in the engine's place."""
    result: Result = {}
    binary = here.root.path / json.loads((here.root.path / "opt/preload/store.json").read_text())["engines"][
        here.lab.engine
    ]["binary"].lstrip("/")
    kept = binary.with_name("kept")
    shutil.copy2(binary, kept)
    for name, line in (("patch", OTHER_PATCH), ("version", OTHER_VERSION)):
        here.blank()
        binary.unlink()
        binary.write_text(f"#!/bin/sh\necho '{line[here.lab.engine]}'\n")
        binary.chmod(0o755)
        result[name] = here.seed()
        result[f"{name}_links"] = _links(here)
    # The engine was made another one after a seed: its data root must not be met by it.
    here.blank()
    binary.unlink()
    shutil.copy2(kept, binary)
    here.seed()
    binary.write_text(f"#!/bin/sh\necho '{OTHER_VERSION[here.lab.engine]}'\n")
    here.shut_down()
    result["upgraded"] = here.seed()
    result["upgraded_state"] = _state(here)
    result["upgraded_mounted"] = os.path.ismount(here.store)
    binary.unlink()
    kept.rename(binary)
    return result


def _full(lab: Lab, baked: Baked) -> Result:
    with full_disk(lab, 1, inodes=20) as disk, node(lab, baked.opt, disk) as here:
        found = {"full": here.seed(), "full_state": _state(here), "full_data": here.data.exists()}
        found["full_mounted"] = os.path.ismount(here.store)
    return found


@pytest.fixture(scope="module")
def history(worker: Workplace, engine: str) -> Result:
    found: Result = isolated(disks, worker, engine, seconds=600)
    return found


def test_another_images_data_root_is_set_aside_and_seeded_anew(history: Result, engine: str) -> None:
    assert (history["other"]["state"], history["other"]["action"]) == ("ok", "reseeded")
    assert history["other_has"] == [True, True, True]
    assert history["other_state"] == [f"seed/{engine}.json", "trash/data.0"]
    assert history["other_trash"] > 0


def test_what_is_not_ours_is_set_aside_whole(history: Result) -> None:
    assert (history["foreign"]["state"], history["foreign"]["action"]) == ("ok", "reseeded")
    assert history["foreign_kept"] == "precious"
    assert history["foreign_data"] == []


def test_an_empty_data_root_is_blank(history: Result, engine: str) -> None:
    assert history["empty"]["action"] == "seeded" and history["empty_state"] == [f"seed/{engine}.json"]


def test_what_a_dead_agent_left_is_removed(history: Result, engine: str) -> None:
    assert history["left"]["action"] == "seeded"
    assert history["left_data"] == [] and history["left_state"] == [f"seed/{engine}.json"]


def test_a_marker_that_says_nothing_counts_as_none(history: Result) -> None:
    assert (history["marker"]["state"], history["marker"]["action"]) == ("ok", "reseeded")


def test_a_data_root_that_lost_everything_is_seeded_anew(history: Result) -> None:
    assert (history["lost"]["state"], history["lost"]["action"]) == ("ok", "seeded")
    assert history["lost_data"] == []


def test_names_that_were_lost_are_repaired(history: Result, engine: str) -> None:
    if engine == "docker":
        assert history["cut"]["action"] == "repaired" and len(history["cut"]["restored"]) == 2
        assert history["cut_has"] == [True, True]
    else:
        assert "cut" not in history


def test_files_of_1970_change_nothing(history: Result) -> None:
    assert history["clock"] == ["seeded", "current"]


def test_of_agents_that_race_one_seeds(history: Result, engine: str) -> None:
    assert history["race_exits"] == [0, 0, 0, 0]
    assert [sum(word in said for said in history["race"]) for word in (": seeded", ": current")] == [1, 3]
    assert history["race_data"] == [] and history["race_state"] == [f"seed/{engine}.json"]


def test_another_minor_version_is_not_trusted_with_the_layout(history: Result, engine: str) -> None:
    assert history["patch"]["state"] == "ok" and history["patch_links"] > 0
    version = history["version"]
    assert (version["state"], version["code"], version["exit"]) == ("degraded", "seed.version", 0)
    assert OTHER_VERSION[engine].split()[2].strip(",") in version["reason"] and history["version_links"] == 0
    upgraded = history["upgraded"]
    assert (upgraded["code"], upgraded["action"]) == ("seed.version", "set aside")
    assert history["upgraded_state"] == ["trash/data.0"]
    assert not history["upgraded_mounted"]


def test_a_full_disk_leaves_nothing_half_made(history: Result) -> None:
    full = history["full"]
    assert (full["state"], full["code"], full["exit"]) == ("degraded", "seed.disk", 0)
    assert "No space left on device" in full["reason"] and "archive" in full["said"]
    assert history["full_state"] == [] and not history["full_data"] and not history["full_mounted"]


# -- an agent that is killed -------------------------------------------------------------------------------------


def killed(lab: Lab) -> Result:
    """Kill the agent at many moments, then let it start again."""
    images = [lab.push(f"image{n}", *[1000] * 12) for n in range(3)]
    baked = bake(lab, images)
    found: Result = {"moments": [], "wrong": []}
    with node(lab, baked.opt) as here:
        here.seed()
        good, marker = listing(here.data), _marker(here)
        here.blank()
        started = time.monotonic()
        here.seed()
        seconds = time.monotonic() - started
        for name, kill in [*_landmarks(here), *_delays(seconds)]:
            here.blank()
            child = here.agent()
            died = kill(child)
            state = _state(here)
            if _marker(here) and differences(good, listing(here.data)):
                found["wrong"].append([name, "there is a marker, and the data root is not whole"])
            here.shut_down()
            again = here.seed()
            found["moments"].append([name, died, bool(state), here.data.exists()])
            wrong = differences(good, listing(here.data))
            if wrong or again["state"] != "ok" or _marker(here) != marker:
                found["wrong"].append([name, wrong, again])
            if (here.disk / ".node/staging/seed").exists() or not os.path.ismount(here.store):
                found["wrong"].append([name, "staging was left, or no store mounted"])
        with here.engine() as running:
            found["has"] = [running.has(image) for image in images]
    return found


def _marker(here: Node) -> str:
    path = here.disk / f".node/seed/{here.lab.engine}.json"
    return path.read_text() if path.exists() else ""


def _landmarks(here: Node) -> list[tuple[str, Callable[[Any], bool]]]:
    staging = here.disk / ".node/staging/seed"
    layers = staging / LAYERS[here.lab.engine][0]

    def some(count: int) -> Callable[[], bool]:
        return lambda: layers.is_dir() and len(os.listdir(layers)) >= count

    moments: dict[str, Callable[[], bool]] = {
        "mounted": lambda: os.path.ismount(here.store),
        "staging": staging.exists,
        "names": (staging / NAMES[here.lab.engine]).exists,
        "renamed": here.data.exists,
        "draft of the marker": (here.disk / f".node/seed/.{here.lab.engine}.json.new").exists,
        **{f"{count} layers": some(count) for count in (1, 5, 10, 20, 30)},
    }
    return [(name, lambda child, m=moment: kill_when(child, m)) for name, moment in moments.items()]  # type: ignore[misc]


def _delays(seconds: float) -> list[tuple[str, Callable[[Any], bool]]]:
    return [
        (f"{number}/12", lambda child, n=number: kill_after(child, seconds * n / 12))  # type: ignore[misc]
        for number in range(3, 12)
    ]


def test_an_agent_that_is_killed_at_any_moment_leaves_nothing_that_counts(
    worker: Workplace, engine: str
) -> None:
    found = isolated(killed, worker, engine, seconds=600)
    assert found["wrong"] == []
    assert found["has"] == [True, True, True]
    died = {name for name, died, *_ in found["moments"] if died}
    assert {"mounted", "staging", "1 layers", "5 layers"} <= died, found["moments"]
    assert len(died) >= 10, found["moments"]


# -- modes -------------------------------------------------------------------------------------------------------


def modes(lab: Lab) -> Result:
    """Seed an image by a copy, one by links; one is for the archive alone."""
    below, above, other = trees(lab)
    one, two = runnable(lab, "one", below, above), runnable(lab, "two", other)
    three = lab.push("three", MB, 2 * MB)
    baked = bake(lab, [one, two, three], modes={one.ref: "copy", three.ref: "archive"})
    result: Result = {"manifest": baked.manifest(), "three": [layer.diff_id for layer in three.layers]}
    with node(lab, baked.opt) as here:
        result["seed"] = here.seed()
        result["stored"] = sorted(path.name for path in (here.store / "layers").iterdir())
        shown = {}
        for path in _layers(lab.engine, here.data):
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
    """Compare each copied layer with the store's: one of them must be exactly like it."""
    stored = [exact(path) for path in (here.store / "layers").iterdir()]
    copies = [exact(path) for path in _layers(here.lab.engine, here.data) if not path.is_symlink()]
    return [differences(stored[0], copy) for copy in copies if copy not in stored]


def test_modes_of_images(worker: Workplace, engine: str) -> None:
    found = isolated(modes, worker, engine)
    assert found["seed"]["state"] == "ok" and found["seed"]["by_archive"] == ["registry.lab.internal/three:1"]
    assert not {name for name in found["stored"] if f"sha256:{name}" in found["three"]}
    # pause, below, above are copied; `other` of two is a link.
    assert (found["copies"], found["links"]) == (3, 1)
    assert found["exact"] == []
    assert found["has"] == [True, True, False] and found["loaded"]
    assert found["files"]["setuid"][0] == 0o4755 and "etc/hidden" not in found["files"]


def compiled(lab: Lab) -> Result:
    """Compile the agent twice, the second time from what the first made."""
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
    assert (found["seed"]["state"], found["seed"]["code"]) == ("degraded", "store.manifest")
