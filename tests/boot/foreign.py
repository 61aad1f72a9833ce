"""Disks with foreign data, as files: ``node-agent disk`` must leave them unchanged."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable
from pathlib import Path

from image_builder.node.disk import layout
from image_builder.node.disk.model import Disk
from tests.boot.node import Local
from tests.support.disks.foreign import FOREIGN, azure
from tests.support.disks.loop_devices import LARGE, MIB, SMALL

Make = Callable[[Disk, Path], None]


def _ext4(label: str, uuid: str) -> Make:
    def make(disk: Disk, tree: Path) -> None:
        subprocess.run(["mkfs.ext4", "-q", "-L", label, "-U", uuid, "-d", tree, disk.path], check=True)

    return make


def _xfs(disk: Disk, _tree: Path) -> None:
    subprocess.run(["mkfs.xfs", "-q", "-L", "data", disk.path], check=True)


# The programs that make some of the disks, and the package of each.
PROGRAMS = {"mkfs.ext4": "e2fsprogs", "mkfs.xfs": "xfsprogs"}
# Replacements for those in ``FOREIGN`` that are made by mounting something, which a test's host may not be able to do.
_MADE: dict[str, Make] = {
    "ext4": _ext4("data", "random"),
    "xfs": _xfs,
    "ours without a marker": _ext4("local", layout.new_uuid()),
}
_NOT_HERE = ("ext4 with our label and a journal to replay", "xfs with our label and a log to replay", "NTFS")

# By name: how to make it, its size in bytes, and what the reason must name.
KINDS: dict[str, tuple[Make, int, str]] = {
    name: (_MADE.get(name, make), size, words)
    for name, (make, size, words) in FOREIGN.items()
    if name not in _NOT_HERE
}
AZURE: dict[str, tuple[Make, int, str]] = {
    "NTFS with a file": (azure("files"), SMALL, ": dos with 1 partition, with more or less than"),
}
PLATFORM = ("the platform's NTFS", azure("readme"), LARGE + 64 * MIB)


def make_disks(folder: Path, wanted: dict[str, tuple[Make, int, str]], prefix: str) -> dict[str, Local]:
    """Make the disks below ``folder``; return them by the name of their content."""
    tree = folder / "tree"
    tree.mkdir(exist_ok=True)
    (tree / "precious").write_bytes(b"x" * 100_000)
    made = {}
    for number, (name, (make, size, _)) in enumerate(wanted.items()):
        local = Local(f"{prefix}{number:02}", size, f"{prefix}{number:02}", bus="scsi")
        make_disk(folder, local, make)
        made[name] = local
    return made


def make_disk(folder: Path, local: Local, make: Make) -> None:
    """Make one disk's file from scratch."""
    path = folder / f"{local.file}.raw"
    path.unlink(missing_ok=True)
    with path.open("xb") as stream:
        stream.truncate(local.bytes)
    make(Disk(path.name, path, local.bytes, "", local.serial), folder / "tree")


def digest(folder: Path, local: Local) -> str:
    """Return the sha256 of a whole disk."""
    with (folder / f"{local.file}.raw").open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
