"""``node-agent promote``: waiting, refusing, copying, reporting."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from image_builder.node import data_root, files, layout, mounts, status, store
from image_builder.node.child import ENVIRONMENT
from image_builder.node.errors import NodeError
from image_builder.node.net import fetch
from image_builder.node.net.retry import Deadline
from image_builder.node.preload_settings import Settings, load_all
from image_builder.node.promote import batches, plan, trash
from image_builder.node.promote.batches import Progress
from image_builder.node.promote.workers import ItemResult, disk_error

Section = dict[str, Any]
_LOCK_SECONDS = 3.0
_PATH = f"{ENVIRONMENT['PATH']}:/opt/bin"


@dataclass(frozen=True)
class Places(status.Places):
    """Also the bake's files, the store's manifest and the rehearsal's results, and the store's mount point."""

    manifest: Path = layout.MANIFEST
    rehearsal: Path = layout.REHEARSAL
    store: Path = layout.MOUNT_POINT


def run(places: Places = Places()) -> int:
    """Promote the layers that the seed linked; return the exit status.

    It is 0 even if the disk is full, the disk or the store is damaged, or there is no local disk: the node works as
    before, and the status says why. Raises NodeError for anything else.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        settings = load_all(places.etc)
        with _alone(settings, _no_promotion(settings, places)) as reason:
            if reason is None:
                status.tell("promote: another agent is already promoting")
                return 0
            section = _tidy(settings, places, reason) if reason else _promote(settings, places)
    except NodeError as error:
        _update(places, _degraded(error.code, error.message))
        raise
    _update(places, section)
    _say(section)
    return 0


def _update(places: Places, section: Section) -> None:
    status.update("promotion", section, places)


def _degraded(code: str, reason: str) -> Section:
    return {"state": status.DEGRADED, "code": code, "reason": reason}


def _say(section: Section) -> None:
    if section["state"] != status.OK:
        status.tell(f"promote: {section['code']}: {section['reason']}")
    elif "done" in section:
        status.tell(
            f"promote: {section['done']} of {section['total']} copied, {section['bytes'] / 1e6:.0f} MB "
            f"in {section['seconds']:.1f} s; {len(section['layers_left'])} layers left in the store"
        )


@contextmanager
def _alone(settings: Settings, reason: Section) -> Iterator[Section | None]:
    """Yield ``reason`` while holding the promotion lock, or None if another agent holds it.

    Don't take the lock if there is nothing to do. The workers hold it, too: it is free once the last of a dead agent's
    processes has ended.
    """
    if reason and not _has_trash(settings):
        yield reason
        return
    with files.descriptor(settings.preload.state / "promote.lock", os.O_RDWR | os.O_CREAT) as fd:
        # Wait a moment for the workers of an agent that has just been killed.
        yield reason if files.try_lock(fd, _LOCK_SECONDS) else None


def _no_promotion(settings: Settings, places: Places) -> Section:
    """Return the status section if there is nothing to do, or nothing can be done; empty otherwise."""
    if not settings.promotion.enabled:
        return {"state": status.OK, "enabled": False, "layers_left": _left(settings, places)}
    disk = status.read(places.run).get("disk", {})
    if disk.get("action", "none") == "none":
        why = disk.get("reason") or disk.get("code") or "node-agent disk reported nothing"
        return _degraded("promote.no-disk", f"the data root is not on a local disk: {why}")
    try:
        settings.preload.state.mkdir(mode=0o700, exist_ok=True)
        if (
            settings.preload.data_root.exists()
            and settings.preload.data_root.stat().st_dev != settings.preload.state.stat().st_dev
        ):
            return _degraded(
                "promote.no-disk", f"{settings.preload.data_root} is not on {settings.preload.mount_point}"
            )
    except OSError as error:
        return _degraded("promote.io", f"{error.filename}: {error.strerror}")
    return {}


def _left(settings: Settings, places: Places) -> list[str]:
    return plan.layers_left(
        data_root.find_links(settings.preload.engine, settings.preload.data_root, places.store)
    )


def _promote(settings: Settings, places: Places) -> Section:
    """Wait, copy, and release the store once no link leads to it. Return the status section."""
    _update(places, {"state": status.OK, "waiting": "kubelet", "layers_left": _left(settings, places)})
    is_up = _wait(settings)
    try:
        section = _copy(settings, places)
        before = trash.names(settings.preload.trash)
        remaining = _empty(settings, is_up)
        if section.get("code") == "promote.space" and len(remaining) < len(before):
            section = _copy(settings, places)
    except OSError as error:
        return _degraded(*disk_error(error))
    if remaining:
        section["trash"] = remaining
    if not section["layers_left"]:
        section["store"] = _release(places)
    return section


