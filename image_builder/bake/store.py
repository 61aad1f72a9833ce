"""The store: finished stages by id, staging areas of running builds, downloads by digest.

    objects/<id>/{product/, manifest.gz, meta.json}   committed by one rename, never changed; product only for root
    staging/<build>/                                  scratch space of a running build, held by a lock
    debs/, files/                                     downloads by SHA-256
    locks/, logs/

Deletion refuses to cross a mount. Builds share the store; garbage collection waits for them.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from image_builder.bake import tree_manifest
from image_builder.bake.lock import repository
from image_builder.bake.plan.model import StagePlan
from image_builder.canonical import JSON
from image_builder.errors import StoreError
from image_builder.node import files as node_files
from image_builder.system.trees import remove_tree, sha256

# How often a waiting build checks whether the other one has ended.
_LOOK_SECONDS = 0.2
# A stage's claim is named after this many digits of its id.
_CLAIM = 32
# Characters allowed in a store's path besides letters and digits, of any alphabet.
_IN_PATHS = "/._-+@=~"
# Trees hold setuid programs of every release that was ever baked. `plan` needs only the records next to them.
_CLOSED = 0o700


@dataclass(frozen=True)
class Damage:
    """What ``Store.verify`` found wrong with one object."""

    id: str
    name: str
    difference: str
    repaired: bool = False


class Collected(NamedTuple):
    """What ``Store.gc`` removed: ids of stages, the bytes freed, names of downloads."""

    stages: list[str]
    bytes: int
    downloads: list[str]


class Store:
    """A store, in one directory. Safe for concurrent builds; every method may raise StoreError."""

    def __init__(self, path: Path) -> None:
        self.path = path

    # -- layout ------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Create the store's directories, open to all users except for staging areas and the stages' products.

        Raises StoreError for a path that a program of a bake can't parse, in apt's sources or in an overlay's options.
        """
        if unfit := sorted({c for c in os.path.abspath(self.path) if not (c.isalnum() or c in _IN_PATHS)}):
            shown = ", ".join(ascii(c) for c in unfit)
            raise StoreError(
                f"the path of the store {os.fspath(self.path)!a} has characters that can't be in it: {shown}",
                hint=f"letters, digits and {_IN_PATHS} are fine: --store DIR, or IMAGE_BUILDER_STORE=DIR",
            )
        for name in ("objects", "staging", "debs", "files", "locks", "logs"):
            (self.path / name).mkdir(parents=True, exist_ok=True)
        self.path.chmod(0o755)
        (self.path / "staging").chmod(_CLOSED)
        for stage_id in os.listdir(self.path / "objects"):
            with suppress(FileNotFoundError):  # gc removed it in the meantime
                if stat.S_IMODE(self.product(stage_id).stat().st_mode) != _CLOSED:
                    self.product(stage_id).chmod(_CLOSED)

    def object(self, stage_id: str) -> Path:
        return self.path / "objects" / stage_id

    def product(self, stage_id: str) -> Path:
        """Return the product directory of a finished stage."""
        return self.object(stage_id) / "product"

    def has(self, stage_id: str) -> bool:
        """Return whether a stage is finished."""
        return (self.object(stage_id) / "meta.json").exists()

    def meta(self, stage_id: str) -> dict[str, Any]:
        """Return the record of a finished stage: name, plan parts, seconds, bytes, facts."""
        path = self.object(stage_id) / "meta.json"
        try:
            meta: dict[str, Any] = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise StoreError(f"{path} can't be read: {error}", hint="image-builder store verify") from error
        return meta

    # -- locks -------------------------------------------------------------------------------------------

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Block garbage collection while a build runs."""
        with _flock(self.path / "locks" / ".store", fcntl.LOCK_SH):
            yield

    @contextmanager
    def claim(
        self,
        stage_id: str,
        on_wait: Callable[[], None] | None = None,
        stop: threading.Event | None = None,
    ) -> Iterator[None]:
        """Hold the exclusive right to build a stage; a second builder waits here and then finds it finished.

        ``on_wait`` is called once if there is a wait. Raises StoreError if ``stop`` is set during the wait.
        """
        with _flock(self.path / "locks" / stage_id[:_CLAIM], fcntl.LOCK_EX, on_wait, stop):
            yield

    # -- writing -----------------------------------------------------------------------------------------

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """Yield a build's scratch directory and remove it at the end; reap those of dead builds first."""
        path = self.path / "staging" / uuid.uuid4().hex[:12]
        with ExitStack() as held:
            with self._staging_alone():
                self._reap()
                path.mkdir(mode=0o700)
                held.enter_context(_flock(path / ".lock", fcntl.LOCK_EX))
            try:
                yield path
            finally:
                with self._staging_alone():
                    remove_tree(path)

    def reap(self) -> None:
        """Remove the staging areas of dead builds, recognized by their free locks."""
        if (self.path / "staging").is_dir():
            with self._staging_alone():
                self._reap()

    def _reap(self) -> None:
        for path in (self.path / "staging").iterdir():
            try:
                with _flock(path / ".lock", fcntl.LOCK_EX | fcntl.LOCK_NB):
                    remove_tree(path)
            except BlockingIOError:
                continue

    @contextmanager
    def _staging_alone(self) -> Iterator[None]:
        """Keep others from creating, reaping or removing a staging area: a half-made one looks like a dead build's."""
        with _flock(self.path / "locks" / ".staging", fcntl.LOCK_EX):
            yield

    def commit(
        self, plan: StagePlan, staged: Path, seconds: float, facts: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Make ``staged`` (a directory holding ``product``) the finished stage of ``plan``.

        The manifest is written from the directory's contents; one ``syncfs`` makes everything durable, and one
        rename makes it visible. A stage that hashed its files while writing them lists them in ``facts["files"]``, as
        items with ``name`` and ``sha256``. Returns the stage's meta.
        """
        started = time.monotonic()
        _close(staged)
        hashed = {file["name"]: file["sha256"] for file in facts.get("files", ())}
        entries, size = tree_manifest.write(staged / "product", staged / "manifest.gz", hashed)
        meta: dict[str, Any] = {
            "name": plan.name,
            "id": plan.id,
            **plan.parts,
            "facts": dict(facts),
            "entries": entries,
            "bytes": size,
            "manifest_sha256": sha256(staged / "manifest.gz"),
        }
        node_files.syncfs(staged)
        meta["seconds"] = round(seconds + time.monotonic() - started, 2)
        node_files.write(staged / "meta.json", json.dumps(meta, indent=1, sort_keys=True).encode())
        self._enter(plan.id, staged)
        return meta

    def enter(self, stage_id: str, staged: Path) -> None:
        """Make ``staged``, an object that another store has committed, a finished stage here, as ``commit`` does."""
        _close(staged)
        node_files.syncfs(staged)
        self._enter(stage_id, staged)

    def _enter(self, stage_id: str, staged: Path) -> None:
        target = self.object(stage_id)
        if target.exists():
            remove_tree(target)
        staged.rename(target)
        node_files.sync_directory(target.parent)

    # -- reading -----------------------------------------------------------------------------------------

    def check(self, stage_id: str) -> None:
        """Compare a stage with its manifest by ``stat`` (names, types, modes, owners, sizes, times, attributes).

        Raises StoreError naming the first difference. Content is compared by ``verify``.
        """
        for difference in tree_manifest.differences(self.object(stage_id), contents=False):
            raise StoreError(
                f"stage {self.meta(stage_id).get('name')} {stage_id[:12]} in the store is damaged: {difference}",
                hint=f"remove {self.object(stage_id)} and build again; image-builder store verify checks all",
            )

    def ids(self) -> list[str]:
        """Return the ids of all finished stages."""
        objects = self.path / "objects"
        return sorted(p.name for p in objects.iterdir() if self.has(p.name)) if objects.exists() else []

    def verify(self) -> list[Damage]:
        """Hash every object against its manifest and every download against its name.

        Cached control files are compared with their packages, and rewritten if they differ.
        """
        with self.in_use():
            return self._damages()

    def _damages(self) -> list[Damage]:
        damages = []
        for stage_id in self.ids():
            try:
                name = str(self.meta(stage_id)["name"])
            except (StoreError, KeyError):
                name = "a stage"
            damages += [
                Damage(stage_id, name, difference)
                for difference in tree_manifest.differences(self.object(stage_id), contents=True, limit=5)
            ]
        for folder in ("debs", "files"):
            for path in sorted((self.path / folder).iterdir()):
                if path.suffix != ".control" and sha256(path) != path.name:
                    damages.append(Damage(path.name, folder, "its bytes are not the ones of its name"))
        damaged = {damage.id for damage in damages}
        damages += [
            Damage(path.stem, "debs", "its control file was damaged", repaired=True)
            for path in sorted((self.path / "debs").glob("*.control"))
            if _repair_control(path, from_package=path.stem not in damaged)
        ]
        return damages

    # -- garbage -----------------------------------------------------------------------------------------

    def record(self, image: str, ids: list[str], former: Iterable[str] = ()) -> None:
        """Record the stages of an image's build; ``gc`` keeps those of the last builds of each image.

        ``image`` is a definition's ``record_name``, or a name that isn't in any inventory. If nothing is recorded of
        it, it gets what is recorded under the first of its ``former`` names.
        """
        path = self.path / "locks" / f"{image}.builds"
        # No image's name can make this one of the store's own locks, which the caller may hold.
        with _flock(path.with_name(f".{path.name}.lock"), fcntl.LOCK_EX):
            for name in former:
                with suppress(FileNotFoundError, FileExistsError):
                    node_files.rename_new(path.with_name(f"{name}.builds"), path)
            builds = [b for b in _builds(path) if b != ids] + [ids]
            node_files.write(path, json.dumps(builds[-50:]).encode())

    def last_build(self, *names: str) -> dict[str, dict[str, Any]]:
        """Return the meta of the stages of an image's last build, by name, except for stages collected since then.

        ``names`` are the image's record name and its former ones: the first one with a build counts.
        """
        last = next(
            filter(None, (_builds(self.path / "locks" / f"{name}.builds")[-1:] for name in names)), []
        )
        return {meta["name"]: meta for ids in last for meta in (self.meta(i) for i in ids if self.has(i))}

    def gc(
        self, keep: int, on_wait: Callable[[], None] | None = None, *, downloads: bool = False
    ) -> Collected:
        """Remove the stages that the last ``keep`` builds of every image don't need.

        With ``downloads``, also remove the downloads that no remembered lock names; raises StoreError if one of these
        locks can't be read. Otherwise downloads stay: they are small compared to stages and, once a mirror has only
        newer versions, all that a kept lock can be built from. ``on_wait`` is called once if builds have to finish
        first.
        """
        with _flock(self.path / "locks" / ".store", fcntl.LOCK_EX, on_wait):
            self.reap()
            doomed_downloads = self._unnamed_downloads() if downloads else []
            needed: set[str] = set()
            for path in (self.path / "locks").glob("*.builds"):
                builds = _builds(path)
                needed.update(i for build in (builds[-keep:] if keep else []) for i in build)
            removed = [i for i in self.ids() if i not in needed]
            freed = 0
            for stage_id in removed:
                with suppress(StoreError):  # its record can't be read, but nothing needs it any longer
                    freed += int(self.meta(stage_id)["bytes"])
                doomed = self.path / "staging" / f"gc-{stage_id[:12]}"
                self.object(stage_id).rename(doomed)
            for path in doomed_downloads:
                freed += path.stat().st_blocks * 512
                path.unlink()
            self.reap()
            self._remove_unused_claims()
            return Collected(removed, freed, [path.name for path in doomed_downloads])

    def _unnamed_downloads(self) -> list[Path]:
        named: set[str] = set()
        for path in (self.path / "locks").glob("*.lock.json"):
            try:
                named |= set(locked_digests(json.loads(path.read_bytes())))
            except ValueError as error:
                raise StoreError(
                    f"{path} can't be read: {error}", hint="remove it: image-builder lock makes a new one"
                ) from error
        folders = (self.path / name for name in ("debs", "files"))
        present = [path for folder in folders for path in sorted(folder.iterdir())]
        return [path for path in present if path.name.split(".")[0] not in named]

    def _remove_unused_claims(self) -> None:
        """Remove the claim locks of stages that don't exist. No build waits for one, since all builds have ended."""
        claimed = {name[:_CLAIM] for name in os.listdir(self.path / "objects")}
        for path in (self.path / "locks").iterdir():
            if re.fullmatch(f"[0-9a-f]{{{_CLAIM}}}", path.name) and path.name not in claimed:
                path.unlink()


def _close(staged: Path) -> None:
    """Open an object to all users, except for its product."""
    staged.chmod(0o755)
    (staged / "product").chmod(_CLOSED)


def locked_digests(value: JSON) -> Iterator[str]:
    """Yield every ``sha256`` of a lock, whatever its format."""
    if isinstance(value, Mapping):
        yield from (str(item) for name, item in value.items() if name == "sha256")
    if isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from locked_digests(item)


def _builds(path: Path) -> list[list[str]]:
    """Return the stage ids of each of an image's builds, the last build last. Raises StoreError."""
    try:
        builds: list[list[str]] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise StoreError(
            f"{path} can't be read: {error}",
            hint="remove it: `store gc` then keeps no build before the next one",
        ) from error
    return builds


def _repair_control(path: Path, *, from_package: bool) -> bool:
    """Repair a damaged control file from its package, or remove it without one; return whether it was damaged."""
    recorded = repository.fields(path.read_text(encoding="utf-8", errors="replace"))
    try:
        control = repository.read_control(path.with_suffix("")) if from_package else ""
    except (repository.NotAPackageError, FileNotFoundError):
        control = ""
    if not control:
        if not recorded:
            path.unlink()
        return not recorded
    if recorded == repository.fields(control):
        return False
    node_files.write(path, control.encode())
    return True


@contextmanager
def _flock(
    path: Path, how: int, on_wait: Callable[[], None] | None = None, stop: threading.Event | None = None
) -> Iterator[IO[bytes]]:
    """Hold a lock on a file; the kernel releases it when the process ends. LOCK_NB raises BlockingIOError.

    ``on_wait`` is for LOCK_EX: it is called once if the lock is already held. Raises StoreError if ``stop`` is set
    during that wait.
    """
    with path.open("ab") as stream:
        if on_wait is None:
            fcntl.flock(stream, how)
        elif not node_files.try_lock(stream.fileno(), 0):
            on_wait()
            stop = stop or threading.Event()
            while not node_files.try_lock(stream.fileno(), 0):
                if stop.wait(_LOOK_SECONDS):
                    raise StoreError("the build ends")
        yield stream
