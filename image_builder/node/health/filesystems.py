"""Filesystems that are full, out of inodes, or were made read-only by the kernel."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from image_builder.node import mounts
from image_builder.node.health.model import Finding, Look, Outcome, Sample, Severity
from image_builder.node.health.settings import Settings
from image_builder.node.mounts import Mount

# Asking one of these can take for ever, and none of them is the node's own.
_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "lustre", "afs")
# Made to be read: that they can't be written to says nothing.
_READ_ONLY = ("squashfs", "erofs", "iso9660", "cramfs", "romfs")


@dataclass(frozen=True)
class Usage:
    """How full the filesystem of a path is, as anybody but root sees it. 0 inodes: it has no limit of them."""

    path: str
    mounted: Mount
    total_bytes: int
    free_bytes: int
    total_inodes: int
    free_inodes: int

    @property
    def used(self) -> float:
        """Return the used part, 0 to 1. Its divisor is what can be used at all, as df(1) has it."""
        return 1 - self.free_bytes / self.total_bytes if self.total_bytes else 0.0

    @property
    def inodes_used(self) -> float:
        return 1 - self.free_inodes / self.total_inodes if self.total_inodes else 0.0


def check(look: Look) -> Outcome:
    """Look at the filesystem of each configured path that is there. Raises OSError."""
    usages = measure(look.settings.paths, mounts.listed(look.places.proc))
    return Outcome(tuple(rule(usages, look.settings)), tuple(samples(usages)))


def containing(path: str, among: Sequence[Mount]) -> Mount | None:
    """Return the mount that a path lies on: the longest target that leads to it, of equals the last."""
    found: Mount | None = None
    for one in among:
        below = path == one.target or path.startswith(one.target.rstrip("/") + "/")
        if below and (found is None or len(one.target) >= len(found.target)):
            found = one
    return found


def measure(paths: Iterable[str], among: Sequence[Mount]) -> list[Usage]:
    """Measure each filesystem once, under the first path that names it; remote ones and missing paths not at all."""
    found: dict[str, Usage] = {}
    for path in paths:
        one = containing(os.path.realpath(path), among)
        if one is None or one.filesystem in _REMOTE or one.device in found or not os.path.exists(path):
            continue
        state = os.statvfs(path)
        # Blocks that are root's alone are neither used nor free to anybody: they count as not there.
        total = (state.f_blocks - state.f_bfree + state.f_bavail) * state.f_frsize
        found[one.device] = Usage(
            path, one, total, state.f_bavail * state.f_frsize, state.f_files, state.f_favail
        )
    return list(found.values())


def rule(usages: Iterable[Usage], settings: Settings) -> list[Finding]:
    """Return what is wrong with filesystems."""
    found = []
    for one in usages:
        if one.mounted.read_only and one.mounted.filesystem not in _READ_ONLY:
            detail = f"{one.path}: {one.mounted.filesystem} on {one.mounted.target} is read-only"
            found.append(Finding("filesystem.read-only", one.path, "fail", detail, action="replace"))
        parts = {
            "filesystem.full": (one.used, "full"),
            "filesystem.inodes": (one.inodes_used, "out of inodes"),
        }
        for code, (used, words) in parts.items():
            if severity := _severity(used, settings, one.mounted.target):
                detail = f"{one.path} is {used:.0%} {words}"
                found.append(Finding(code, one.path, severity, detail, patient=True))
    return found


def _severity(used: float, settings: Settings, target: str) -> Severity | None:
    # Without room in / nothing works. Any other filesystem is there for jobs to fill, and the kubelet makes room.
    if used * 100 >= settings.full_fail_percent and target == "/":
        return "fail"
    return "warn" if used * 100 >= settings.full_warn_percent else None


def samples(usages: Iterable[Usage]) -> list[Sample]:
    """Return the metrics of filesystems."""
    found = []
    for one in usages:
        labels: Mapping[str, str] = {"path": one.path, "fstype": one.mounted.filesystem}
        found += [
            Sample("filesystem_used_ratio", round(one.used, 4), labels),
            Sample("filesystem_inodes_used_ratio", round(one.inodes_used, 4), labels),
            Sample("filesystem_readonly", float(one.mounted.read_only), labels),
        ]
    return found


def disks_below(devices: Iterable[str], sys: Path) -> frozenset[str]:
    """Return the names of devices (major:minor), of what they are made of, and of the disks that they are parts of."""
    found: set[str] = set()
    todo = [sys / "dev/block" / device for device in devices]
    while todo:
        entry = todo.pop().resolve()
        if not entry.is_dir() or entry.name in found:
            continue
        found.add(entry.name)
        todo += (entry / "slaves").glob("*")
        if (entry / "partition").exists():
            todo.append(entry.parent)
    return frozenset(found)
