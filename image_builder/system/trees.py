"""Directory trees on this machine: their files, the files' digests, and deletion that respects mounts."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from image_builder.errors import StoreError
from image_builder.node import mounts

# Not part of any result: notes for people, and what tests and editors leave behind.
_IGNORED_DIRS = {"__pycache__", "molecule", ".pytest_cache"}
_IGNORED_FILES = {"README.md"}
_IGNORED_SUFFIXES = (".pyc", ".swp", "~")


def _literal(quote: str) -> str:
    """Return the pattern of a string as Python 3.11 reads it, enclosed in three of ``quote`` or in one."""
    long = rf"{quote}{{3}}[^{quote}\\]*(?:(?:\\.|{quote}(?!{quote}{{2}}))[^{quote}\\]*)*{quote}{{3}}"
    return rf"{long}|{quote}[^{quote}\\\n]*(?:\\.[^{quote}\\\n]*)*{quote}"


# Whichever begins first matches: a string may contain what looks like a comment.
_STRINGS = f"{_literal(chr(34))}|{_literal(chr(39))}"
# All that stays is matched in one piece: a call for each string would take most of the time.
_COMMENT = re.compile(rf"((?:[^\"'#]+|{_STRINGS})+)|#[^\n]*", re.DOTALL)
_EMPTY_LINES = re.compile(rf"((?:[^\"' \n]+|{_STRINGS}|[ ]+(?![ \n])|\n(?![ ]*\n))+)|(?:[ ]*\n)+", re.DOTALL)
# A string that is the first statement of a module, a class or a function.
_DOCSTRING = re.compile(
    rf"(\A\s*|^[ ]*(?:class|def|async[ ]def|\))[^\n]*:\n\s*)(?:{_literal(chr(34))})[ ]*$",
    re.DOTALL | re.MULTILINE,
)


def code_digests(root: Path, sources: Iterable[Path]) -> dict[str, str]:
    """Return what ``file_digests`` does, except that comments and docstrings in Python files don't count.

    For programs that run here. Files that go into an image go there with their comments.
    """
    digests = file_digests(root, sources)
    for name in digests:
        if name.endswith(".py"):
            digests[name] = hashlib.sha256(executed((root / name).read_text("utf-8")).encode()).hexdigest()
    return digests


@functools.lru_cache(maxsize=1024)
def executed(source: str) -> str:
    """Return Python source without comments and blank lines, its docstrings empty, the rest unchanged.

    This doesn't use the interpreter's own parser, which differs from version to version.
    """
    bare = _COMMENT.sub(lambda match: match[1] or "", source)
    bare = _DOCSTRING.sub(r'\1""', bare)
    return _EMPTY_LINES.sub(lambda match: match[1] or "\n", bare).lstrip("\n")


def file_digests(root: Path, sources: Iterable[Path]) -> dict[str, str]:
    """Map every file in ``sources`` (files, or directories taken whole) to its SHA-256.

    Keys are paths below ``root``. The executable bit counts, since a role may ship a script by its mode;
    other mode bits depend on the checkout's umask and don't.
    """
    digests = {}
    for source in sources:
        for path in sorted(files_in(source)):
            digests[os.fspath(path.relative_to(root))] = file_digest(path)
    return digests


def named_digests(files: Mapping[str, Path]) -> dict[str, str]:
    """Map the names of files to their digests."""
    return {name: file_digest(path) for name, path in sorted(files.items())}


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, with ``+x`` appended if its owner may execute it.

    A link counts by its target path, with ``+l``, and by the content of the file that it leads to.
    """
    if path.is_symlink() and not path.is_file():
        return _link_digest(path)
    content = sha256(path) + ("+x" if path.stat().st_mode & 0o100 else "")
    return f"{_link_digest(path)}:{content}" if path.is_symlink() else content


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hex. For disk images, use ``sparse.sha256``."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _link_digest(path: Path) -> str:
    return hashlib.sha256(os.fsencode(os.readlink(path))).hexdigest() + "+l"


def files_in(source: Path, *, whole: bool = False, links: bool = False) -> Iterator[Path]:
    """Yield a file itself, or a directory's files, each linked directory once; leftovers only if ``whole``.

    With ``links``, also yield the links to directories that aren't followed because their files come elsewhere.
    """
    if not source.is_dir():
        yield source
        return
    linked: set[str] = set()
    for folder, dirs, files in os.walk(source, followlinks=True):
        subfolders = [name for name in sorted(dirs) if whole or name not in _IGNORED_DIRS]
        dirs[:] = [name for name in subfolders if _is_new(Path(folder, name), linked)]
        if links:
            yield from (Path(folder, name) for name in subfolders if name not in dirs)
        for name in files:
            if whole or (name not in _IGNORED_FILES and not name.endswith(_IGNORED_SUFFIXES)):
                yield Path(folder, name)


def _is_new(folder: Path, linked: set[str]) -> bool:
    """Note a linked directory; return False for one that was seen before."""
    if not folder.is_symlink():
        return True
    target = os.path.realpath(folder)
    if target in linked or folder.is_relative_to(target):
        return False
    linked.add(target)
    return True


def remove_tree(path: Path) -> None:
    """Delete a directory tree. Raises StoreError, before touching anything, if something is mounted in it."""
    if not os.path.lexists(path):
        return
    mounted = mounts.below(path)
    if mounted:
        raise StoreError(
            f"not deleting {path}: {', '.join(mounted)} is mounted there", hint="unmount it first"
        )
    shutil.rmtree(path)
