"""An export of a store: what the next builds of some images need, as plain files that any user can read and copy.

    DIR/index.json              the contents of the export, each file with its SHA-256; written last
    DIR/objects/<id>.tar.zst    a finished stage as the store has it; ``.tar`` if there is no zstd
    DIR/downloads/<sha256>      locked files, as they were fetched

Exporting to the same directory again writes what is new and removes what is no longer needed. An import takes over
one object after another, each with one rename, just as a build commits its stages.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, ValidationError

from image_builder.bake import space, tree_manifest
from image_builder.bake.lock.model import Lock, Sha256
from image_builder.bake.lock.resolve import earlier_lock
from image_builder.bake.plan.model import StagePlan
from image_builder.bake.stages import layer, preload
from image_builder.bake.stages.kind import MIB, StageKind
from image_builder.bake.store import Store, locked_digests
from image_builder.bake.verification import Count
from image_builder.canonical import digest
from image_builder.errors import CommandError, HostError, SpaceError, StoreError, UsageError
from image_builder.events import Monitor, shown_stage
from image_builder.node import files
from image_builder.settings import Settings
from image_builder.strict_yaml import Strict
from image_builder.system import process
from image_builder.system.environment import BASE
from image_builder.system.trees import sha256

FORMAT: Final = 1
INDEX = "index.json"
OBJECTS, DOWNLOADS = "objects", "downloads"
_OWN = {INDEX, f".{INDEX}.new", OBJECTS, DOWNLOADS}
# The parts of an object.
_MEMBERS = ("product", "manifest.gz", "meta.json")
# Archives keep everything that a tree's manifest records. A name with a colon isn't a remote host.
_TAR = ("tar", "--force-local", "--numeric-owner", "--acls", "--xattrs", "--xattrs-include=*")
# Character devices in a root: null, zero, full, random, urandom, tty, console, ptmx; and an overlay's whiteout.
_DEVICES = {(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 1), (5, 2), (0, 0)}
# Fast: an archive is read only once, and a disk image hardly gets any smaller.
_ZSTD = "zstd -T0 -1"
_HINT = "remove it: the next build makes all stages, and an export of that store is whole again"


class Archive(Strict):
    """A finished stage. ``unpacked`` is its size in a store, in bytes."""

    id: Sha256
    file: Annotated[str, Field(pattern=rf"^{OBJECTS}/[0-9a-f]{{64}}\.tar(\.zst)?$")]
    sha256: Sha256
    bytes: Count
    unpacked: Count


class Download(Strict):
    """A locked file; ``folder`` is the store's folder that it belongs to."""

    folder: Literal["debs", "files"]
    sha256: Sha256
    bytes: Count

    @property
    def file(self) -> str:
        """Return its path below the export."""
        return f"{DOWNLOADS}/{self.sha256}"


class Build(Strict):
    """What a store remembers about an image: the stages of its last build, and the lock that the next one uses."""

    stages: list[Sha256]
    lock: Lock | None


class Index(Strict):
    """The contents of an export. ``images`` maps each image's ``record_name`` to its build."""

    format: Literal[1] = FORMAT
    objects: list[Archive] = Field(default_factory=list)
    downloads: list[Download] = Field(default_factory=list)
    images: dict[Annotated[str, Field(pattern=r"^[^./\x00][^/\x00]*$")], Build] = Field(default_factory=dict)


@dataclass(frozen=True)
class Transfer:
    """What an export wrote or an import took over: ids of stages, digests of downloads, bytes of their files.

    ``present`` counts the stages that were already there; ``removed`` lists files that were no longer needed.
    """

    stages: list[str]
    downloads: list[str]
    bytes: int
    present: int
    removed: list[str]


# -- export ----------------------------------------------------------------------------------------------


