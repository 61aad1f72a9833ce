"""Preload stores that don't match their manifest: detected before use, reported by a code, never wrong bytes."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from image_builder.system.sandbox import open_root
from tests.support.images.builds import Workplace
from tests.support.registries.pulls import ENGINES, MB, Lab, isolated, with_each_engine
from tests.support.stores.data_roots import layers_in
from tests.support.stores.seeds import Baked, Node, Result, bake, ctr, docker, exact, node, runnable

pytestmark = pytest.mark.root

OFFSETS = 20
# Where an EROFS has its superblock (Documentation/filesystems/erofs.rst), and how many bytes of it are checked.
_SUPERBLOCK, _SUPERBLOCK_BYTES = 1024, 128


def baked_store(lab: Lab) -> Baked:
    tree = lab.folder("tree")
    (tree / "words").write_bytes(b"".join(f"{number} bottles\n".encode() for number in range(60_000)))
    for number in range(200):
        (tree / f"file{number}").write_text(f"{number}\n" * 300)
    return bake(lab, [runnable(lab, "words", tree), lab.push("random", MB)])


def offsets(size: int, seed: int = 4) -> list[int]:
    """Return offsets all over a store's filesystem: some in its superblock, the others at random."""
    chosen = random.Random(seed)
    first = [_SUPERBLOCK, _SUPERBLOCK + 12, _SUPERBLOCK + 36]
    return [*first, *sorted(chosen.randrange(4096, size) for _ in range(OFFSETS - len(first)))]


def flip(path: Path, offset: int) -> None:
    """Invert one byte of a file."""
    with path.open("r+b") as stream:
        stream.seek(offset)
        (byte,) = stream.read(1)
        stream.seek(offset)
        stream.write(bytes([byte ^ 0xFF]))


def copied(lab: Lab, baked: Baked) -> Baked:
    """Return a copy of a store that may be damaged."""
    opt = lab.folder("opt") / "opt"
    shutil.copytree(baked.opt, opt)
    return Baked(opt, baked.state, baked.images, baked.options)


# -- what dm-verity finds -----------------------------------------------------------------------------------------


def verify_in_userspace(lab: Lab) -> Result:
    """Have veritysetup check a store, intact and damaged: the same tree and the same test as the kernel's."""
    baked = baked_store(lab)
    verity = baked.manifest()["verity"]
    found: Result = {"size": verity["hash_offset"], "damaged": []}
    with open_root([lab.tools], lab.folder("tools"), writable_binds={"/run/store": baked.folder}) as tools:

        def verify() -> tuple[int, str]:
            argv = ["veritysetup", "verify", "--no-superblock", "--hash=sha256"]
            argv += ["--data-block-size=4096", "--hash-block-size=4096", f"--salt={verity['salt']}"]
            argv += [
                f"--data-blocks={verity['hash_offset'] // 4096}",
                f"--hash-offset={verity['hash_offset']}",
            ]
            argv += ["/run/store/store.erofs", "/run/store/store.erofs", verity["root_hash"]]
            done = tools.run(argv, ok=range(256))
            return done.returncode, done.stderr

        found["whole"] = verify()
        tree = verity["hash_offset"] + 100
        for offset in [*offsets(verity["hash_offset"]), tree]:
            flip(baked.file, offset)
            found["damaged"].append([offset, *verify()])
            flip(baked.file, offset)
        found["whole_again"] = verify()
    return found


def test_every_damage_is_found_by_the_hash_tree(worker: Workplace) -> None:
    found = isolated(verify_in_userspace, worker, "docker")
    assert found["whole"][0] == 0 and found["whole_again"][0] == 0, found
    assert len(found["damaged"]) == OFFSETS + 1
    assert [offset for offset, status, _ in found["damaged"] if status == 0] == []


# -- without the check --------------------------------------------------------------------------------------------


def damage_unchecked(lab: Lab) -> Result:
    """Damage a store that is mounted without dm-verity; read everything that can be mounted, and compare."""
    baked = baked_store(lab)
    manifest = baked.manifest()
    layers = [layer["diff_id"][7:] for layer in manifest["layers"]]
    found: Result = {"damaged": []}
    with node(lab, baked.opt) as here:
        found["whole"] = here.seed()["state"]
        good = {name: exact(here.store / "layers" / name) for name in layers}
    for offset in offsets(manifest["verity"]["hash_offset"]):
        bad = copied(lab, baked)
        flip(bad.file, offset)
        with node(lab, bad.opt) as here:
            seeded = here.seed()
            found["damaged"].append([offset, seeded["state"], seeded.get("code", ""), _outcome(here, good)])
            found.setdefault("left", []).extend(_left(here) if seeded["state"] != "ok" else [])
        shutil.rmtree(bad.opt)
    return found


