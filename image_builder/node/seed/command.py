"""``node-agent seed``: before the engine starts, give its data root the images that the node was baked with."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from image_builder.node import durable, layout, lock, status, trees
from image_builder.node.errors import NodeError, ProgramError
from image_builder.node.layout import Preload, preload_settings
from image_builder.node.programs import run as run_program
from image_builder.node.promote import links
from image_builder.node.seed import containerd, docker
from image_builder.node.seed.files import directory
from image_builder.node.store import Store, close_store, open_store, read_manifest

FORMAT = 1


def run(manifest: Path = layout.MANIFEST, *, directory: Path = status.DIRECTORY) -> int:
    """Seed, and say how it went. What can't be seeded is loaded from the archive later; that is no failure here."""
    started = time.monotonic()
    try:
        settings = preload_settings()
    except NodeError as error:  # nothing is known of a data root, so nothing is done to any
        found: dict[str, Any] = {"state": status.DEGRADED, "code": error.code, "reason": error.message}
    else:
        # Another agent may be at it: then it is found done.
        with lock.held(directory / "seed.lock"):
            try:
                is_baked = any(map(os.path.lexists, (manifest, manifest.with_name(layout.STORE_FILE.name))))
                found = seed(settings, read_manifest(manifest)) if is_baked else leave(settings)
            except (NodeError, OSError) as error:
                found = _give_up(settings, error)
    found["seconds"] = round(time.monotonic() - started, 3)
    status.update("seed", found, directory=directory)
    status.tell(describe(found))
    return 0


def seed(settings: Preload, store: Store) -> dict[str, Any]:
    """Make the data root usable from the store; return the section of the status. Raises NodeError, OSError."""
    (settings.state / "seed").mkdir(parents=True, exist_ok=True)
    trees.remove(settings.state / "staging/seed")
    if damaged := _damaged(settings, store):
        raise NodeError("store.damaged", damaged)
    check_version(store, settings.engine)
    marker = _marker(settings)
    used = os.path.lexists(settings.data_root) and any(settings.data_root.iterdir())
    if marker.get("store") == store.id and used:
        return _current(settings, store)
    open_store(store, verity=settings.verity)
    action = "seeded"
    if used:
        # Of another image, of a half load, or of an engine that ran without a store: nothing of it can be told.
        trees.set_aside(settings.data_root, settings.state / "trash")
        action = "reseeded"
    return {"action": action, **_fresh(settings, store)}


def leave(settings: Preload) -> dict[str, Any]:
    """This image was baked without a store: what another one's seed linked leads nowhere. Raises NodeError, OSError.

    The engine would take such layers for whole, and neither pull nor load them again.
    """
    action = "none"
    if settings.data_root.is_dir() and _has_links(settings):
        trees.set_aside(settings.data_root, settings.state / "trash")
        action = "set aside"
    _forget(settings)
    return {"state": status.OK, "engine": settings.engine, "action": action}


def _forget(settings: Preload) -> None:
    for stale in (settings.marker, settings.state / "promote.json"):
        stale.unlink(missing_ok=True)


def _fresh(settings: Preload, store: Store) -> dict[str, Any]:
    """Make a data root beside its place, sync, rename, write the marker."""
    _forget(settings)
    staging = settings.state / "staging/seed"
    # Docker's own mode for its root, and containerd's.
    directory(staging, 0o710 if settings.engine == "docker" else 0o700)
    wanted = [image for image in store.images if image.mode != "archive"]
    try:
        if settings.engine == "docker":
            made = docker.fill(wanted, staging, copy=_copy, aside=True)
            number, files = made.layers, made.files
        else:
            copied = frozenset(d for image in wanted if image.mode == "copy" for d in image.diff_ids)
            done = containerd.fill(staging, copied=copied, copy=_copy)
            number, files = done.snapshots, done.files
        durable.syncfs(staging)
        if os.path.lexists(settings.data_root):
            settings.data_root.rmdir()
        settings.data_root.parent.mkdir(parents=True, exist_ok=True)
        staging.rename(settings.data_root)
        durable.sync_directory(settings.data_root.parent)
        _mark(settings, store)
    except OSError as error:
        trees.remove(staging)
        raise NodeError("seed.disk", f"{settings.data_root}: {error.strerror}") from error
    except NodeError:
        trees.remove(staging)
        raise
    return {**_section(settings, store), "images": len(wanted), "layers": number, "files": files}


def _copy(source: Path, target: Path) -> None:
    """Copy a layer whole, for images with the mode ``copy``."""
    from image_builder.node.promote.copy import SourceError, copy_tree

    try:
        copy_tree(source, target)
    except SourceError as error:
        raise NodeError("store.damaged", str(error)) from error


