"""Collections of a user's repository: its own, and those that ``requirements.yml`` requires and a lock pins.

``collections.lock`` pins each by the SHA-256 of its ``MANIFEST.json``, which contains that of its ``FILES.json``, which
contains those of all its files, so an installed collection is checked just as its archive is. A collection with a
``galaxy.yml`` and no manifest is the repository's own source.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from image_builder.canonical import JSON
from image_builder.definition import engine
from image_builder.definition.values import Place
from image_builder.errors import DefinitionError, LockError, Problem
from image_builder.node import files
from image_builder.strict_yaml import Strict
from image_builder.system.trees import files_in, sha256

LOCK = "collections.lock"
MANIFEST = "MANIFEST.json"
COMMAND = "image-builder collections"
# Where Ansible's own tools look for requirements.
_REQUIREMENTS = ("requirements.yml", "collections/requirements.yml")
# Below each directory of `collections_path`.
_NAMESPACES = "ansible_collections"
_FILES = "FILES.json"


@dataclass(frozen=True)
class Collection:
    """An installed collection. ``name`` is ``namespace.name``."""

    name: str
    path: Path

    @property
    def is_source(self) -> bool:
        """Return whether it is the repository's own rather than an installed archive."""
        return not (self.path / MANIFEST).is_file()

    @property
    def roles(self) -> Mapping[str, Path]:
        """Return its roles by full name."""
        return {
            f"{self.name}.{role.name}": role for role in sorted(self.path.glob("roles/*")) if role.is_dir()
        }

    @property
    def parts(self) -> Iterable[Path]:
        """Return the files that determine what it does; a locked one's manifest stands for all of its files."""
        return files_in(self.path) if self.is_source else (self.path / MANIFEST,)

    @property
    def sha256(self) -> str:
        return sha256(self.path / MANIFEST)

    def fault(self) -> str:
        """Return how its files differ from its manifest, or an empty string if they don't."""
        try:
            listed = json.loads((self.path / MANIFEST).read_bytes())["file_manifest_file"]
            if sha256(self.path / _FILES) != listed["chksum_sha256"]:
                return f"{_FILES} was changed"
            entries = json.loads((self.path / _FILES).read_bytes())["files"]
            digests = {e["name"]: e["chksum_sha256"] for e in entries if e["ftype"] == "file"}
        except (OSError, ValueError, KeyError, TypeError):
            return f"{MANIFEST} or {_FILES} can't be read"
        present = {str(file.relative_to(self.path)): file for file in files_in(self.path)}
        for name, digest in sorted(digests.items()):
            # Files that `files_in` leaves out (a README) don't affect what a collection does.
            file = present.pop(name, self.path / name)
            if not file.is_file():
                return f"{name} is missing"
            if sha256(file) != digest:
                return f"{name} was changed"
        added = sorted(present.keys() - {MANIFEST, _FILES})
        return f"{added[0]} was added" if added else ""


class LockedCollection(Strict):
    """A collection as it was locked. ``source`` is what ``ansible-galaxy`` needs to fetch it again."""

    name: str
    version: str
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    source: dict[str, str]