def _outcome(here: Node, good: Mapping[str, Any]) -> str:
    if not os.path.ismount(here.store):
        return "not mounted"
    try:
        now = {name: exact(here.store / "layers" / name) for name in good}
    except OSError as error:
        return f"refused: {os.strerror(error.errno or 0)}"
    return "the same" if now == good else "other bytes"


def _left(here: Node) -> list[str]:
    """Return what a refused store left on the node: a data root, a staging directory, a marker, a mount."""
    kept = [here.data, here.disk / ".node/staging/seed", here.disk / f".node/seed/{here.lab.engine}.json"]
    return [os.fspath(path) for path in kept if path.exists()] + (
        ["mount"] if os.path.ismount(here.store) else []
    )


@pytest.mark.slow
def test_damage_without_the_check_is_what_the_check_is_for(worker: Workplace) -> None:
    found = isolated(damage_unchecked, worker, "docker")
    assert found["whole"] == "ok" and found["left"] == []
    outcomes = {offset: (state, code, outcome) for offset, state, code, outcome in found["damaged"]}
    assert len(outcomes) == OFFSETS
    # Its magic number: no filesystem.
    assert outcomes[_SUPERBLOCK] == ("degraded", "store.mount", "not mounted")
    # Whatever was reported was reported by a code, without an exception.
    for state, code, _ in outcomes.values():
        assert (state, bool(code)) in (("ok", False), ("degraded", True)), outcomes
    # EROFS has no checksums of data: some damage goes unnoticed, so an unchecked store must be declared.
    assert "other bytes" in {outcome for _, _, outcome in outcomes.values()}, outcomes


# -- a manifest that disagrees ------------------------------------------------------------------------------------


def _edited(change: Callable[[Any], None]) -> Callable[[Baked], None]:
    def apply(baked: Baked) -> None:
        path = baked.folder / "store.json"
        document = json.loads(path.read_bytes())
        change(document)
        path.write_text(json.dumps(document))

    return apply


def _truncate(baked: Baked) -> None:
    os.truncate(baked.file, baked.file.stat().st_size - 4096)


def _truncate_both(baked: Baked) -> None:
    os.truncate(baked.file, 8192)
    _edited(lambda m: m.update(bytes=8192))(baked)


def _written(data: bytes) -> Callable[[Baked], None]:
    return lambda baked: _write(baked.folder / "store.json", data)


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


FAULTS: dict[str, tuple[Callable[[Baked], None], str]] = {
    "truncated": (_truncate, "store.truncated"),
    "truncated, and the manifest agrees": (_truncate_both, "store."),
    "gone": (lambda baked: baked.file.unlink(), "store.truncated"),
    "other bytes": (_edited(lambda m: m.update(bytes=m["bytes"] + 1)), "store.truncated"),
    "a layer of the manifest is not in the store": (
        _edited(lambda m: m["layers"].append({"diff_id": f"sha256:{'0' * 64}", "bytes": 1, "entries": 1})),
        "store.disagrees",
    ),
    "a layer of the store is not in the manifest": (_edited(lambda m: m["layers"].pop()), "store.disagrees"),
    "an image with a layer that is nowhere": (
        _edited(lambda m: m["images"][0]["diff_ids"].append(f"sha256:{'1' * 64}")),
        "store.disagrees",
    ),
    "an engine too many": (
        _edited(lambda m: m["engines"].update(other={"version": "1", "binary": "/bin/sh", "bytes": 1})),
        "store.disagrees",
    ),
    "no such engine": (
        _edited(lambda m: m.update(engines={"other": {"version": "1", "binary": "/bin/sh", "bytes": 1}})),
        "seed.engine",
    ),
    "the engine's program is gone": (
        _edited(lambda m: next(iter(m["engines"].values())).update(binary="/nowhere")),
        "seed.engine",
    ),
    "another format": (_edited(lambda m: m.update(format=2)), "store.manifest"),
    "no images": (_edited(lambda m: m.pop("images")), "store.manifest"),
    "engines that are a list": (_edited(lambda m: m.update(engines=[])), "store.manifest"),
    "a list": (_written(b"[]"), "store.manifest"),
    "empty": (_written(b""), "store.manifest"),
    "no text": (_written(bytes(range(256))), "store.manifest"),
    "half": (_written(b'{"format": 1, "id": "x", "file'), "store.manifest"),
    "no manifest": (lambda baked: (baked.folder / "store.json").unlink(), "store.manifest"),
}


