"""The preload: pull container images with the image's own engine, and pack them for the nodes.

The engine is that of the layer ``container_runtime``, run in that layer's tree with the bake's own configuration
(``pull/docker_engine.py``, ``pull/containerd_engine.py``). Images that an earlier bake pulled with the same packages
are taken over, so that one more image in the list means one more pull.

Product: ``tree/opt/preloaded_docker_images.json`` and, if the definition wants an archive, ``.tar``, which go into
the image; ``state``, the engine's data root with all images unpacked; ``layers.json``, where in it each image's layers
are; ``images.json``, the engine and what is known of each image; ``pulls.json``, how each pull went.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from image_builder.bake import layer_tree
from image_builder.bake.lock.model import Image
from image_builder.bake.pull import retry
from image_builder.bake.pull.engines import ENGINES, RunningEngine
from image_builder.bake.pull.model import Limits
from image_builder.bake.pull.network import Endpoints
from image_builder.bake.pull.puller import Puller, Request
from image_builder.bake.stages import StageContext
from image_builder.canonical import JSON
from image_builder.errors import PullError
from image_builder.node import layout
from image_builder.system.sandbox import Root, open_root
from image_builder.system.trees import sha256

ARCHIVE = os.fspath(layout.ARCHIVE.relative_to("/"))
LIST = os.fspath(layout.LIST.relative_to("/"))
LAYERS = "layers.json"
IMAGES = "images.json"
FORMAT = 1
_OUT = "/run/image-builder/out"
# Layers that the engine downloads at once; images are limited by image_pull.parallel.
_DOWNLOADS = 10


def run(ctx: StageContext) -> Mapping[str, JSON]:
    """Pull, check and pack. Raises PullError naming each required image that can't be pulled, and why."""
    options = ctx.plan.options
    module = ENGINES[options["engine"]]
    started = time.time_ns()
    images = Image.listed(options["images"])
    state, opt = ctx.product / "state", ctx.product / "tree" / "opt"
    state.mkdir()
    opt.mkdir(parents=True)
    if ctx.previous:
        ctx.doing("taking over what was pulled before")
        module.copy(ctx.previous / "state", state)
    with open_root(
        ctx.ground,
        ctx.work / "root",
        writable_binds={module.DATA_ROOT: state, _OUT: opt},
        network=True,
    ) as root:
        write_names(root.path, ctx.endpoints)
        downloads = max(_DOWNLOADS, ctx.definition.pull.parallel)
        with module.running(
            root, downloads=downloads, endpoints=ctx.endpoints, network=ctx.network, log=ctx.log
        ) as engine:
            engine.keep_only(images)
            failed = _pull(ctx, engine, images)
            pulled = [image for image in images if image.ref not in failed]
            for image in pulled:
                engine.mark(image, pin=image.pin)
            listed = [_entry(engine, image) for image in pulled]
            layers = _write_layers(ctx, engine, pulled)
            archive = _save(ctx, engine, pulled, sum(int(str(entry["bytes"])) for entry in listed))
            binary = _binary(root, engine.binary)
            version = engine.version()
    module.strip(state)
    for folder in {folder for folders in layers.values() for folder in folders}:
        layer_tree.settle(state / folder, started)
    facts: dict[str, JSON] = {"name": engine.name, "version": version, **binary}
    record = {"engine": facts, "images": listed}
    (ctx.product / IMAGES).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if options["list"]:
        document = {"format": FORMAT, "engine": options["engine"], "archive": archive, "images": listed}
        target = ctx.product / "tree" / LIST
        target.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        target.chmod(0o644)
    return {
        "engine": facts,
        "images": [str(entry["ref"]) for entry in listed],
        "left_out": dict(failed),
        "archive_bytes": archive["bytes"] if archive else 0,
        # So that the store doesn't hash the archive a second time.
        "files": [{"name": f"tree/{ARCHIVE}", "sha256": archive["sha256"]}] if archive else [],
    }