def export(
    images: Mapping[str, Sequence[str]],
    directory: Path,
    settings: Settings,
    kinds: Mapping[str, StageKind],
    monitor: Monitor,
    *,
    everything: bool = False,
) -> Transfer:
    """Export the last builds of ``images`` (each one's ``record_name`` -> its former names) to ``directory``.

    With ``everything``, export all stages of these builds and everything that their locks name; otherwise only what
    ``required`` returns. Raises UsageError if the directory holds anything else, StoreError if an image was never built
    or a stage is damaged.
    """
    store = Store(settings.store)
    with store.in_use():
        builds = {image: store.last_build(image, *former) for image, former in images.items()}
        if unbuilt := sorted(image for image, build in builds.items() if not build):
            raise StoreError(
                f"the store {store.path} has no build of {', '.join(unbuilt)}",
                hint="build it first; the inventories must be the same",
            )
        locks = {image: earlier_lock([image, *former], settings)[0] for image, former in images.items()}
        with _own(directory), shown_stage(monitor, "export"):
            return _export(builds, locks, directory, store, kinds, monitor, everything=everything)


def required(build: Mapping[str, Mapping[str, Any]], *, everything: bool = False) -> list[Mapping[str, Any]]:
    """Return those stages of a build, given by name and in order, from which another store can continue.

    These are the last layer and everything that follows it, the trees and stages that those are based on, and the
    pulls: with them, a build has nothing to do if nothing has changed, and otherwise starts at the last layer. Stages
    that only lower layers use, such as compilers, are left out.
    """
    stages = list(build.values())
    if everything:
        return stages
    redone = redoable(build)
    needed = {str(stage["id"]) for stage in redone}
    needed |= {i for stage in redone for i in (*stage["lowers"], *stage["inputs"].values())}
    return [stage for stage in stages if stage["id"] in needed or stage["kind"] == preload.KIND.name]


