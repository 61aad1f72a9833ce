"""An unpacked layer: what a container sees of it, and what the machine that unpacked it has left in it."""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

from image_builder.bake import tree_manifest
from image_builder.bake.stages.kind import FIXED_EPOCH

# Overlayfs writes them into the upper directory of a mount, as Docker makes one of a layer when it saves an image. A
# layer itself can have other marks: opaque directories, and whatever label its author gave a file.
_OF_A_MOUNT = tree_manifest.ATTRIBUTES_OF_PLACE - {"security.selinux"}
# How far the time that a kernel gives a file may lie behind the clock (two ticks of the slowest).
_TICK_NS = 20_000_000
_CHUNK = 1 << 20

# Path, mode, owner, group, time in ns, device, size, target of a link, name of the first hard link, attributes.
Fact = tuple[str, int, int, int, int, int, int, str, str, tuple[tuple[str, bytes], ...]]


def facts(tree: Path) -> Iterator[Fact]:
    """Yield what a container sees of each entry of a tree, its top included, in a fixed order; no file's content."""
    first: dict[int, str] = {}
    for name, info in _entries(tree):
        path, kind = tree / name, stat.S_IFMT(info.st_mode)
        several = kind != stat.S_IFDIR and info.st_nlink > 1
        keys = sorted(set(os.listxattr(path, follow_symlinks=False)) - _OF_A_MOUNT)
        yield (
            name,
            info.st_mode,
            info.st_uid,
            info.st_gid,
            info.st_mtime_ns,
            info.st_rdev if kind in (stat.S_IFCHR, stat.S_IFBLK) else 0,
            info.st_size if kind == stat.S_IFREG else 0,
            os.readlink(path) if kind == stat.S_IFLNK else "",
            first.setdefault(info.st_ino, name) if several else name,
            tuple((key, os.getxattr(path, key, follow_symlinks=False)) for key in keys),
        )


def _entries(tree: Path) -> Iterator[tuple[str, os.stat_result]]:
    yield ".", tree.lstat()
    yield from tree_manifest.entries(tree)


def fingerprint(tree: Path) -> str:
    """Return a digest of everything but the content of files."""
    digest = hashlib.sha256()
    for fact in facts(tree):
        digest.update(repr(fact).encode())
    return digest.hexdigest()


def difference(one: Path, other: Path) -> str:
    """Return the first entry in which two trees differ, and both sides of it; empty if they are equal."""
    for left, right in zip_longest(facts(one), facts(other)):
        if left != right:
            return f"{_words(left)}, not {_words(right)}"
        name, mode, first = left[0], left[1], left[8]
        if stat.S_ISREG(mode) and first == name and not _same_content(one / name, other / name):
            return f"the content of {name}"
    return ""


def _words(fact: Fact | None) -> str:
    if fact is None:
        return "nothing"
    name, mode, uid, gid, mtime, device, size, target, first, attributes = fact
    words = [
        name,
        stat.filemode(mode),
        f"{uid}:{gid}",
        f"{size} bytes",
        f"time {mtime}",
        f"device {device:#x}",
    ]
    words += [f"-> {target}"] * bool(target) + [f"linked to {first}"] * (first != name)
    return " ".join([*words, *(f"{key}={value.hex()}" for key, value in attributes)])


def _same_content(one: Path, other: Path) -> bool:
    with one.open("rb", buffering=0) as left, other.open("rb", buffering=0) as right:
        while chunk := left.read(_CHUNK):
            if chunk != right.read(len(chunk)):
                return False
        return not right.read(1)


def settle(tree: Path, since: int) -> None:
    """Remove what the unpacking machine has left in a layer that was unpacked after ``since`` (ns): times and marks.

    What has no time of its own, a whiteout or a directory without an entry in the layer, got the clock's: two bakes
    would differ.
    """
    since, until = since - _TICK_NS, time.time_ns() + _TICK_NS
    for name, info in _entries(tree):
        path = tree / name
        if since <= info.st_mtime_ns <= until:
            os.utime(path, (FIXED_EPOCH, FIXED_EPOCH), follow_symlinks=False)
        for key in _OF_A_MOUNT.intersection(os.listxattr(path, follow_symlinks=False)):
            os.removexattr(path, key, follow_symlinks=False)