# The fault after which an engine's images are checked.
LOADED = "gone"
# A manifest is judged alike for all engines; but containerd must run to lose its links.
MET = {
    "docker": tuple(FAULTS),
    "containerd": (LOADED, "an image with a layer that is nowhere", "no such engine"),
}


def broken_links(here: Node) -> list[Path]:
    """Return the layers of the data root whose links are broken on the node."""
    links = [path for path in layers_in(here.lab.engine, here.data) if path.is_symlink()]
    root = here.root.path
    return [path for path in links if not (root / os.readlink(path).lstrip("/")).is_dir()]


def _use(here: Node, baked: Baked) -> None:
    """Leave what a reboot leaves: a container that has exited, on seeded layers.

    For containerd, also a pulled image that has a seeded layer, with a container of its own: its metadata refers to
    all of it.
    """
    image, lab = baked.images[0], here.lab
    tree = lab.folder("tree")
    (tree / "pulled").write_text("pulled")
    pulled = runnable(lab, "pulled", tree)
    with here.engine() as running:
        if lab.engine == "docker":
            docker(here, "create", "--network", "none", "--name", "ended", image.ref)
            return
        assert lab.pull(running, [pulled])["error"] == ""
        for number, ref in enumerate((image.ref, pulled.ref)):
            ctr(here, "containers", "create", "--snapshotter", "overlayfs", ref, f"ended-{number}")


def _load(here: Node, baked: Baked) -> Result:
    """Let the node's preload load what the engine lacks; return what the engine has then."""
    with here.engine() as running:
        child = here.agent("preload")
        said = child.communicate()[0].decode()
        return {
            "exit": child.returncode,
            "said": said,
            "has": [running.has(image) for image in baked.images],
            "runs": [running.try_out(image) for image in baked.images[:1]],
            "links": len(broken_links(here)),
            "containers": "" if here.lab.engine == "docker" else ctr(here, "containers", "list", "--quiet"),
        }


def _trusted(lab: Lab, baked: Baked) -> Result:
    """Seed from a good store where it must be checked, from one that can't be, from one that was found damaged."""
    found: Result = {}
    with node(lab, baked.opt) as here:
        here.settings(verity="require")
        found["required"] = here.seed()
        found["required_left"] = _left(here)
    unchecked = bake(lab, list(baked.images), verity=False, salt="unchecked")
    with node(lab, unchecked.opt) as here:
        here.settings(verity="require")
        found["never made"] = here.seed()
    with node(lab, baked.opt) as here:
        # Promotion in an earlier boot couldn't read it.
        document = {"store": baked.manifest()["id"], "layer": "x", "reason": "Input/output error"}
        (here.disk / ".node").mkdir()
        (here.disk / ".node/store-damaged.json").write_text(json.dumps(document))
        found["known"] = here.seed()
    return found


def disagree(lab: Lab) -> Result:
    """Seed from each faulty store twice: onto a blank disk, and onto one that was seeded from the good store."""
    baked = baked_store(lab)
    found: Result = {}
    for name in MET[lab.engine]:
        change, _ = FAULTS[name]
        bad = copied(lab, baked)
        change(bad)
        with node(lab, baked.opt) as here:
            here.use(bad.opt)
            blank = here.seed()
            left = _left(here)
            here.blank()
            here.use(baked.opt)
            assert here.seed()["state"] == "ok"
            if name == LOADED:
                _use(here, baked)
            here.shut_down()
            here.use(bad.opt)
            (here.data / "mine").write_text("precious")
            used = here.seed()
            found[name] = {
                "blank": blank,
                "left": left,
                "used": used,
                "links": len(broken_links(here)),
                "mine": (here.data / "mine").read_text(),
                "trash": [path.name for path in (here.disk / ".node").glob("trash/*")],
            }
            if name == LOADED:
                found["loaded"] = _load(here, baked)
        shutil.rmtree(bad.opt)
    return {**found, "trusted": _trusted(lab, baked) if lab.engine == "docker" else {}}


@pytest.fixture(scope="module")
def disagreed(worker: Workplace) -> Result:
    return {engine: with_each_engine(disagree, worker, engine) for engine in ENGINES}


_MET = [(engine, name) for engine, names in MET.items() for name in names]


@pytest.mark.parametrize(("engine", "name"), _MET)
def test_a_store_that_is_not_as_its_manifest_says_is_refused(
    disagreed: Result, engine: str, name: str
) -> None:
    code = FAULTS[name][1]
    found = disagreed[engine][name]
    blank = found["blank"]
    assert (blank["state"], blank["exit"]) == ("degraded", 0) and blank["code"].startswith(code), blank
    assert "images come from the archive" in blank["said"] and "Traceback" not in blank["said"]
    assert found["left"] == []


