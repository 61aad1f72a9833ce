"""``node-agent seed``: before the engine starts, fill its data root with the images that the node was baked with."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from image_builder.node import data_root, files, layout, preload_settings, status
from image_builder.node.child import run as run_program
from image_builder.node.errors import NodeError, ProgramError
from image_builder.node.layout import layer_path
from image_builder.node.preload_settings import Preload
from image_builder.node.seed import containerd, docker, lost
from image_builder.node.store import Store, close_store, open_store, read_manifest, read_through, unreadable

FORMAT = 1


# A disk failure may be over a moment later; a damaged store or a wrong engine version stays so.
_FOR_NOW = frozenset(["seed.disk", "store.io", "store.verity"])
_LOST = frozenset(["store.manifest", "store.truncated", "store.disagrees", "store.mount", "store.damaged"])
_ATTEMPTS = 3


@dataclass(frozen=True)
class Places(status.Places):
    """Also the store's manifest."""

    manifest: Path = layout.MANIFEST


def run(places: Places = Places(), *, pause: float = 1.0) -> int:
    """Seed, and report the outcome; return 1 if a later attempt may do better, else 0.

    ``pause`` is the time in seconds between two attempts of one call. Images that can't be seeded are loaded from the
    archive.
    """
    started = time.monotonic()
    try:
        settings = preload_settings.load(places.etc)
    except NodeError as error:  # the data root isn't known, so none is touched
        section: dict[str, Any] = {"state": status.DEGRADED, "code": error.code, "reason": error.message}
    else:
        # Another agent may be seeding: then this one finds the work done.
        with files.lock(places.run / "seed.lock"):
            section = _attempt(settings, places)
            for _ in range(_ATTEMPTS - 1):
                if section.get("code") not in _FOR_NOW:
                    break
                time.sleep(pause)
                section = _attempt(settings, places)
        if section.get("code") == "seed.busy":
            section = _earlier(places.run, section)
    section["seconds"] = round(time.monotonic() - started, 3)
    section["retried"] = section.get("code") in _FOR_NOW and "busy" not in section
    status.update("seed", section, places)
    status.tell(describe(section))
    return 1 if section["retried"] else 0


def _attempt(settings: Preload, places: Places) -> dict[str, Any]:
    manifest = places.manifest
    try:
        _require_disk(places)
        is_baked = any(map(os.path.lexists, (manifest, manifest.with_name(layout.STORE_FILE.name))))
        return seed(settings, read_manifest(manifest)) if is_baked else leave(settings)
    except (NodeError, OSError) as error:
        return _failed(settings, error)


def _require_disk(places: Places) -> None:
    """Raise NodeError (``seed.disk``) before a decision on the local disk: a later mount would hide the seed."""
    if "disk" not in status.wanted_sections(places.etc):
        return
    disk = status.read(places.run).get("disk", {})
    if "action" not in disk:
        why = disk.get("reason") or "node-agent disk has not reported in this boot"
        raise NodeError("seed.disk", f"the local disk is not ready: {why}")


def _earlier(directory: Path, busy: dict[str, Any]) -> dict[str, Any]:
    """Return the section of an attempt before the engine's start if that failed: its failure explains more."""
    earlier = status.read(directory).get("seed", {})
    if earlier.get("code") not in {*_FOR_NOW, "seed.version", "seed.engine"}:
        return busy
    return {**earlier, "busy": busy["reason"]}


def seed(settings: Preload, store: Store) -> dict[str, Any]:
    """Make the data root usable from the store; return the section of the status. Raises NodeError, OSError.

    A containerd root from another image's store is set aside as a whole, with pulled images and containers: its
    databases can't be merged, nor edited while containerd is stopped. A later boot that succeeds deletes it
    (``promote.trash``). A root without any image, as left by a start after a failed seed, is set aside, too.
    """
    (settings.state / "seed").mkdir(parents=True, exist_ok=True)
    files.remove_tree(settings.state / "staging/seed")
    marker = _marker(settings)
    used = _is_used(settings.data_root)
    if used and not _goes_aside(settings, store, marker):
        return _keep(settings, store, marker)
    if used:
        _require_unused(settings)
    check_version(store, settings.engine)
    _open(settings, store)
    return {"action": "reseeded" if used else "seeded", **_fresh(settings, store, used)}


def _goes_aside(settings: Preload, store: Store, marker: Mapping[str, Any]) -> bool:
    if settings.engine != "containerd":
        return False
    if marker.get("store") not in (None, store.id):
        return True
    return data_root.is_new(settings.data_root) and not data_root.user(settings.engine, settings.data_root)


