"""Publish the results of a build, so that a reader sees a complete artifact or none.

    OUTPUT/<image>/<build id, 12 digits>/   the artifacts, manifest.json, lock.json, facts.json, junit.xml,
                                            verify.json, and pulls.json if images were preloaded
    OUTPUT/<image>/latest                   a link to the newest of these

Everything is written to a staging directory next to its final place, synced, read back from the disk and hashed;
one rename then makes it visible, and another one moves ``latest``. A publisher holds a lock on its staging
directory; the next publisher removes those that aren't locked. Readers see only names without a leading dot.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from image_builder.bake import manifest as manifests
from image_builder.bake.lock.model import Lock
from image_builder.bake.manifest import Artefact, Document, Manifest
from image_builder.bake.plan.model import Plan, StagePlan
from image_builder.bake.stages import preload
from image_builder.bake.stages.preload_store import PRELOAD_STORE
from image_builder.bake.store import Store
from image_builder.bake.verification import passed_verification
from image_builder.canonical import digest
from image_builder.definition.model import ImageDefinition
from image_builder.errors import PublishError, SpaceError, StoreError
from image_builder.events import Monitor, shown_stage
from image_builder.node import files, layout
from image_builder.settings import Settings
from image_builder.system import sparse
from image_builder.system.trees import remove_tree

BUILD_DIGITS = 12
MANIFEST = "manifest.json"
LATEST = "latest"

_STAGING, _LINK = ".staging-", ".latest-"
# Errors of renameat2(2) on a filesystem that doesn't support its flags, such as NFS.
_NO_FLAGS = (errno.EINVAL, errno.ENOSYS)


@dataclass(frozen=True)
class Publication:
    """Where an image was published; ``reused`` if exactly this was already there."""

    path: Path
    reused: bool


def publish(
    definition: ImageDefinition,
    lock: Lock,
    plan: Plan,
    store: Store,
    settings: Settings,
    stages: Sequence[Mapping[str, Any]],
    monitor: Monitor,
) -> Path:
    """Publish the finished stages of ``plan`` below ``settings.output``; return the directory.

    ``stages`` gives the name, id, seconds, bytes and cached of each stage. Raises PublishError (also if the
    verification is missing or didn't pass), StoreError and SpaceError. Earlier publications then stay as they are.
    """
    verified = store.product(plan.stage("verify").id)
    result = passed_verification(verified)
    converted = plan.stage("convert").id
    artefacts = tuple(Artefact.model_validate(f) for f in _facts(store, converted)["files"])
    documents = {
        "lock.json": (json.dumps(lock.as_json(), indent=1, sort_keys=True) + "\n").encode(),
        **{name: (verified / name).read_bytes() for name in ("facts.json", "junit.xml", "verify.json")},
    }
    preloads = [stage for stage in plan.stages if stage.kind == "preload"]
    if preloads:
        documents["pulls.json"] = (store.product(preloads[0].id) / "pulls.json").read_bytes()
    if len(preloads) == 1:  # of several, only the first one's images are published
        _require_packed(plan, store, preloads[0])
    unlocked = preload.unlocked(definition, lock)
    kinds = {s.name: s.kind for s in plan.stages}
    manifest = Manifest(
        image=definition.name,
        build_id=plan.build_id,
        created=manifests.timestamp(time.time()),
        source_date_epoch=lock.source_date_epoch,
        definition_sha256=manifests.definition_digest(definition),
        lock_sha256=digest(lock.as_json()),
        artefacts=artefacts,
        documents=tuple(_document(name, data) for name, data in documents.items()),
        disk=_disk(_facts(store, plan.stage("disk").id)) if "disk" in kinds else None,
        preload=_preload(preloads[0], _facts(store, preloads[0].id), unlocked) if preloads else None,
        verification=result,
        stages=tuple(
            manifests.Stage(
                kind=kinds[s["name"]], **{k: s[k] for k in ("name", "id", "seconds", "bytes", "cached")}
            )
            for s in stages
        ),
        packages=manifests.installed(lock, json.loads(documents["facts.json"])["packages"]),
        warnings=lock.warnings if preloads else (*lock.warnings, *_left_out(unlocked)),
        tools=manifests.tool_versions(plan, lock),
    )
    done = publish_files(manifest, store.product(converted), documents, settings.output, monitor)
    return done.path


def publish_files(
    manifest: Manifest, source: Path, documents: Mapping[str, bytes], output: Path, monitor: Monitor
) -> Publication:
    """Publish the artifacts that ``manifest`` names, taken from the directory ``source``, and ``documents``.

    Raises PublishError or SpaceError; OSError is converted to one of them.
    """
    folder = output / manifest.image
    target = folder / manifest.build_id[:BUILD_DIGITS]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if _is_published(target, manifest):
            with _locked(folder):
                _reap(folder)
                _point_latest(folder, target.name)
            return Publication(target, reused=True)
        with shown_stage(monitor, "publish"), _staging(folder) as staging:
            _fill(staging, manifest, source, documents, monitor)
            with _locked(folder):
                _move(staging, target)
                files.sync_directory(folder)
                _point_latest(folder, target.name)
    except OSError as error:
        where = error.filename or folder
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SpaceError(
                f"no space left for the artefacts in {output}: {where}",
                hint="free some, or name another directory with --output",
            ) from error
        raise PublishError(f"can't publish in {output}: {where}: {error.strerror}") from error
    return Publication(target, reused=False)


# -- what is published -----------------------------------------------------------------------------------


def _facts(store: Store, stage_id: str) -> Mapping[str, Any]:
    facts: Mapping[str, Any] = store.meta(stage_id)["facts"]
    return facts


def _disk(facts: Mapping[str, Any]) -> manifests.Disk:
    """Return the manifest's record of a finished disk."""
    return manifests.Disk.model_validate_json(json.dumps({k: facts[k] for k in manifests.Disk.model_fields}))


def _preload(stage: StagePlan, facts: Mapping[str, Any], unlocked: Mapping[str, str]) -> manifests.Preload:
    """Return the manifest's record of a finished preload; ``unlocked`` are the images that it wasn't to pull."""
    engine = facts["engine"]
    return manifests.Preload(
        engine=engine["name"],
        version=engine["version"],
        binary=engine["binary"],
        binary_sha256=engine["binary_sha256"],
        images=tuple(
            manifests.PreloadedImage(**{key: image[key] for key in ("ref", "digest", "platform", "pin")})
            for image in stage.options["images"]
            if image["ref"] in facts["images"]
        ),
        left_out={**unlocked, **facts["left_out"]},
    )


def _require_packed(plan: Plan, store: Store, pull: StagePlan) -> None:
    """Raise StoreError if a preload that was pulled again left out other images than the disk's first pull did."""
    built = [pull.id]
    for stage in plan.stages:
        built += [stage.id] if stage.requires & {*built} else []
    for packed in (s for s in plan.stages if s.kind == PRELOAD_STORE and store.has(s.id)):
        path = store.product(packed.id) / "tree" / layout.MANIFEST.relative_to("/")
        refs = {image["ref"] for image in json.loads(path.read_bytes())["images"]}
        if refs != {*_facts(store, pull.id)["images"]}:
            folders = " ".join(os.fspath(store.object(stage_id)) for stage_id in built[1:])
            hint = f"remove what was made of the first pull, and build again: rm -r {folders}"
            raise StoreError("the preload was pulled again, and has other images than the disk", hint=hint)


def _left_out(unlocked: Mapping[str, str]) -> Iterator[str]:
    """Yield the warnings of an image without a preload, whose record would list what was left out."""
    return (f"left out, it is not required: {ref}: {reason}" for ref, reason in unlocked.items())


def _document(name: str, data: bytes) -> Document:
    return Document(name=name, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


# -- reuse -----------------------------------------------------------------------------------------------


def _is_published(target: Path, manifest: Manifest) -> bool:
    """Return whether exactly this is already published.

    Published files carry the build's date. A file of the right size that still has this date counts as untouched; if it
    has another date, it is hashed.
    """
    try:
        published = manifests.load((target / MANIFEST).read_bytes())
        if not published.same_content(manifest):
            return False
        names = {file.name for file in (*manifest.artefacts, *manifest.documents)}
        if {entry.name for entry in target.iterdir()} != {*names, MANIFEST}:
            return False
        return all(_is_untouched(target, f, manifest) for f in (*manifest.artefacts, *manifest.documents))
    except (OSError, PublishError):
        return False


def _is_untouched(target: Path, file: Document, manifest: Manifest) -> bool:
    info = os.lstat(target / file.name)
    if info.st_size != file.bytes:
        return False
    dated = info.st_mtime_ns == manifest.source_date_epoch * 1_000_000_000
    return dated or sparse.sha256(target / file.name) == file.sha256


# -- writing ---------------------------------------------------------------------------------------------


def _fill(
    staging: Path, manifest: Manifest, source: Path, documents: Mapping[str, bytes], monitor: Monitor
) -> None:
    total = sum(2 * f.bytes for f in manifest.artefacts)  # each is copied, then read back
    progress: dict[tuple[str, str], int] = {}
    stop = threading.Event()

    def place(file: Artefact) -> None:
        def counter(action: str) -> sparse.Progress:
            def count(done: int, _size: int) -> None:
                if stop.is_set():
                    raise PublishError(f"{file.name}: cancelled")
                progress[file.name, action] = done
                monitor.stage_progress("publish", sum(list(progress.values())), total, "B")

            return count

        monitor.stage_doing("publish", file.name)
        sparse.copy(source / file.name, staging / file.name, counter("copy"), direct=True)
        _finish(staging / file.name, file, manifest.source_date_epoch, counter("hash"))

    by_name = {d.name: d for d in manifest.documents}

    def write(name: str, data: bytes) -> None:
        (staging / name).write_bytes(data)
        _finish(staging / name, by_name[name], manifest.source_date_epoch, None)

    # Two at a time: one hashes, or waits for the disk, while the other one copies.
    with ThreadPoolExecutor(2) as pool:
        placed = [pool.submit(place, file) for file in manifest.artefacts]
        placed += [pool.submit(write, name, data) for name, data in documents.items()]
        try:
            for future in as_completed(placed):
                future.result()
        except BaseException:  # a failure or Ctrl-C: stop copying gigabytes that will never be published
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    (staging / MANIFEST).write_bytes(manifest.render())
    sparse.sync(staging / MANIFEST)
    staging.chmod(0o755)
    files.sync_directory(staging)


def _finish(path: Path, file: Document, epoch: int, progress: sparse.Progress | None) -> None:
    """Set a file's date, make it durable, and read it back. Raises PublishError if the disk returns other bytes."""
    path.chmod(0o644)
    os.utime(path, (epoch, epoch))
    sparse.sync(path)
    sha256 = sparse.sha256(path, progress, direct=True)
    if sha256 != file.sha256 or path.stat().st_size != file.bytes:
        raise PublishError(
            f"{file.name} differs on the disk from what the build made: sha256 {sha256}, not {file.sha256}",
            hint="the disk, or the store (image-builder store verify), is damaged",
        )


def _move(staging: Path, target: Path) -> None:
    """Make ``staging`` visible as ``target`` in one step, even if another publication is there."""
    if not os.path.lexists(target):
        _rename_new(staging, target)
        return
    # Same build, but other formats or damaged files: the old directory takes the staging directory's place. No process
    # holds a lock on it, so it is removed before the image's lock is released and another publisher can reap it.
    _exchange(staging, target)
    files.sync_directory(target.parent)
    remove_tree(staging)


def _rename_new(source: Path, target: Path) -> None:
    try:
        files.rename_new(source, target)
    except OSError as error:
        if error.errno not in _NO_FLAGS:
            raise
        source.rename(target)  # the image's lock is held: no other publisher renames here


def _exchange(source: Path, target: Path) -> None:
    try:
        files.exchange(source, target)
    except OSError as error:
        if error.errno not in _NO_FLAGS:
            raise
        aside = target.with_name(f"{_STAGING}old-{uuid.uuid4().hex[:8]}")
        target.rename(aside)
        source.rename(target)
        aside.rename(source)


def _point_latest(folder: Path, name: str) -> None:
    """Point ``latest`` to a publication; readers see either the old target or the new one."""
    latest = folder / LATEST
    if latest.is_symlink() and os.readlink(latest) == name:
        return
    link = folder / f"{_LINK}{uuid.uuid4().hex[:8]}"
    link.symlink_to(name)
    link.rename(latest)
    files.sync_directory(folder)


# -- staging ---------------------------------------------------------------------------------------------


@contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """Yield a publisher's staging directory, and remove whatever is there at the end."""
    path = folder / f"{_STAGING}{uuid.uuid4().hex[:12]}"
    with _locked(folder):
        _reap(folder)
        path.mkdir(mode=0o700)
        held = _try_lock(path)
    try:
        yield path
    finally:
        remove_tree(path)
        if held is not None:
            os.close(held)


def _reap(folder: Path) -> None:
    """Remove what dead publishers left behind, recognized by its free locks. The folder's lock must be held."""
    for path in folder.glob(f"{_LINK}*"):
        path.unlink()
    for path in folder.glob(f"{_STAGING}*"):
        held = _try_lock(path)
        if held is not None:
            remove_tree(path)
            os.close(held)


def _try_lock(path: Path) -> int | None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    if files.try_lock(fd, 0):
        return fd
    os.close(fd)
    return None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the exclusive right to reap and rename in an image's folder."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