def _save(
    ctx: StageContext, engine: RunningEngine, images: Sequence[Image], total: int
) -> dict[str, JSON] | None:
    """Save the images as an archive; return where nodes find it, or None if none is wanted."""
    if not ctx.plan.options["save"]:
        return None
    ctx.doing("packing the archive")
    size, sha256 = engine.save(
        images,
        ctx.product / "tree" / ARCHIVE,
        lambda done: ctx.monitor.stage_progress(ctx.plan.name, done, max(done, total), "B"),
    )
    return {"path": f"/{ARCHIVE}", "bytes": size, "sha256": sha256}


def _pull(ctx: StageContext, engine: RunningEngine, images: Sequence[Image]) -> Mapping[str, str]:
    """Pull the missing images; return why each one that isn't required failed. Writes pulls.json in any case."""
    missing = [image for image in images if not engine.has(image)]
    settings = ctx.definition.pull
    puller = Puller(
        engine,
        limits=Limits(
            progress_seconds=settings.progress_seconds,
            min_rate=float(settings.min_bytes_per_second),
            overall_seconds=settings.overall_seconds,
        ),
        policy=retry.Policy(attempts=settings.attempts),
        parallel=settings.parallel,
        endpoints=ctx.endpoints,
        network=ctx.network,
        stage=ctx.plan.name,
        monitor=ctx.monitor,
        stop=ctx.stop,
    )
    ctx.doing(f"pulling {len(missing)} of {len(images)} images")
    present: list[Mapping[str, JSON]] = [
        {"ref": i.ref, "digest": i.digest, "bytes": i.size, "outcome": "there already"}
        for i in images
        if i not in missing
    ]
    records: list[Mapping[str, JSON]] = []
    pulled = None
    try:
        pulled = puller.pull([Request(image, image.required) for image in missing])
        records = list(pulled.records)
    except PullError as error:
        records = list(error.records)
        raise PullError(f"images that can't be pulled:\n  {error.message}") from error
    finally:
        text = json.dumps({"images": [*present, *records]}, indent=1) + "\n"
        (ctx.product / "pulls.json").write_text(text, encoding="utf-8")
        if not pulled:  # the product is discarded with the failed stage, its log stays
            with ctx.log.open("a", encoding="utf-8") as log:
                log.write(f"pulls.json:\n{text}")
    for ref, why in pulled.failed.items():
        ctx.monitor.note(f"left out, it is not required: {ref}: {why}")
    return pulled.failed


def _entry(engine: RunningEngine, image: Image) -> dict[str, JSON]:
    """Return an image's entry in the list for nodes."""
    return {
        "ref": image.ref,
        "digest": image.digest,
        "manifest": image.manifest,
        "id": image.config,
        "platform": image.platform,
        "pin": image.pin,
        "bytes": engine.unpacked_bytes(image),
        "diff_ids": [layer.diff_id for layer in image.layers],
    }


def _write_layers(ctx: StageContext, engine: RunningEngine, images: Sequence[Image]) -> dict[str, list[str]]:
    """Write and return ``layers.json``: {reference: [path of each layer, the lowest first, in the data root]}."""
    layers: dict[str, list[str]] = {}
    for image in images:
        folders = layers[image.ref] = engine.layer_folders(image)
        if len(folders) != len(image.layers):
            raise PullError(f"{image.ref} has {len(image.layers)} layers, the engine shows {len(folders)}")
    (ctx.product / LAYERS).write_text(json.dumps(layers, indent=1) + "\n", encoding="utf-8")
    return layers


def write_names(root: Path, endpoints: Endpoints) -> None:
    """Give the sandbox the host's resolver, and the registries that aren't in DNS. None of this is kept."""
    lines = ["127.0.0.1 localhost", *(f"{e.address} {e.host}" for e in endpoints.values())]
    files = {"hosts": "\n".join(lines) + "\n", "resolv.conf": ""}
    resolver = Path("/etc/resolv.conf")
    if resolver.exists():
        files["resolv.conf"] = resolver.read_text(encoding="utf-8", errors="replace")
    for name, text in files.items():
        path = root / "etc" / name
        if os.path.lexists(path):
            path.unlink()
        path.write_text(text, encoding="utf-8")


def _binary(root: Root, program: str) -> dict[str, JSON]:
    """Return the program that pulled, with its SHA-256."""
    return {"binary": program, "binary_sha256": sha256(root.path / program.lstrip("/"))}
