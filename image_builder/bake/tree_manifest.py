"""The manifest of a finished stage: one line per file of its tree, and the differences found later.

    object/{product/, manifest.gz, meta.json}   a gzipped line of JSON for each entry below product

A line is ``[path, mode, uid, gid, size, mtime in ns, device, content, attributes]``; content is a file's SHA-256 or a
link's target.
"""

from __future__ import annotations

import gzip
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from image_builder.canonical import JSON
from image_builder.system import sparse
from image_builder.system.trees import sha256

# Extended attributes that belong to the host or to a tree's location, not to the tree itself.
ATTRIBUTES_OF_PLACE = frozenset(
    ["security.selinux", *(f"trusted.overlay.{name}" for name in ("origin", "impure", "uuid", "nlink"))]
)


def entries(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield (path below ``root``, lstat) for everything in it, in a fixed order."""
    for folder, dirs, files in os.walk(root):
        dirs.sort()
        for name in sorted([*dirs, *files]):
            full = os.path.join(folder, name)
            yield os.path.relpath(full, root), os.lstat(full)


def _line(path: str, info: os.stat_result, content: str) -> list[JSON]:
    device = info.st_rdev if stat.S_ISCHR(info.st_mode) or stat.S_ISBLK(info.st_mode) else 0
    size = info.st_size if stat.S_ISREG(info.st_mode) else 0
    mtime = 0 if stat.S_ISDIR(info.st_mode) else info.st_mtime_ns
    return [path, info.st_mode, info.st_uid, info.st_gid, size, mtime, device, content]


def _attributes(full: Path) -> str:
    """Return the extended attributes of an entry as text, sorted: a file's capabilities, an overlay's marks."""
    names = sorted(set(os.listxattr(full, follow_symlinks=False)) - ATTRIBUTES_OF_PLACE)
    return " ".join(f"{name}={os.getxattr(full, name, follow_symlinks=False).hex()}" for name in names)


def _content(full: Path, info: os.stat_result) -> str:
    if stat.S_ISREG(info.st_mode):
        # A disk image is mostly holes; reading them would fill the page cache with zeros.
        return sparse.sha256(full) if info.st_blocks * 512 < info.st_size else sha256(full)
    return os.readlink(full) if stat.S_ISLNK(info.st_mode) else ""


def write(root: Path, target: Path, hashed: Mapping[str, str]) -> tuple[int, int]:
    """Write a line of JSON for every entry of ``root``; return the number of entries and their bytes.

    ``hashed`` maps files to their SHA-256 if it is already known.
    """
    count = size = 0
    with gzip.GzipFile(target, "wb", compresslevel=1, mtime=0) as out:
        for path, info in entries(root):
            content = hashed.get(path) or _content(root / path, info)
            line = [*_line(path, info, content), _attributes(root / path)]
            out.write(json.dumps(line).encode() + b"\n")
            count += 1
            size += info.st_blocks * 512
    return count, size


def differences(folder: Path, *, contents: bool, limit: int = 1) -> list[str]:
    """Compare an object with its manifest; return at most ``limit`` differences, in words."""
    reasons: list[str] = []
    try:
        recorded = json.loads((folder / "meta.json").read_bytes())["manifest_sha256"]
        if sha256(folder / "manifest.gz") != recorded:
            return ["its manifest is not the one that was committed"]
        with gzip.open(folder / "manifest.gz", "rt", encoding="utf-8") as stream:
            lines = [json.loads(line) for line in stream]
    except (OSError, ValueError, KeyError, EOFError) as error:
        return [f"its manifest can't be read: {error}"]
    root = folder / "product"
    present = dict(entries(root))
    for line in lines:
        path = line[0]
        info = present.pop(path, None)
        if info is None:
            reasons.append(f"{path} is missing")
        elif _line(path, info, "")[:7] != line[:7]:
            reasons.append(f"{path} was changed")
        # Manifests from before extended attributes were recorded lack this column.
        elif line[8:] and _attributes(root / path) != line[8]:
            reasons.append(f"the extended attributes of {path} were changed")
        elif contents and _content(root / path, info) != line[7]:
            reasons.append(f"the content of {path} was changed")
        if len(reasons) >= limit:
            return reasons
    reasons += [f"{path} was added" for path in list(present)[: limit - len(reasons)]]
    return reasons