@pytest.mark.parametrize(("engine", "name"), _MET)
def test_a_data_root_in_use_outlives_such_a_store(disagreed: Result, engine: str, name: str) -> None:
    found = disagreed[engine][name]
    used = found["used"]
    assert found["mine"] == "precious" and found["trash"] == [] and used["exit"] == 0, used
    if FAULTS[name][1] == "seed.engine" and not used.get("code"):
        assert used["action"] == "current" and found["links"] == 0, "the links lead into a sound store"
        return
    # The links are checked first, and that rejects a store with a different engine from its manifest's.
    codes = (FAULTS[name][1].partition(".")[0], "store.disagrees")
    assert used["state"] == "degraded" and used["code"].startswith(codes), used
    # Docker's links are removed while it is stopped; containerd is told to remove its own when it runs.
    assert (found["links"] == 0) == (engine == "docker"), used


@pytest.mark.parametrize("engine", ENGINES)
def test_what_a_lost_store_held_is_loaded_from_the_archive(disagreed: Result, engine: str) -> None:
    loaded = disagreed[engine]["loaded"]
    assert loaded["exit"] == 0, loaded["said"]
    assert loaded["has"] == [True, True] and loaded["links"] == 0
    assert all(seconds > 0 for seconds in loaded["runs"])
    # Containers that had exited still referred to the lost layers.
    assert loaded["containers"] == ""


# -- without an archive -------------------------------------------------------------------------------------------


def bare(lab: Lab) -> Result:
    """Bake without an archive; boot from a good store and from a truncated one."""
    baked = bake(lab, [lab.push("one", MB), lab.push("two", MB)], archive=False)
    found: Result = {"opt": sorted(path.name for path in baked.opt.iterdir())}
    cut = copied(lab, baked)
    os.truncate(cut.opt / "preload/store.erofs", 4096)
    for name, images in (("good", baked), ("cut", cut)):
        with node(lab, images.opt) as here:
            here.seed()
            with here.engine() as running:
                child = here.agent("preload")
                said = child.communicate()[0].decode()
                has = [running.has(image) for image in baked.images]
            told = here.status()
            environment = (here.root.path / "run/node/kubelet.env").read_text()
            if name == "cut":  # the disk was at fault, for one boot
                here.shut_down()
                here.use(baked.opt)
                found["again"] = {"seed": here.seed(), **_load(here, baked)}
        found[name] = {"exit": child.returncode, "said": said, "has": has, "env": environment} | told
    return {**found, "refs": [image.ref for image in baked.images]}


@pytest.mark.parametrize("engine", ENGINES)
def test_without_an_archive_a_lost_store_is_a_taint_and_names_each_image(
    worker: Workplace, engine: str
) -> None:
    found: Result = with_each_engine(bare, worker, engine)
    assert found["opt"] == ["preload", "preloaded_docker_images.json"]
    good, cut = found["good"], found["cut"]
    assert (good["exit"], good["preload"]["state"], good["preload"]["seeded"]) == (0, "ok", 2), good["said"]
    assert good["has"] == [True, True] and "taints" not in good["env"]
    assert (cut["exit"], cut["preload"]["state"], cut["preload"]["code"]) == (1, "failed", "preload.missing")
    assert cut["preload"]["problems"] == [f"{ref} is missing" for ref in found["refs"]]
    assert "without an archive of them: the seed reported store.truncated" in cut["preload"]["reason"]
    assert cut["has"] == [False, False], "nothing was pulled"
    assert "--register-with-taints=image-builder/preload=preload.missing:NoSchedule" in cut["env"]
    again = found["again"]
    assert again["seed"]["action"] == {"docker": "repaired", "containerd": "reseeded"}[engine], again["seed"]
    assert (again["exit"], again["has"], again["links"]) == (0, [True, True], 0), again["said"]


# -- what a store is taken for ------------------------------------------------------------------------------------


def test_what_a_store_is_taken_for(disagreed: Result) -> None:
    found = disagreed["docker"]["trusted"]
    # This kernel has no device mapper, or this root no loop device: either way the agent reports it, and may try
    # again.
    assert found["required"]["code"] in ("store.verity", "store.io") and found["required_left"] == []
    assert found["never made"]["code"] == "store.verity"
    assert "without dm-verity" in found["never made"]["reason"]
    known = found["known"]
    assert (known["state"], known["code"]) == ("degraded", "store.damaged")
    assert "Input/output error" in known["reason"]
