"""The rehearsal: what a node does at boot, done once during the bake with the very program that is shipped.

An empty directory is seeded from the preload store, a second daemon is started on it, and each image must be listed
with its digests and start a container; the agent then checks all of them and guards those that are pinned. What a
container reads before it runs tells a node which layers to copy to its disk first. Last, the layers that the engine
mounts for each image must be, in the same order, equal to those that the bake's pull has unpacked: in every file's
type, owner, mode, time, attributes, links and content.

Product: ``tree/opt/preload/rehearsal.json``.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from image_builder.bake import layer_tree
from image_builder.bake.lock.model import Image
from image_builder.bake.pull.engines import ENGINES, RunningEngine
from image_builder.bake.stages import StageContext
from image_builder.bake.stages.preload import run as preload
from image_builder.canonical import JSON
from image_builder.errors import CommandError, ImageBuilderError
from image_builder.node import layout, zipapp
from image_builder.system import cgroups, namespace
from image_builder.system.sandbox import Root, bound, open_root

FORMAT = 1
_AGENT = "/run/image-builder/node-agent"
_DISK = "/run/image-builder/disk"


def run(ctx: StageContext) -> Mapping[str, JSON]:
    """Seed, list and start with each engine. Raises ImageBuilderError naming every image that isn't as locked."""
    options = ctx.plan.options
    stored = {image["ref"] for image in json.loads(_manifest(ctx).read_bytes())["images"]}
    images = [i for i in Image.listed(options["images"]) if i.ref in stored and i.mode != "archive"]
    seeds: dict[str, dict[str, JSON]] = {}
    seconds: dict[str, dict[str, JSON]] = {image.ref: {} for image in images}
    read: dict[str, list[str]] = {image.ref: [] for image in images}
    for name in options["engines"]:
        outcome = _rehearse(ctx, name, images)
        seeds[name] = outcome.seed
        for image in images:
            seconds[image.ref][name] = outcome.seconds[image.ref]
            read[image.ref] += [layer for layer in outcome.read[image.ref] if layer not in read[image.ref]]
    # The durations are in the stage's facts. What was read varies from run to run, too, but nodes rely on it: it is the
    # only thing here that may differ between bakes (docs/decisions/0007).
    document: dict[str, JSON] = {
        "format": FORMAT,
        "seed": {name: {key: seed[key] for key in ("layers", "files")} for name, seed in seeds.items()},
        "images": [
            {
                "ref": image.ref,
                "started": {name: took is not None for name, took in seconds[image.ref].items()},
                "read": list(read[image.ref]),
            }
            for image in images
        ],
    }
    target = ctx.product / "tree" / layout.REHEARSAL.relative_to("/")
    target.parent.mkdir(parents=True)
    target.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    target.chmod(0o644)
    return {"seed": seeds, "seconds": dict(seconds)}


@dataclass(frozen=True)
class Rehearsed:
    """The result with one engine: the agent's report on its seed and, for each image, the seconds until a container ran
    (None for one without a command) and the layers that were first read for it, by diff id.
    """

    seed: dict[str, JSON]
    seconds: Mapping[str, float | None]
    read: Mapping[str, list[str]]


def _manifest(ctx: StageContext) -> Path:
    return ctx.inputs["preload_store"] / "tree" / layout.MANIFEST.relative_to("/")


def _rehearse(ctx: StageContext, name: str, images: list[Image]) -> Rehearsed:
    module = ENGINES[name]
    disk = ctx.work / f"disk-{name}"
    disk.mkdir()
    store = ctx.inputs["preload_store"] / "tree" / layout.STORE_FILE.parent.relative_to("/")
    with open_root(
        ctx.ground,
        ctx.work / f"root-{name}",
        binds={os.fspath(layout.STORE_FILE.parent): store},
        writable_binds={_DISK: disk},
        network=True,
        writable_cgroups=True,
    ) as root:
        ctx.doing(f"seeding {name}")
        try:
            seeded = _seed(root, name)
            # An engine uses a data root that is a mount as its own, and leaves it mounted.
            with (
                cgroups.held(),
                bound(disk / "data", root.path / module.DATA_ROOT.lstrip("/"), read_only=False),
            ):
                seconds, read, folders = _start_all(ctx, name, root, images)
            ctx.doing(f"comparing with what {name} pulled")
            _require_equal(ctx.inputs[name], disk / "data", _store(root), folders)
        finally:
            if os.path.ismount(_store(root)):
                namespace.unmount(os.fspath(_store(root)))
    return Rehearsed(seeded, seconds, read)


def _store(root: Root) -> Path:
    return root.path / layout.MOUNT_POINT.relative_to("/")


def _start_all(
    ctx: StageContext, name: str, root: Root, images: list[Image]
) -> tuple[dict[str, float | None], dict[str, list[str]], dict[str, list[str]]]:
    """Start a container of each image, and make the guards of those that are pinned.

    Return the seconds that each took, the layers first read for it, and the directories of its layers.
    """
    before: set[str] = set()
    seconds: dict[str, float | None] = {}
    read: dict[str, list[str]] = {}
    with ENGINES[name].running(root, downloads=1, endpoints={}, log=ctx.log) as engine:
        _require_listed(engine, images)
        for number, image in enumerate(images, 1):
            ctx.doing(f"starting {image.ref} with {name} ({number} of {len(images)})")
            seconds[image.ref] = engine.try_out(image)
            now = resident(_store(root) / layout.LAYERS)
            read[image.ref] = [layer.diff_id for layer in image.layers if layer.diff_id in now - before]
            before |= now
        ctx.doing(f"checking and guarding with {name}")
        _guard(ctx, name, root, images)
        return seconds, read, {image.ref: engine.layer_folders(image) for image in images}


