"""Installation of a repository's collections, which ``ansible-galaxy`` fetches and the lock verifies."""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from image_builder.definition import engine
from image_builder.definition.collections import (
    COMMAND,
    LOCK,
    MANIFEST,
    CollectionLock,
    LockedCollection,
    Requirements,
    galaxy_file,
    is_named,
    missing,
)
from image_builder.errors import CommandError, FetchError, UsageError
from image_builder.system import process
from image_builder.system.environment import PROXIES
from image_builder.system.trees import remove_tree


@dataclass(frozen=True)
class _Archive:
    """A collection's archive: a name, a version and the SHA-256 of its manifest."""

    path: Path
    name: str
    version: str
    sha256: str


def install(project: Path, python: Path, *, update: bool) -> tuple[CollectionLock, tuple[str, ...]]:
    """Install a repository's collections as they are locked; return the lock and the names of what was installed.

    The lock is created if there is none yet, and again for ``update``. Nothing is installed if a collection's content
    differs from what was locked. Raises UsageError if there are no requirements, FetchError.
    """
    requirements = Requirements.load(project)
    if not requirements:
        raise UsageError(
            f"{project} has no requirements.yml", hint="it lists collections, as ansible-galaxy has it"
        )
    folder = engine.collection_folders(project)[0]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".installing-", dir=folder) as work:
        galaxy = _Galaxy(project, python, Path(work))
        lock = CollectionLock.load(project)
        archives: list[_Archive] = []
        if lock is None or update:
            archives = galaxy.download(requirements.file)
            lock = CollectionLock(collections=galaxy.locked(requirements, archives))
        absent = list(missing(project, lock))
        if absent and not archives:
            archives = galaxy.download_again(absent)
        names = {collection.name for collection in absent}
        galaxy.install(folder, [archive for archive in archives if archive.name in names])
        lock.save(project)
    return lock, tuple(sorted(names))


@dataclass(frozen=True)
class _Galaxy:
    """``ansible-galaxy``, with the servers and tokens of the caller's settings; ``work`` is for its files."""

    project: Path
    python: Path
    work: Path

    def run(self, *argv: str | Path) -> None:
        own = ("HOME", *(name for proxy in PROXIES for name in (proxy, proxy.upper())))
        env = {name: os.environ[name] for name in own if name in os.environ}
        env |= {k: v for k, v in engine.caller.settings.items() if k.startswith("ANSIBLE_GALAXY_")}
        # Hide collections that are already installed, perhaps damaged.
        env["ANSIBLE_COLLECTIONS_PATH"] = os.fspath(self.work)
        program = self.python.parent / "ansible-galaxy"
        try:
            process.run([program, "collection", *argv], cwd=self.project, env=env)
        except CommandError as error:
            _, mark, reason = error.tail.partition("[ERROR]: ")
            raise FetchError(f"ansible-galaxy: {reason if mark else error.tail}") from error

    def download(self, requirements: Path, *options: str) -> list[_Archive]:
        """Download the collections that a requirements file lists."""
        folder = Path(tempfile.mkdtemp(dir=self.work))
        self.run("download", "--no-cache", "-r", requirements, "-p", folder, *options)
        return [_archive(path) for path in sorted(folder.glob("*.tar.gz"))]

    def download_entries(self, entries: Iterable[Mapping[str, str]]) -> list[_Archive]:
        """Download the collections of these ``requirements.yml`` entries, without their dependencies."""
        file = self.work / "requirements.yml"
        file.write_text(galaxy_file(entries), encoding="utf-8")
        return self.download(file, "--no-deps")

    def locked(
        self, requirements: Requirements, archives: Sequence[_Archive]
    ) -> tuple[LockedCollection, ...]:
        """Return the downloads as locked collections, each with the entry that fetches the same again."""
        sources: dict[str, dict[str, str]] = {}
        for entry in requirements.entries:
            # An entry without a name doesn't say which collection it is.
            names = [entry["name"]] if is_named(entry) else [a.name for a in self.download_entries([entry])]
            sources |= {name: dict(entry) for name in names}
        return tuple(
            LockedCollection(
                name=a.name, version=a.version, sha256=a.sha256, source=_pinned(a, sources.get(a.name))
            )
            for a in sorted(archives, key=lambda archive: archive.name)
        )

    def download_again(self, collections: Sequence[LockedCollection]) -> list[_Archive]:
        """Download locked collections. Raises FetchError if a download isn't what was locked."""
        archives = {a.name: a for a in self.download_entries([c.source for c in collections])}
        for locked in collections:
            archive = archives.get(locked.name)
            if archive is None or archive.sha256 != locked.sha256:
                came = (
                    f"{archive.name} {archive.version} of another content"
                    if archive
                    else "nothing of this name"
                )
                raise FetchError(
                    f"{locked.name}: {LOCK} has {locked.version} ({locked.sha256[:12]}…), and what came is {came}",
                    hint=f"if it was published anew: {COMMAND} --update",
                )
        return list(archives.values())

    def install(self, folder: Path, archives: Sequence[_Archive]) -> None:
        """Unpack archives, each checked against its own manifest, and move each complete collection into place."""
        if not archives:
            return
        unpacked = self.work / "unpacked"
        self.run("install", "--no-deps", "--force", "-p", unpacked, *(archive.path for archive in archives))
        for archive in archives:
            part = Path("ansible_collections", *archive.name.split("."))
            target = folder / part
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.exists():
                remove_tree(target)
            (unpacked / part).rename(target)


def _pinned(archive: _Archive, entry: Mapping[str, str] | None) -> dict[str, str]:
    """Return the entry that requests exactly this archive."""
    if entry and not is_named(entry):
        return dict(entry)
    return {**(entry or {}), "name": archive.name, "version": archive.version}


def _archive(path: Path) -> _Archive:
    try:
        with tarfile.open(path) as archive:
            stream = archive.extractfile(MANIFEST)
            content = stream.read() if stream else b""
        info = json.loads(content)["collection_info"]
        name, version = f"{info['namespace']}.{info['name']}", str(info["version"])
    except (tarfile.TarError, OSError, ValueError, KeyError, TypeError) as error:
        raise FetchError(f"{path.name} is not the archive of a collection") from error
    return _Archive(path, name, version, hashlib.sha256(content).hexdigest())
