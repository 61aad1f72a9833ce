"""Disks with a history and agents that were killed: whatever happened before, an engine finds every image."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable

import pytest

from tests.support.images.builds import Workplace
from tests.support.registries.pulls import MB, Lab, with_each_engine
from tests.support.stores.data_roots import LAYERS, NAMES, layers_in, links_in, state_of, two_images
from tests.support.stores.seeds import (
    Baked,
    Node,
    Result,
    bake,
    differences,
    full_disk,
    kill_when,
    listing,
    node,
)

pytestmark = pytest.mark.root

OTHER_VERSION = {
    "docker": "Docker version 27.0.1, build 1234567",
    "containerd": "containerd github.com/containerd/containerd 2.1.4 1234567",
}
OTHER_PATCH = {
    "docker": "Docker version 26.1.99, build 1234567",
    "containerd": "containerd github.com/containerd/containerd 1.7.99~ds1 1234567",
}


# -- a disk with a history ---------------------------------------------------------------------------------------


def disks(lab: Lab) -> Result:
    """Seed disks that aren't blank, and with a different engine."""
    one, two = two_images(lab)
    baked = bake(lab, [one, two])
    other = bake(lab, [one, two, lab.push("three", MB)], salt="another")
    with node(lab, baked.opt) as here:
        here.seed()
        blank = listing(here.data)
        result = _other_store(here, other)
        here.use(baked.opt)
        result |= _foreign(here, baked, blank) | _leftovers(here, blank) | _lost(here, baked, blank)
        result |= _clock(here, baked) | _race(here, blank) | _versions(here) | _full(lab, baked)
    return result


def _other_store(here: Node, other: Baked) -> Result:
    """Seed from another image's store, at first while an engine is running on the data root."""
    result: Result = {}
    here.use(other.opt)
    marker = here.marker()
    with here.engine():
        here.shut_down()
        result["busy"] = here.seed()
        result["busy_marker"] = here.marker() == marker
    here.shut_down()
    result["other"] = here.seed()
    with here.engine() as running:
        result["other_has"] = [running.has(image) for image in other.images]
    result["other_state"] = state_of(here)
    result["other_trash"] = sum(
        len(layers_in(here.lab.engine, path)) for path in here.disk.glob(".node/trash/data.0.*")
    )
    return result


def _foreign(here: Node, baked: Baked, blank: Result) -> Result:
    """Seed the data root of an engine that ran without a store."""
    result: Result = {}
    here.blank()
    (here.data / "containers").mkdir(parents=True)
    (here.data / "containers/mine").write_text("precious")
    result["foreign"] = here.seed()
    result["foreign_kept"] = (here.data / "containers/mine").read_text()
    result["foreign_state"] = state_of(here)
    result["foreign_data"] = differences(blank, listing(here.data))
    with here.engine() as running:
        result["foreign_has"] = [running.has(image) for image in baked.images]
    return result


def _leftovers(here: Node, blank: Result) -> Result:
    """Seed an empty directory, such as a mount point; what a dead agent left; next to a marker without content."""
    result: Result = {}
    here.blank()
    here.data.mkdir()
    result["empty"] = here.seed()
    result["empty_state"] = state_of(here)
    here.blank()
    left = here.disk / ".node/staging/seed/overlay2"
    left.mkdir(parents=True)
    (left / "half").write_text("x")
    result["left"] = here.seed()
    result["left_data"] = differences(blank, listing(here.data))
    result["left_state"] = state_of(here)
    here.shut_down()
    (here.disk / f".node/seed/{here.lab.engine}.json").write_text("[]")
    result["marker"] = here.seed()
    return result


def _lost(here: Node, baked: Baked, blank: Result) -> Result:
    """Seed a data root that lost everything but its marker, then one with names that a power cut left empty."""
    result: Result = {}
    here.shut_down()
    shutil.rmtree(here.data)
    here.data.mkdir()
    result["lost"] = here.seed()
    result["lost_data"] = differences(blank, listing(here.data))
    here.shut_down()
    (here.data / NAMES["docker"]).parent.mkdir(parents=True, exist_ok=True)
    if here.lab.engine == "docker":
        (here.data / NAMES["docker"]).write_bytes(b"")
        result["cut"] = here.seed()
        with here.engine() as running:
            result["cut_has"] = [running.has(image) for image in baked.images]
    return result


def _clock(here: Node, baked: Baked) -> Result:
    """Date every file that the agent reads to 1970. It never reads the date from a clock."""
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
    said = sorted(agent.communicate()[0].decode() for agent in agents)
    return {
        "race": said,
        "race_exits": [agent.returncode for agent in agents],
        "race_data": differences(blank, listing(here.data)),
        "race_state": state_of(here),
    }


def _versions(here: Node) -> Result:
    """Replace the engine's program with another one."""
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
        result[f"{name}_links"] = links_in(here)
    # The engine was replaced after a seed: the new one must not start on the old data root.
    here.blank()
    binary.unlink()
    shutil.copy2(kept, binary)
    here.seed()
    binary.write_text(f"#!/bin/sh\necho '{OTHER_VERSION[here.lab.engine]}'\n")
    here.shut_down()
    result["upgraded"] = here.seed()
    result["upgraded_state"] = state_of(here)
    result["upgraded_mounted"] = os.path.ismount(here.store)
    binary.unlink()
    kept.rename(binary)
    return result