def redoable(build: Mapping[str, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the last layer of a build and the stages that follow it."""
    stages = list(build.values())
    layers = [number for number, stage in enumerate(stages) if stage["kind"] == layer.KIND.name]
    return stages[layers[-1] if layers else 0 :]


def _locked(
    build: Mapping[str, Mapping[str, Any]], lock: Lock, kinds: Mapping[str, StageKind], *, everything: bool
) -> Iterator[str]:
    """Yield the digests of the locked files used by those stages that another store may have to run."""
    if everything:
        yield from locked_digests(lock.as_json())
        return
    for stage in redoable(build):
        name = str(stage["name"])
        if name in lock.groups:
            yield from (package.sha256 for package in lock.groups[name].packages)
        if kind := kinds.get(stage["kind"]):
            plan = StagePlan(name, kind.name, stage["options"])
            yield from (file.sha256 for file in kind.files(plan, lock))


def _export(
    builds: Mapping[str, Mapping[str, Mapping[str, Any]]],
    locks: Mapping[str, Lock | None],
    directory: Path,
    store: Store,
    kinds: Mapping[str, StageKind],
    monitor: Monitor,
    *,
    everything: bool,
) -> Transfer:
    chosen = {
        str(stage["id"]): int(stage["bytes"])
        for build in builds.values()
        for stage in required(build, everything=everything)
    }
    digests = {
        name
        for image, build in builds.items()
        if (lock := locks[image])
        for name in _locked(build, lock, kinds, everything=everything)
    }
    archived = {archive.id: archive for archive in _present(directory)}
    new = [stage_id for stage_id in chosen if stage_id not in archived]
    done, total = 0, sum(chosen[stage_id] for stage_id in new)
    for stage_id in new:
        monitor.stage_progress("export", done, total, "B")
        archived[stage_id] = _pack(store, stage_id, chosen[stage_id], directory)
        done += chosen[stage_id]
    downloads, copied = _copy_downloads(sorted(digests), store, directory, monitor)
    index = Index(
        objects=[archived[stage_id] for stage_id in sorted(chosen)],
        downloads=downloads,
        images={
            image: Build(stages=[str(stage["id"]) for stage in builds[image].values()], lock=locks[image])
            for image in sorted(builds)
        },
    )
    _write_index(directory, index)
    written: list[Archive | Download] = [*(archived[stage_id] for stage_id in new), *copied]
    return Transfer(
        new,
        [download.sha256 for download in copied],
        sum(file.bytes for file in written),
        len(chosen) - len(new),
        _remove_others(directory, index),
    )


@contextmanager
def _own(directory: Path) -> Iterator[None]:
    """Hold the exclusive right to write an export to a directory. Raises UsageError if it has anything else."""
    hint = "give an empty directory, or one that doesn't exist"
    if directory.is_dir() and (foreign := set(os.listdir(directory)) - _OWN):
        raise UsageError(f"{directory} is no export, it has {min(foreign)}", hint=hint)
    try:
        for folder in (OBJECTS, DOWNLOADS):
            (directory / folder).mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UsageError(f"{directory} is no directory: {error.filename}", hint=hint) from error
    with files.descriptor(directory, os.O_DIRECTORY) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield


def _present(directory: Path) -> list[Archive]:
    """Return the archives of an earlier export that are still there in full size."""
    try:
        index = read_index(directory)
    except StoreError:  # there is none, or none to continue from
        return []
    return [archive for archive in index.objects if _size(directory / archive.file) == archive.bytes]


def _size(path: Path) -> int:
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return -1


def _pack(store: Store, stage_id: str, unpacked: int, directory: Path) -> Archive:
    """Write the archive of a finished stage, which gets its final name only once it is complete."""
    store.check(stage_id)
    suffix, compressed = (".tar.zst", [f"--use-compress-program={_ZSTD}"]) if _has_zstd() else (".tar", [])
    file = directory / OBJECTS / f"{stage_id}{suffix}"
    ignored = [f"--xattrs-exclude={name}" for name in sorted(tree_manifest.ATTRIBUTES_OF_PLACE)]
    # Access and change times belong to a tree's location.
    headers = "--pax-option=delete=atime,delete=ctime"
    place = ("--directory", store.object(stage_id))
    argv = [*_TAR, *ignored, "--create", "--format=posix", headers, "--sort=name", "--sparse", *compressed]
    # 1: a file changed in the meantime. A concurrent build made a hard link to it; an import checks the content.
    with _draft(file) as draft:
        try:
            process.run([*argv, "--file", draft, *place, *_MEMBERS], ok=(0, 1))
        except CommandError as error:
            if shortage := space.shortage(directory):
                hint = "free some, or export to another disk"
                raise SpaceError(f"{shortage}: {file}", hint=hint) from error
            raise
        archive = Archive(
            id=stage_id,
            file=f"{OBJECTS}/{file.name}",
            sha256=sha256(draft),
            bytes=draft.stat().st_size,
            unpacked=unpacked,
        )
        draft.chmod(0o644)
        draft.replace(file)
    return archive


@contextmanager
def _draft(file: Path) -> Iterator[Path]:
    """Yield the path to write a file to before it gets its name; what is still there at the end is removed."""
    draft = file.with_name(f".{file.name}.new")
    try:
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def _has_zstd() -> bool:
    return shutil.which("zstd", path=BASE["PATH"]) is not None


def _copy_downloads(
    digests: Sequence[str], store: Store, directory: Path, monitor: Monitor
) -> tuple[list[Download], list[Download]]:
    """Copy the downloads that the store has, but no damaged ones; return all that the export has, and the new ones."""
    downloads: list[Download] = []
    copied: list[Download] = []
    for name in digests:
        for folder in ("debs", "files"):
            source = store.path / folder / name
            if (size := _size(source)) < 0:
                continue
            download = Download.model_validate({"folder": folder, "sha256": name, "bytes": size})
            target = directory / download.file
            if (before := _size(target)) != size:
                with _draft(target) as draft:
                    shutil.copyfile(source, draft)
                    if sound := sha256(draft) == name:
                        draft.replace(target)
                if sound:
                    copied.append(download)
                else:
                    monitor.note(f"not exported, it is damaged: {source}; see image-builder store verify")
                    if before < 0 or sha256(target) != name:
                        continue
                    download = download.model_copy(update={"bytes": before})
            downloads.append(download)
    return downloads, copied


def _write_index(directory: Path, index: Index) -> None:
    content = index.model_dump(mode="json", exclude={"images"})
    content["images"] = {
        image: {"stages": build.stages, "lock": build.lock and build.lock.as_json()}
        for image, build in index.images.items()
    }
    content["sha256"] = digest(content)
    files.write_changed(directory / INDEX, (json.dumps(content, indent=1, sort_keys=True) + "\n").encode())


def _remove_others(directory: Path, index: Index) -> list[str]:
    """Remove the files that the index doesn't list, including drafts of a killed export; return their paths."""
    listed = {*(archive.file for archive in index.objects), *(d.file for d in index.downloads)}
    present = [
        f"{folder}/{name}" for folder in (OBJECTS, DOWNLOADS) for name in os.listdir(directory / folder)
    ]
    others = sorted(set(present) - listed)
    for path in others:
        (directory / path).unlink()
    return others


# -- import ----------------------------------------------------------------------------------------------


def take_over(directory: Path, store: Store, monitor: Monitor) -> Transfer:
    """Import an export's stages and downloads, and its records of images that the store has none of.

    Every file is checked against its digest before the first one is unpacked. Raises StoreError if the export is
    damaged or isn't one, SpaceError, and HostError if a program is missing. What the store already has stays as it is.
    """
    index = read_index(directory)
    store.prepare()
    with store.in_use(), store.staging() as staging, shown_stage(monitor, "import"):
        objects = [archive for archive in index.objects if not store.has(archive.id)]
        downloads = [d for d in index.downloads if not (store.path / d.folder / d.sha256).exists()]
        parts: list[Archive | Download] = [*objects, *downloads]
        _require_space(store.path, sum(a.unpacked for a in objects) + sum(d.bytes for d in downloads))
        for part in parts:
            _require_sound(directory / part.file, part)
        for download in downloads:
            _take_download(directory, download, store, staging)
        done, total = 0, sum(archive.unpacked for archive in objects)
        for archive in objects:
            monitor.stage_progress("import", done, total, "B")
            with store.claim(
                archive.id, lambda: monitor.stage_doing("import", "another build makes a stage")
            ):
                if not store.has(archive.id):
                    store.enter(archive.id, _unpack(directory, archive, staging, store))
            done += archive.unpacked
        for image, build in index.images.items():
            _remember(store, staging, image, build)
    return Transfer(
        [archive.id for archive in objects],
        [download.sha256 for download in downloads],
        sum(part.bytes for part in parts),
        len(index.objects) - len(objects),
        [],
    )


def read_index(directory: Path) -> Index:
    """Return the index of an export. Raises StoreError if it is damaged, in another format, or missing."""
    path = directory / INDEX
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise StoreError(
            f"{directory} is no export of a store: {INDEX}: {error.strerror}",
            hint="make one: image-builder store export --to DIR IMAGE",
        ) from error
    except ValueError as error:
        raise StoreError(f"{path} is damaged: {error}", hint=_HINT) from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise StoreError(f"{path} is not an export of format {FORMAT}, which this version reads", hint=_HINT)
    if document.pop("sha256", None) != digest(document):
        raise StoreError(f"{path} is damaged: its bytes are not the ones that were written", hint=_HINT)
    try:
        return Index.model_validate_json(json.dumps(document))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise StoreError(f"{path} is no index: {where}: {first['msg']}", hint=_HINT) from error


def _require_space(path: Path, needed: int) -> None:
    free = shutil.disk_usage(path).free
    if free < needed:
        raise SpaceError(
            f"{path} has {free // MIB} MiB free, the export takes {needed // MIB} MiB",
            hint="free some: image-builder store gc --keep 1; or another disk: --store DIR",
        )


def _require_sound(path: Path, part: Archive | Download) -> None:
    """Raise StoreError if a file isn't the one that the index lists."""
    size = _size(path)
    if size < 0:
        raise StoreError(f"{path} is missing", hint=_HINT)
    if size != part.bytes:
        raise StoreError(f"{path} is damaged: it has {size} of {part.bytes} bytes", hint=_HINT)
    if sha256(path) != part.sha256:
        raise StoreError(f"{path} is damaged: its bytes are not the ones that were written", hint=_HINT)


def _take_download(directory: Path, download: Download, store: Store, staging: Path) -> None:
    staged = staging / download.sha256
    shutil.copyfile(directory / download.file, staged)
    _require_sound(staged, download)  # from now on, the copy is trusted
    staged.chmod(0o644)
    staged.rename(store.path / download.folder / download.sha256)


def _unpack(directory: Path, archive: Archive, staging: Path, store: Store) -> Path:
    """Unpack an archive into the staging area; return a complete and sound object, or raise StoreError.

    GNU tar follows no links and never leaves the directory: it strips leading slashes, refuses ``..``, and creates
    links that point elsewhere last. A foreign archive doesn't unpack to a valid object.
    """
    file, staged = directory / archive.file, staging / archive.id
    if file.suffix == ".zst" and not _has_zstd():
        raise HostError(f"{file} can't be read without zstd", hint="apt-get install zstd")
    staged.mkdir()
    try:
        process.run([*_TAR, "--extract", "--keep-old-files", "--file", file, "--directory", staged])
    except CommandError as error:
        if shortage := space.shortage(store.path):
            raise SpaceError(
                f"{shortage}: {file}", hint="free some: image-builder store gc --keep 1"
            ) from error
        raise StoreError(f"{file} can't be unpacked: {error.tail or error.message}", hint=_HINT) from error
    if reason := _fault(staged, archive.id):
        raise StoreError(f"{file} is no stage of a store: {reason}", hint=_HINT)
    return staged


def _fault(staged: Path, stage_id: str) -> str | None:
    """Return why a directory isn't a stage's object, or None if it is."""
    types = {name: stat.S_IFMT((staged / name).lstat().st_mode) for name in os.listdir(staged)}
    if types != dict(zip(_MEMBERS, (stat.S_IFDIR, stat.S_IFREG, stat.S_IFREG), strict=True)):
        return f"it has {', '.join(sorted(types)) or 'nothing'}, not {', '.join(_MEMBERS)}"
    try:
        meta = json.loads((staged / "meta.json").read_bytes())
        parts = {name: meta[name] for name in StagePlan("", "").parts}
    except (ValueError, KeyError, TypeError) as error:
        return f"meta.json: {error!r}"
    if digest(parts) != stage_id or meta.get("id") != stage_id:
        return "what it was made of is not what its id says"
    for path, info in tree_manifest.entries(staged / "product"):
        device = (os.major(info.st_rdev), os.minor(info.st_rdev))
        if stat.S_ISBLK(info.st_mode) or (stat.S_ISCHR(info.st_mode) and device not in _DEVICES):
            return f"{path} is a device"
    return next(iter(tree_manifest.differences(staged, contents=False)), None)


def _remember(store: Store, staging: Path, image: str, build: Build) -> None:
    """Record an image's build and lock in the store, unless it already remembers any."""
    if not store.last_build(image):
        store.record(image, build.stages)
    if build.lock:
        draft = staging / "lock"
        build.lock.save(draft)
        with suppress(FileExistsError):
            files.rename_new(draft, store.path / "locks" / f"{image}.lock.json")