def leave(settings: Preload) -> dict[str, Any]:
    """Handle an image baked without a store, where links from another image's seed lead nowhere.

    The engine would consider such layers complete, and neither pull nor load them again. For Docker, only these layers
    are removed; containerd's root is set aside as a whole, as in ``seed``. Raises NodeError, OSError.
    """
    action = "none"
    if settings.data_root.is_dir() and _has_links(settings):
        _require_unused(settings)
        if settings.engine == "docker":
            lost.take_out(settings.data_root, settings.trash, status.boot_id())
            action = "lost layers taken out"
        else:
            files.set_aside(settings.data_root, settings.trash, status.boot_id())
            action = "set aside"
    _forget(settings)
    return {"state": status.OK, "engine": settings.engine, "action": action}


def _require_unused(settings: Preload) -> None:
    """Raise NodeError (``seed.busy``) if the data root is in use: then nothing in it may be changed."""
    if who := data_root.user(settings.engine, settings.data_root):
        raise NodeError("seed.busy", f"{settings.data_root} is left as it is: {who}")


def _is_used(root: Path) -> bool:
    return os.path.lexists(root) and any(root.iterdir())


def _forget(settings: Preload) -> None:
    for stale in (settings.marker, settings.state / "promote.json"):
        stale.unlink(missing_ok=True)


def _open(settings: Preload, store: Store) -> None:
    """Mount the store. If an earlier boot found it damaged, check it again: the disk may have failed only for a moment.

    Close a store that is still damaged: links that lead nowhere get replaced, whereas links into a damaged store would
    cause I/O errors in pods. Raises NodeError.
    """
    open_store(store, verity=settings.verity)
    mark = settings.state / "store-damaged.json"
    if (damage := files.read_json(mark)).get("store") != store.id:
        return
    try:
        read_through(Path(str(damage.get("path") or layer_path(str(damage.get("layer"))))))
    except OSError as error:
        message = f"{damage.get('reason', 'damaged')}; read again: {error.strerror}"
        failure = unreadable(error, "store.damaged", message)
        # EIO is dm-verity's answer for a block that isn't what was baked, and this is the second time.
        if failure.code == "store.io" and error.errno != errno.EIO:
            raise failure from error
        if not data_root.user(settings.engine, settings.data_root):
            close_store()
        raise NodeError("store.damaged", message) from error
    mark.unlink()


def _fresh(settings: Preload, store: Store, used: bool) -> dict[str, Any]:
    """Build a data root in the staging directory, sync it, rename it into place, and write the marker.

    ``used``: another image's data root is there. It is set aside only once the new one is complete.
    """
    staging = settings.state / "staging/seed"
    # Docker's own mode for its root, and containerd's.
    files.make_directory(staging, 0o710 if settings.engine == "docker" else 0o700)
    images = [image for image in store.images if image.mode != "archive"]
    try:
        if settings.engine == "docker":
            root = docker.fill(images, staging, copy=_copy, aside=True)
            layers, file_count = root.layers, root.files
        else:
            copied = frozenset(d for image in images if image.mode == "copy" for d in image.diff_ids)
            filled = containerd.fill(staging, copied=copied, copy=_copy)
            layers, file_count = filled.snapshots, filled.files
        files.syncfs(staging)
        if used:
            _require_unused(settings)  # filling takes a while, and the engine may have been started
            files.set_aside(settings.data_root, settings.trash, status.boot_id())
        _forget(settings)
        if os.path.lexists(settings.data_root):
            settings.data_root.rmdir()
        settings.data_root.parent.mkdir(parents=True, exist_ok=True)
        staging.rename(settings.data_root)
        files.sync_directory(settings.data_root.parent)
        _mark(settings, store)
    except OSError as error:
        files.remove_tree(staging)
        raise NodeError("seed.disk", f"{settings.data_root}: {error.strerror}") from error
    except NodeError:
        files.remove_tree(staging)
        raise
    return {**_section(settings, store), "images": len(images), "layers": layers, "files": file_count}


def _copy(source: Path, target: Path) -> None:
    """Copy a whole layer, for images with the mode ``copy``. Raises OSError, NodeError (``store``)."""
    from image_builder.node.promote.copy import SourceError, copy_tree

    try:
        copy_tree(source, target)
    except SourceError as error:
        raise unreadable(OSError(error.code, ""), "store.damaged", str(error)) from error