def _current(settings: Preload, store: Store) -> dict[str, Any]:
    """The data root is this store's: see that its links lead somewhere, and that no image was lost."""
    section = _section(settings, store)
    if settings.engine != "docker":
        # Its databases can't be merged: what was deleted is loaded from the archive, when the engine runs.
        if _has_links(settings):
            open_store(store, verity=settings.verity)
        return {"action": "current", **section}
    linked = _has_links(settings)
    wanted = [image for image in store.images if image.mode != "archive"]
    if not linked and not docker.lacking(wanted, settings.data_root):
        return {"action": "current", **section}
    open_store(store, verity=settings.verity)
    made = docker.fill(wanted, settings.data_root, copy=_copy)
    if not made.images:
        return {"action": "current", **section}
    durable.syncfs(settings.data_root)
    return {"action": "repaired", **section, "restored": list(made.images), "layers": made.layers}


def _has_links(settings: Preload) -> bool:
    """Tell whether anything in the data root is still a link into the store: not after it was all promoted."""
    return bool(links.find(settings.engine, settings.data_root))


def _section(settings: Preload, store: Store) -> dict[str, Any]:
    archived = [image.ref for image in store.images if image.mode == "archive"]
    return {"state": status.OK, "engine": settings.engine, "store": store.id, "by_archive": archived}


def _give_up(settings: Preload, error: NodeError | OSError) -> dict[str, Any]:
    """Leave the engine a data root without links that lead nowhere; the archive is loaded into it.

    Nothing is deleted: what was there is set aside.
    """
    code, reason = (
        ("seed.disk", f"{error.filename or settings.data_root}: {error.strerror}")
        if isinstance(error, OSError)
        else (
            error.code,
            error.message,
        )
    )
    section = {"state": status.DEGRADED, "engine": settings.engine, "code": code, "reason": reason}
    try:
        # Also without a marker: it is written after the data root is in its place, and that may be what failed.
        if settings.data_root.is_dir() and _has_links(settings):
            trees.set_aside(settings.data_root, settings.state / "trash")
            section["action"] = "set aside"
        settings.marker.unlink(missing_ok=True)
        close_store()
    except (NodeError, OSError) as further:
        section["reason"] += f"; {further}"
    return {"action": "none", **section}


# -- the marker ------------------------------------------------------------------------------------------------


def _marker(settings: Preload) -> Mapping[str, Any]:
    found = _object(settings.marker)
    return found if found.get("format") == FORMAT else {}


def _object(path: Path) -> Mapping[str, Any]:
    """Return a file's JSON object; empty where there is none that is whole."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _mark(settings: Preload, store: Store) -> None:
    document = {"format": FORMAT, "store": store.id, "engine": settings.engine}
    durable.write_json(settings.marker, document)


def _damaged(settings: Preload, store: Store) -> str:
    """Return why an earlier boot found this store damaged, or nothing."""
    found = _object(settings.state / "store-damaged.json")
    return str(found.get("reason", "damaged")) if found.get("store") == store.id else ""


# -- the engine's version --------------------------------------------------------------------------------------


def check_version(store: Store, engine: str, ask: Callable[[str], str] | None = None) -> None:
    """Raise NodeError unless the node's engine keeps its data as the baked one did.

    The layout is the engine's own affair, so only the same minor version is trusted with it. The program that was
    baked is known by its size; another one is asked. ``ask`` returns a program's version line.
    """
    baked = store.engines.get(engine)
    if baked is None:
        raise NodeError(
            "seed.engine", f"the store was baked for {', '.join(store.engines)}, not for {engine}"
        )
    try:
        size = os.stat(baked.binary).st_size
    except OSError as error:
        raise NodeError("seed.engine", f"{baked.binary}: {error.strerror}") from error
    if size == baked.bytes:
        return
    found = (ask or _ask)(baked.binary)
    if _minor(found) != _minor(baked.version):
        raise NodeError(
            "seed.version", f"{engine} {found} is installed, the store was made by {baked.version}"
        )


def _ask(binary: str) -> str:
    try:
        said = run_program([binary, "--version"], timeout=20).stdout
    except ProgramError as error:
        raise NodeError("seed.engine", error.message) from error
    found = re.search(r"\d+\.\d+\.\d+[^\s,]*", said)
    return found[0] if found else said.strip()


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:2])


def describe(section: Mapping[str, Any]) -> str:
    """Return the outcome as one line for people."""
    if section["state"] != status.OK:
        return f"seed: {section['code']}: {section['reason']}; images come from the archive"
    what = f"{section['engine']}: {section['action']}"
    if "layers" in section:
        what += f", {section['layers']} layers"
    return f"seed: {what} in {section['seconds']:.2f} s"