class CollectionLock(Strict):
    """The collections that ``requirements.yml`` resolved to, with all their dependencies."""

    format: Literal[1] = 1
    collections: tuple[LockedCollection, ...]

    @classmethod
    def load(cls, root: Path) -> CollectionLock | None:
        """Return a repository's lock, or None if there is none. Raises LockError if it can't be read."""
        try:
            return cls.model_validate_json((root / LOCK).read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            raise LockError(
                f"{root / LOCK} is not a lock of collections", hint=f"{COMMAND} --update"
            ) from error

    def save(self, root: Path) -> None:
        """Write a repository's lock if it has changed."""
        text = json.dumps(self.model_dump(mode="json"), indent=1, sort_keys=True) + "\n"
        files.write_changed(root / LOCK, text.encode())


@dataclass(frozen=True)
class Requirements:
    """A repository's ``requirements.yml``: its ``entries``, as ``ansible-galaxy`` accepts them."""

    file: Path
    entries: tuple[Mapping[str, str], ...]

    @classmethod
    def load(cls, root: Path) -> Requirements | None:
        """Return a repository's requirements, or None if there are none. Raises DefinitionError if they are invalid."""
        files = (root / name for name in _REQUIREMENTS)
        file = next((file for file in files if file.is_file()), None)
        if file is None:
            return None
        try:
            content = engine.read_untagged_yaml(file)
        except engine.UnreadableError as error:
            place = str(error.place or Place(str(file)))
            raise DefinitionError([Problem(place, file.name, error.reason)]) from error
        entries = content.get("collections") if isinstance(content, Mapping) else None
        if not isinstance(entries, list) or content.get("roles"):
            reason = (
                "must list `collections`; roles are installed from collections, or are the repository's own"
            )
            raise DefinitionError([Problem(str(Place(str(file))), file.name, reason)])
        return cls(file, tuple(map(_entry, entries)))


def _entry(entry: Any) -> Mapping[str, str]:
    """Return an entry, a mapping or only a name, as a mapping of strings."""
    return {str(k): str(v) for k, v in entry.items()} if isinstance(entry, Mapping) else {"name": str(entry)}


def is_named(entry: Mapping[str, str]) -> bool:
    """Return whether an entry names a collection on a Galaxy server; any other entry says where its content is."""
    namespace, dot, name = entry.get("name", "").partition(".")
    return entry.get("type", "galaxy") == "galaxy" and bool(dot) and (namespace + name).isidentifier()


def installed(folders: Iterable[Path]) -> tuple[Collection, ...]:
    """Return the collections in directories, sorted by name; as in Ansible, the first one of a name wins."""
    by_name: dict[str, Collection] = {}
    for folder in folders:
        for path in sorted(folder.glob(f"{_NAMESPACES}/*/*/")):
            if (path / MANIFEST).is_file() or (path / "galaxy.yml").is_file():
                name = f"{path.parent.name}.{path.name}"
                by_name.setdefault(name, Collection(name, path))
    return tuple(by_name[name] for name in sorted(by_name))


def collection_problems(root: Path) -> list[Problem]:
    """Return how a repository's collections differ from those that it requires and has locked."""
    requirements, lock = Requirements.load(root), CollectionLock.load(root)
    present = {c.name: c for c in installed(engine.collection_folders(root))}
    asked = {entry["name"] for entry in (requirements.entries if requirements else ()) if is_named(entry)}
    locked = {c.name: c for c in (lock.collections if lock else ())}
    where = str(Place(str(root / LOCK)))
    problems = []
    if requirements and requirements.entries and not lock:
        reason = f"its collections are not locked: run `{COMMAND}`"
        return [Problem(str(Place(str(requirements.file))), requirements.file.name, reason)]
    for name in sorted(asked - locked.keys()):
        problems.append(Problem(where, name, f"is asked for and not locked: run `{COMMAND} --update`"))
    for name, pinned in locked.items():
        if reason := _deviation(present.get(name), pinned):
            problems.append(Problem(where, name, f"{reason}: run `{COMMAND}`"))
    for name, collection in present.items():
        if name not in locked and not collection.is_source:
            place = str(Place(str(collection.path / MANIFEST)))
            problems.append(Problem(place, name, f"is not in {LOCK}: ask for it in {_REQUIREMENTS[0]}"))
    return problems


def _deviation(collection: Collection | None, locked: LockedCollection) -> str:
    if collection is None or collection.is_source:
        return "is not installed"
    if collection.sha256 != locked.sha256:
        return f"another one than {locked.version} is installed, or its manifest was changed"
    return collection.fault()


def missing(root: Path, lock: CollectionLock) -> Iterator[LockedCollection]:
    """Yield the locked collections that are not installed as they were locked."""
    present = {c.name: c for c in installed(engine.collection_folders(root))}
    for locked in lock.collections:
        if _deviation(present.get(locked.name), locked):
            yield locked


def galaxy_file(entries: Iterable[Mapping[str, JSON]]) -> str:
    """Return the text of a ``requirements.yml`` with these entries."""
    return json.dumps({"collections": [dict(entry) for entry in entries]})