def _keep(settings: Preload, store: Store, marker: Mapping[str, Any]) -> dict[str, Any]:
    """Keep a data root that isn't blank: add what it lacks, and remove only lost layers.

    It may be from this store, from another store or from none. First make sure that its links lead somewhere: whatever
    fails afterwards, the engine works as before.
    """
    linked, ours = _has_links(settings), marker.get("store") == store.id
    if linked:
        _open(settings, store)
    section = _section(settings, store)
    images = [image for image in store.images if image.mode != "archive"]
    if settings.engine != "docker":
        # Its databases can't be merged: missing images are loaded from the archive once the engine runs.
        if linked and not ours:  # a power cut happened before the marker was written
            _mark(settings, store)
        return {"action": "current" if linked or ours else "left", **section}
    has_lost = linked and not ours and bool(lost.caches(settings.data_root))
    if ours and not has_lost and not docker.lacking(images, settings.data_root):
        return {"action": "current", **section}
    _require_unused(settings)
    if has_lost:  # layers from another image's store
        lost.take_out(settings.data_root, settings.trash, status.boot_id())
    check_version(store, settings.engine)
    _open(settings, store)
    filled = docker.fill(images, settings.data_root, copy=_copy)
    if not ours:
        _mark(settings, store)
    if not filled.images:
        return {"action": "current", **section}
    return {"action": "repaired", **section, "restored": list(filled.images), "layers": filled.layers}


def _has_links(settings: Preload) -> bool:
    """Return whether the data root still has links into the store: after a complete promotion it has none."""
    return bool(data_root.find_links(settings.engine, settings.data_root))


def _section(settings: Preload, store: Store) -> dict[str, Any]:
    archived = [image.ref for image in store.images if image.mode == "archive"]
    return {"state": status.OK, "engine": settings.engine, "store": store.id, "by_archive": archived}


def _failed(settings: Preload, error: NodeError | OSError) -> dict[str, Any]:
    """Return the section that says why nothing was seeded; an existing data root stays, with everything in it.

    Only if the store is lost for good, Docker's layers that link into it are removed, so that they can be loaded from
    the archive. containerd's lost layers are removed through the engine itself (``node-agent preload``).
    """
    if isinstance(error, OSError):
        error = NodeError("seed.disk", f"{error.filename or settings.data_root}: {error.strerror}")
    section = {
        "action": "none",
        "state": status.DEGRADED,
        "engine": settings.engine,
        "code": error.code,
        "reason": error.message,
    }
    try:
        if not (settings.data_root.is_dir() and _has_links(settings)):
            close_store()
        elif settings.engine == "docker" and error.code in _LOST and lost.caches(settings.data_root):
            _require_unused(settings)
            lost.take_out(settings.data_root, settings.trash, status.boot_id())
            section["action"] = "lost layers taken out"
    except (NodeError, OSError) as further:
        section["reason"] += f"; {further}"
    return section


# -- the marker ------------------------------------------------------------------------------------------------


def _marker(settings: Preload) -> Mapping[str, Any]:
    marker = files.read_json(settings.marker)
    return marker if marker.get("format") == FORMAT else {}


def _mark(settings: Preload, store: Store) -> None:
    document = {"format": FORMAT, "store": store.id, "engine": settings.engine}
    files.write_json(settings.marker, document)


# -- the engine's version --------------------------------------------------------------------------------------


def check_version(store: Store, engine: str, ask: Callable[[str], str] | None = None) -> None:
    """Raise NodeError unless the node's engine stores its data in the same layout as the baked one did.

    The layout is internal to the engine, so only the same minor version is trusted with it. The baked program is
    recognized by its size; any other is asked for its version. ``ask`` returns a program's version.
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
    version = (ask or _ask)(baked.binary)
    if _minor(version) != _minor(baked.version):
        raise NodeError(
            "seed.version", f"{engine} {version} is installed, the store was made by {baked.version}"
        )


def _ask(binary: str) -> str:
    try:
        output = run_program([binary, "--version"], timeout=20).stdout
    except ProgramError as error:
        raise NodeError("seed.engine", error.message) from error
    match = re.search(r"\d+\.\d+\.\d+[^\s,]*", output)
    return match[0] if match else output.strip()


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:2])


def describe(section: Mapping[str, Any]) -> str:
    """Return the outcome as one line for people."""
    if section["state"] != status.OK:
        outcome = {"seed.busy": "nothing was done"}.get(
            section["code"], "missing images come from the archive, if there is one"
        )
        return f"seed: {section['code']}: {section['reason']}; {outcome}"
    outcome = f"{section['engine']}: {section['action']}"
    if "layers" in section:
        outcome += f", {section['layers']} layers"
    return f"seed: {outcome} in {section['seconds']:.2f} s"