def _guard(ctx: StageContext, engine: str, root: Root, images: list[Image]) -> None:
    """Run the agent's check of every image, as a node does before its kubelet. Raises ImageBuilderError."""
    refs = {image.ref for image in images}
    listed = [i for i in json.loads(_manifest(ctx).read_bytes())["images"] if i["ref"] in refs]
    document = {"format": preload.FORMAT, "engine": engine, "archive": None, "images": listed}
    (root.path / layout.LIST.relative_to("/")).write_text(json.dumps(document), encoding="utf-8")
    root.run([_AGENT, "preload"], ok=(0, 1))
    status = json.loads((root.path / "run/node/status.json").read_bytes())["preload"]
    if status.get("code") == "preload.pin":
        raise ImageBuilderError(
            "pinned images can't be protected from the kubelet:\n  " + "\n  ".join(status["reasons"]),
            hint="without `pin` in image_preload, the kubelet may delete them when the disk is full",
        )
    if status["state"] != "ok":
        raise ImageBuilderError(f"the check of {engine}'s images fails: {status['code']}: {status['reason']}")


def _require_equal(pulled: Path, data: Path, store: Path, folders: Mapping[str, list[str]]) -> None:
    """Raise ImageBuilderError unless each image's layers are those that were pulled.

    ``pulled`` is the product of the pull, ``data`` the seeded data root, whose links lead into ``store``.
    """
    of_pull: Mapping[str, list[str]] = json.loads((pulled / preload.LAYERS).read_bytes())
    known: dict[str, str] = {}
    for ref, seeded in folders.items():
        if seeded != of_pull[ref]:
            raise ImageBuilderError(f"{ref}: seeded, its layers are {seeded}, not {of_pull[ref]} as pulled")
        for folder in seeded:
            if folder not in known:
                known[folder] = layer_tree.difference(pulled / "state" / folder, _files(data / folder, store))
            if known[folder]:
                raise ImageBuilderError(f"{ref}: a container would not see what was pulled: {known[folder]}")


def _files(folder: Path, store: Path) -> Path:
    """Return where a layer's files are: a link of the seed leads there on a node."""
    return store / layout.LAYERS / os.readlink(folder).rpartition("/")[2] if folder.is_symlink() else folder


def _seed(root: Root, engine: str) -> dict[str, JSON]:
    """Seed the disk with the agent as it is shipped; return the agent's report."""
    agent = root.path / _AGENT.lstrip("/")
    agent.parent.mkdir(parents=True, exist_ok=True)
    agent.write_bytes(zipapp.archive())
    agent.chmod(0o755)
    settings = root.path / "etc/node-agent"
    settings.mkdir(parents=True, exist_ok=True)
    # This host's kernel isn't the node's, so the store, which was just made, is used unchecked here.
    document = {"engine": engine, "data_root": f"{_DISK}/data", "mount_point": _DISK, "verity": "off"}
    (settings / "preload.json").write_text(json.dumps(document), encoding="utf-8")
    try:
        root.run([_AGENT, "seed"])
    except CommandError as error:
        raise ImageBuilderError(f"the seed of {engine} fails: {error.tail}") from error
    status = json.loads((root.path / "run/node/status.json").read_bytes())["seed"]
    if status["state"] != "ok":
        raise ImageBuilderError(f"the seed of {engine} fails: {status['code']}: {status['reason']}")
    return {key: status[key] for key in ("layers", "files", "seconds")}


def _require_listed(engine: RunningEngine, images: list[Image]) -> None:
    if absent := [image.ref for image in images if not engine.has(image)]:
        raise ImageBuilderError(
            f"seeded, the engine does not have {', '.join(absent)} under its tag and digest",
            hint="this engine keeps its data in another way than the seed expects: please report its version",
        )


def resident(layers: Path) -> set[str]:
    """Return the diff ids of the layers that have pages in memory: those that were read since the mount.

    ``layers`` must be in a filesystem that was mounted for this purpose and that nothing else reads.
    """
    return {
        layout.diff_id_of(layer.name)
        for layer in layers.iterdir()
        if any(_is_resident(path) for path in _regular(layer))
    }


def _regular(tree: Path) -> Iterator[str]:
    for folder, _, names in os.walk(tree):
        for name in names:
            path = os.path.join(folder, name)
            info = os.lstat(path)
            if stat.S_ISREG(info.st_mode) and info.st_size:
                yield path


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
_FAILED = ctypes.c_void_p(-1).value


def _is_resident(path: str) -> bool:
    """Return whether any page of a file is in memory (mincore(2)), without reading any."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        if address == _FAILED:
            raise OSError(ctypes.get_errno(), "mmap", path)
        try:
            pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
            if _libc.mincore(address, size, pages) != 0:
                raise OSError(ctypes.get_errno(), "mincore", path)
            return any(byte & 1 for byte in pages.raw)
        finally:
            _libc.munmap(address, size)
    finally:
        os.close(fd)
