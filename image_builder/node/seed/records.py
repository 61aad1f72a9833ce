"""An engine's metadata about its layers, in one file of the store.

A node reads this file as a whole: reading thousands of small files from a cold OS disk would cost more than everything
else at boot. Large or non-text files (databases, blobs, ``tar-split.json.gz``) remain files of the store, and are only
listed.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from image_builder.node.errors import NodeError
from image_builder.node.store import reading

NAME = "records.json"
# Larger files aren't needed before the engine starts.
_LARGEST = 32 << 10


@dataclass(frozen=True)
class Records:
    """An engine's records, by path relative to a data root.

    ``directories`` have modes, ``files`` mode and text, ``links`` targets. ``others`` stay files in the store, and have
    sizes in bytes.
    """

    source: Path
    directories: Mapping[str, int]
    files: Mapping[str, tuple[int, str]]
    links: Mapping[str, str]
    others: Mapping[str, int]

    @cached_property
    def _names(self) -> Mapping[str, list[str]]:
        names: dict[str, list[str]] = {path: [] for path in self.directories}
        for kind in (self.directories, self.files, self.links, self.others):
            for path in kind:
                folder, _, name = path.rpartition("/")
                names.setdefault(folder, []).append(name)
        return names

    def names(self, folder: str) -> list[str]:
        """Return the names in a directory. Raises NodeError (``store.damaged``)."""
        if folder not in self._names:
            raise self.lost(folder)
        return self._names[folder]

    def text(self, path: str) -> str:
        """Return the text of a file. Raises NodeError (``store.damaged``)."""
        if path not in self.files:
            raise self.lost(path)
        return self.files[path][1]

    def link(self, path: str) -> str:
        """Return the target of a link. Raises NodeError (``store.damaged``)."""
        if path not in self.links:
            raise self.lost(path)
        return self.links[path]

    def lost(self, path: str) -> NodeError:
        """Return the error for a record that the store lacks."""
        return NodeError("store.damaged", f"{self.source / NAME} lacks {path}")


def read(source: Path) -> Records:
    """Read an engine's records; ``source`` is its directory in the store.

    Raises NodeError (``store.damaged``, ``store.io``).
    """
    with reading(source / NAME):
        document = json.loads((source / NAME).read_bytes())
        try:
            return Records(
                source,
                document["directories"],
                {path: (mode, text) for path, (mode, text) in document["files"].items()},
                document["links"],
                document["others"],
            )
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"no records: {error!r}") from error


def pack(tree: Path) -> None:
    """Write a data root's records into it, and delete the files that they contain."""
    records: dict[str, dict[str, Any]] = {"directories": {}, "files": {}, "links": {}, "others": {}}
    for folder, folders, names in os.walk(tree):
        folders.sort()
        for name in sorted([*folders, *names]):
            path = Path(folder, name)
            kind, value = _record(path)
            records[kind][path.relative_to(tree).as_posix()] = value
    for name in records["files"]:
        (tree / name).unlink()
    (tree / NAME).write_text(json.dumps(records), encoding="utf-8")


def _record(path: Path) -> tuple[str, Any]:
    info = path.lstat()
    if stat.S_ISLNK(info.st_mode):
        return "links", os.readlink(path)
    if stat.S_ISDIR(info.st_mode):
        return "directories", stat.S_IMODE(info.st_mode)
    if info.st_size <= _LARGEST and path.suffix != ".gz":
        try:
            return "files", (stat.S_IMODE(info.st_mode), path.read_bytes().decode("utf-8"))
        except UnicodeDecodeError:
            pass
    return "others", info.st_size
