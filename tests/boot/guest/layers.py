"""Compare each layer in the engine's data root with the preload store. Runs on the node; prints one JSON object.

It compares every file's kind, owner and size, and every byte of one file in sixteen: {"layers": 7, "links": 0,
"files": 12345, "empty": 0, "different": []}. ``empty`` counts files that are empty here but not in the store.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, "/usr/local/sbin/node-agent")

from image_builder.node import data_root as roots
from image_builder.node import layout, mounts, preload_settings, store
from image_builder.node.seed import containerd

AT = Path("/run/boot-matrix/store")


def main() -> None:
    settings, baked = preload_settings.load(), store.read_manifest()
    there = mounts.at(layout.MOUNT_POINT) is not None
    if not there:  # promotion no longer needs it
        AT.mkdir(parents=True, exist_ok=True)
        store.open_store(baked, verity=False, at=AT)
    opened = layout.MOUNT_POINT if there else AT
    top = opened / layout.LAYERS
    local = docker_layers if settings.engine == "docker" else containerd_layers
    found: dict[str, Any] = {"layers": 0, "links": 0, "files": 0, "empty": 0, "different": []}
    for name, directory in local(settings.data_root, opened):
        if not (top / name).is_dir():
            continue
        found["layers"] += 1
        found["links"] += directory.is_symlink()
        if not directory.is_symlink():
            compare(top / name, directory, found)
    if not there:
        store.close_store(AT)
    found["different"] = found["different"][:20]
    print(json.dumps(found))


def docker_layers(data_root: Path, _: Path) -> Iterator[tuple[str, Path]]:
    """Yield each layer's diff id (hex) and the directory of its files, as Docker has recorded them."""
    for record in (data_root / "image/overlay2/layerdb/sha256").iterdir():
        name = (record / "diff").read_text().strip().removeprefix("sha256:")
        yield name, data_root / "overlay2" / (record / "cache-id").read_text().strip() / "diff"


def containerd_layers(data_root: Path, opened: Path) -> Iterator[tuple[str, Path]]:
    """Yield the same from the links in the store: a snapshot has the same number in the data root."""
    for link in (opened / containerd.SOURCE / roots.SNAPSHOTS).glob("*/fs"):
        if link.is_symlink():
            yield link.readlink().name, data_root / roots.SNAPSHOTS / link.parent.name / "fs"


def compare(stored: Path, local: Path, found: dict[str, Any]) -> None:
    wanted, got = listed(stored), listed(local)
    found["different"] += [f"{local}/{name}: in one alone" for name in sorted(set(wanted) ^ set(got))]
    for name in sorted(set(wanted) & set(got)):
        found["files"] += 1
        ours, theirs = got[name], wanted[name]
        if stat.S_ISREG(theirs.st_mode) and theirs.st_size and not ours.st_size:
            found["empty"] += 1
        if (ours.st_mode, ours.st_uid, ours.st_gid, ours.st_rdev) != (
            theirs.st_mode,
            theirs.st_uid,
            theirs.st_gid,
            theirs.st_rdev,
        ):
            found["different"].append(f"{local}/{name}: kind or owner")
        elif stat.S_ISREG(theirs.st_mode) and ours.st_size != theirs.st_size:
            found["different"].append(f"{local}/{name}: {ours.st_size} bytes, not {theirs.st_size}")
        elif is_sampled(name, theirs) and (stored / name).read_bytes() != (local / name).read_bytes():
            found["different"].append(f"{local}/{name}: other bytes")


def is_sampled(name: str, entry: os.stat_result) -> bool:
    return stat.S_ISREG(entry.st_mode) and zlib.crc32(os.fsencode(name)) % 16 == 0


def listed(top: Path) -> dict[str, os.stat_result]:
    found = {}
    for folder, folders, files in os.walk(top):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            found[os.path.relpath(path, top)] = os.lstat(path)
    return found


main()