def _tidy(settings: Settings, places: Places, section: Section) -> Section:
    """Only delete what the seed set aside, which may be most of the disk. Return the status section."""
    if not _has_trash(settings):
        return section
    _update(places, section)
    is_up = _wait(settings)
    try:
        remaining = _empty(settings, is_up)
    except OSError as error:
        remaining = [disk_error(error)[1]]
    return {**section, "trash": remaining} if remaining else section


def _empty(settings: Settings, is_up: bool) -> list[str]:
    """Delete what earlier boots set aside if this one has succeeded; return what stays, and why."""
    folder = settings.preload.trash
    if not is_up:
        return [
            f"{folder / name}: kept, since this boot's kubelet did not answer" for name in trash.names(folder)
        ]
    return trash.empty(folder, settings.promotion.bytes_per_second, status.boot_id())


def _wait(settings: Settings) -> bool:
    """Wait for the kubelet, and until the boot has settled; return whether the kubelet answered.

    Until then the boot has the disk's whole bandwidth. A node without a kubelet, or with settings that lack its
    address, doesn't wait for one, which counts as an answer.
    """
    healthz = settings.preload.kubelet_healthz
    has_kubelet = healthz and shutil.which("kubelet", path=_PATH)
    is_up = not has_kubelet or fetch.wait_until_up(healthz, Deadline.after(settings.promotion.wait_seconds))
    if not is_up:
        status.tell(
            f"promote: the kubelet did not answer within {settings.promotion.wait_seconds:g} s; going on without it"
        )
    time.sleep(settings.promotion.settle_seconds)
    return is_up


def _has_trash(settings: Settings) -> bool:
    try:
        return bool(trash.names(settings.preload.trash))
    except OSError:  # the disk can't be read: code that needs it will report that
        return False


def _copy(settings: Settings, places: Places) -> Section:
    seeded = data_root.find_links(settings.preload.engine, settings.preload.data_root, places.store)
    if not seeded:
        return _earlier(settings)
    stored = store.read_manifest(places.manifest)
    if mounts.at(places.store) is None:
        failure = ItemResult(-1, "promote.store", f"nothing is mounted at {places.store}")
        return _section(settings, places, len(seeded), Progress(failure=failure), 0.0)
    # The bake's rehearsal only affects the order: without it the order is merely different.
    order = plan.ranks(stored.images, files.read_json(places.rehearsal), settings.preload.pause)
    items = plan.items(seeded, order, stored.layers)
    began = time.monotonic()

    def report(progress: Progress) -> None:
        seconds = time.monotonic() - began
        section = _section(settings, places, len(items), progress, seconds)
        _update(places, {**section, "running": True})

    progress = batches.promote(
        items,
        settings.staging,
        workers=settings.promotion.workers,
        rate=settings.promotion.bytes_per_second,
        reserve_percent=settings.promotion.reserve_percent,
        report=report,
    )
    if progress.failure and progress.failure.damaged:
        _mark_damaged(settings, stored.id, items[progress.failure.item], progress.failure)
    section = _section(settings, places, len(items), progress, time.monotonic() - began)
    files.syncfs(settings.preload.state)
    files.write_json(settings.preload.state / "promote.json", {"store": stored.id, **section})
    return section


def _section(settings: Settings, places: Places, total: int, progress: Progress, seconds: float) -> Section:
    counts = {
        "done": progress.done,
        "total": total,
        "bytes": progress.bytes,
        "seconds": round(seconds, 3),
        "layers_left": _left(settings, places),
    }
    if progress.failure:
        return {**_degraded(progress.failure.code, progress.failure.reason), **counts}
    return {"state": status.OK, **counts}


def _earlier(settings: Settings) -> Section:
    """Return the section if nothing is left to do: an earlier boot's result if that succeeded, else zeros."""
    nothing = {"state": status.OK, "done": 0, "total": 0, "bytes": 0, "seconds": 0.0, "layers_left": []}
    document = files.read_json(settings.preload.state / "promote.json")
    if document.get("state") != status.OK:
        return nothing
    return {key: document.get(key, value) for key, value in nothing.items()} | {"layers_left": []}


def _mark_damaged(settings: Settings, store_id: str, item: plan.Item, failure: ItemResult) -> None:
    """Leave a note for the next boot, unless the layer is readable now: then the disk had only stalled for a while."""
    try:
        store.read_through(item.link.target)
    except OSError:
        layer = item.link.diff_id or item.link.path.name
        target = os.fspath(item.link.target)
        files.write_json(
            settings.preload.state / "store-damaged.json",
            {"store": store_id, "layer": layer, "path": target, "reason": failure.reason},
        )


def _release(places: Places) -> str:
    """Unmount the store. Running containers keep their private copy of the mount; the file stays for the next boot."""
    try:
        store.close_store(places.store)
    except NodeError as error:
        return f"{error.code}: {error.message}"
    return "released"
