"""Digests of the code that a stage's result depends on."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

# Not part of any result: notes for people, and what tests and editors leave behind.
_IGNORED_DIRS = {"__pycache__", "molecule", ".pytest_cache"}
_IGNORED_FILES = {"README.md"}
_IGNORED_SUFFIXES = (".pyc", ".swp", "~")


def file_digests(root: Path, sources: Iterable[Path]) -> dict[str, str]:
    """Map every file in ``sources`` (files, or directories taken whole) to its SHA-256.

    Keys are paths below ``root``. The executable bit counts, since a role may ship a script by its mode;
    other mode bits depend on the checkout's umask and don't.
    """
    found = {}
    for source in sources:
        for path in sorted(_files(source)):
            found[os.fspath(path.relative_to(root))] = file_digest(path)
    return found


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, ``+x`` appended when its owner may execute it."""
    if path.is_symlink():
        return hashlib.sha256(os.fsencode(os.readlink(path))).hexdigest() + "+l"
    with path.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    return f"{sha256}+x" if path.stat().st_mode & 0o100 else sha256


def _files(source: Path) -> Iterator[Path]:
    if source.is_file() or source.is_symlink():
        yield source
        return
    for folder, dirs, files in os.walk(source):
        dirs[:] = sorted(d for d in dirs if d not in _IGNORED_DIRS)
        for name in files:
            if name not in _IGNORED_FILES and not name.endswith(_IGNORED_SUFFIXES):
                yield Path(folder, name)