def _full(lab: Lab, baked: Baked) -> Result:
    with full_disk(lab, 1, inodes=20) as disk, node(lab, baked.opt, disk) as here:
        found = {"full": here.seed(), "full_state": state_of(here), "full_data": here.data.exists()}
        found["full_mounted"] = os.path.ismount(here.store)
    return found


@pytest.fixture(scope="module")
def history(worker: Workplace, engine: str) -> Result:
    found: Result = with_each_engine(disks, worker, engine)
    return found


def test_another_images_data_root_gets_what_it_lacks(history: Result, engine: str) -> None:
    other = history["other"]
    assert other["state"] == "ok" and history["other_has"] == [True, True, True]
    if engine == "docker":
        assert other["action"] == "repaired" and other["restored"] == ["registry.lab.internal/three:1"]
        assert history["other_state"] == [f"seed/{engine}.json"], "nothing of it was set aside"
    else:
        # Its databases can't be merged.
        assert other["action"] == "reseeded" and history["other_trash"] > 0
        kept, aside = history["other_state"]
        assert kept == f"seed/{engine}.json" and aside.startswith("trash/data.0.")


def test_a_data_root_is_left_alone_while_its_engine_runs(history: Result, engine: str) -> None:
    busy = history["busy"]
    assert (busy["state"], busy["code"], busy["exit"]) == ("degraded", "seed.busy", 0), busy
    assert f"{engine} runs on it" in busy["reason"] and "nothing was done" in busy["said"]
    assert history["busy_marker"]


def test_a_data_root_that_no_seed_made_is_kept(history: Result, engine: str) -> None:
    assert history["foreign"]["state"] == "ok" and history["foreign_kept"] == "precious"
    assert not [path for path in history["foreign_state"] if path.startswith("trash")]
    if engine == "docker":
        assert history["foreign"]["action"] == "repaired" and history["foreign_has"] == [True, True]
        names = {difference.partition(":")[0] for difference in history["foreign_data"]}
        assert names == {".", "containers", "containers/mine"}
    else:
        assert history["foreign"]["action"] == "left", "its images come from the archive"


def test_an_empty_data_root_is_blank(history: Result, engine: str) -> None:
    assert history["empty"]["action"] == "seeded" and history["empty_state"] == [f"seed/{engine}.json"]


def test_what_a_dead_agent_left_is_removed(history: Result, engine: str) -> None:
    assert history["left"]["action"] == "seeded"
    assert history["left_data"] == [] and history["left_state"] == [f"seed/{engine}.json"]


def test_a_marker_that_says_nothing_counts_as_none(history: Result) -> None:
    assert (history["marker"]["state"], history["marker"]["action"]) == ("ok", "current")


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
    # An engine that already has images keeps them, and may be replaced by a newer one.
    upgraded = history["upgraded"]
    assert (upgraded["state"], upgraded["action"]) == ("ok", "current")
    assert history["upgraded_state"] == [f"seed/{engine}.json"] and history["upgraded_mounted"]


def test_a_full_disk_leaves_nothing_half_made(history: Result) -> None:
    full = history["full"]
    assert (full["state"], full["code"], full["exit"]) == ("degraded", "seed.disk", 1)
    assert "No space left on device" in full["reason"] and "archive" in full["said"]
    assert history["full_state"] == [] and not history["full_data"] and not history["full_mounted"]


# -- an agent that is killed -------------------------------------------------------------------------------------


# The steps at which an agent is met for certain.
LONG = {"mounted", "staging", "1 layers", "5 layers"}


def killed(lab: Lab) -> Result:
    """Kill the agent at each step, then let it start again. (Where it writes what: test_power_cuts.py.)"""
    images = [lab.push(f"image{n}", *[1000] * 12) for n in range(3)]
    baked = bake(lab, images)
    found: Result = {"died": [], "wrong": []}
    with node(lab, baked.opt) as here:
        here.seed()
        good, marker = listing(here.data), here.marker()
        for name, happened in _steps(here).items():
            # A busy machine may see the step when it is over; some are over at once.
            for _ in range(20 if name in LONG else 2):
                here.blank()
                if kill_when(here.agent(), happened):
                    found["died"].append(name)
                    break
            if here.marker() and differences(good, listing(here.data)):
                found["wrong"].append([name, "there is a marker, and the data root is not whole"])
            here.shut_down()
            again = here.seed()
            wrong = differences(good, listing(here.data))
            if wrong or again["state"] != "ok" or here.marker() != marker:
                found["wrong"].append([name, wrong, again])
            if (here.disk / ".node/staging/seed").exists() or not os.path.ismount(here.store):
                found["wrong"].append([name, "staging was left, or no store mounted"])
        with here.engine() as running:
            found["has"] = [running.has(image) for image in images]
    return found


def _steps(here: Node) -> dict[str, Callable[[], bool]]:
    staging = here.disk / ".node/staging/seed"
    layers = staging / LAYERS[here.lab.engine][0]

    def some(count: int) -> Callable[[], bool]:
        return lambda: layers.is_dir() and len(os.listdir(layers)) >= count

    return {
        "mounted": lambda: os.path.ismount(here.store),
        "staging": staging.exists,
        "names": (staging / NAMES[here.lab.engine]).exists,
        "renamed": here.data.exists,
        **{f"{count} layers": some(count) for count in (1, 5, 20)},
    }


def test_an_agent_that_is_killed_at_any_step_leaves_nothing_that_counts(
    worker: Workplace, engine: str
) -> None:
    found = with_each_engine(killed, worker, engine)
    assert found["wrong"] == []
    assert found["has"] == [True, True, True]
    assert set(found["died"]) >= LONG
