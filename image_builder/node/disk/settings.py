"""``/etc/node-agent/disk.json``, as the role local_disk writes it.

    {"policy": "require", "mount_point": "/mnt/local", "filesystem": "xfs", "label": "local",
     "selector": {"kind": "azure"},
     "expected_disks": 0, "wait_seconds": 10, "incomplete_array": "keep", "wipe": [],
     "directories": [{"path": "docker", "mode": "0710"}],
     "cache": {"path": "cache", "quota_bytes": 100000000000},
     "binds": [{"source": "kubelet/pods", "target": "/var/lib/kubelet/pods"}]}

Every key has a default; unknown keys are rejected. The paths of directories, of the cache and of ``source`` are
relative to the mount point.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal

from image_builder.node import settings as settings_files
from image_builder.node.decode import DecodeError, at_least, shown, within

# The longest label of each filesystem, in bytes.
LABEL_BYTES: Mapping[str, int] = {"xfs": 12, "ext4": 16}
# Never wiped, whatever the configuration says: content that can't be identified, and disks in use.
_UNWIPEABLE = ("busy", "error", "unreadable")


@dataclass(frozen=True)
class Selector:
    """Which disks are local. ``azure``: as the platform says. ``configured``: disks that match all given criteria.

    ``model`` and each of ``serials`` and ``by_path`` are shell patterns; ``by_path`` matches the names of links in
    ``/dev/disk/by-path``.
    """

    kind: Literal["azure", "configured"] = "azure"
    model: str = ""
    serials: tuple[str, ...] = ()
    by_path: tuple[str, ...] = ()
    minimum_bytes: int = 0

    def problems(self) -> Iterator[str]:
        """Yield the rules that this selector breaks."""
        patterns = [name for name in ("model", "serials", "by_path") if getattr(self, name)]
        if self.kind == "configured" and not patterns:
            yield "kind configured needs a model, serials or by_path"
        if self.kind == "azure":
            yield from (f"{name} is only for kind configured" for name in patterns)


def _octal(value: Any, path: str) -> int:
    """Return the mode that an octal string represents."""
    if not isinstance(value, str) or not re.fullmatch(r"0?[0-7]{1,4}", value):
        raise DecodeError([f'{path} must be an octal string such as "0755", not {shown(value)}'])
    return int(value, 8)


@dataclass(frozen=True)
class Directory:
    path: str
    mode: int = field(default=0o755, metadata={"read": _octal})

    def problems(self) -> Iterator[str]:
        """Yield the rules that this directory breaks."""
        yield from _below("path", self.path)


@dataclass(frozen=True)
class Cache:
    path: str
    quota_bytes: int | None = None

    def problems(self) -> Iterator[str]:
        """Yield the rules that this cache breaks."""
        yield from _below("path", self.path)


@dataclass(frozen=True)
class Bind:
    source: str
    target: str

    def problems(self) -> Iterator[str]:
        """Yield the rules that this bind mount breaks."""
        yield from _below("source", self.source)
        yield from _inside_root("target", self.target)


@dataclass(frozen=True)
class Settings:
    """``expected_disks``: 0 for any number. ``wipe``: kinds of foreign content that may be wiped, only on local disks.

    ``incomplete_array``: what to do with an array of ours that lacks members, or with disks that don't belong together.
    """

    policy: Literal["require", "prefer"] = "require"
    mount_point: str = "/mnt/local"
    filesystem: Literal["xfs", "ext4"] = "xfs"
    label: str = "local"
    selector: Selector = Selector()
    expected_disks: int = 0
    wait_seconds: float = 10
    incomplete_array: Literal["keep", "rebuild"] = "keep"
    wipe: tuple[str, ...] = ()
    directories: tuple[Directory, ...] = ()
    cache: Cache | None = None
    binds: tuple[Bind, ...] = ()

    def problems(self) -> Iterator[str]:
        """Yield the rules that these settings break."""
        longest = LABEL_BYTES[self.filesystem]
        if not re.fullmatch(rf"[A-Za-z0-9._-]{{1,{longest}}}", self.label):
            yield f"label must be 1 to {longest} of letters, digits, '.', '_' and '-', not {shown(self.label)}"
        yield from _inside_root("mount_point", self.mount_point)
        yield from at_least("expected_disks", self.expected_disks, 0)
        yield from within("wait_seconds", self.wait_seconds, 0, 300)
        for content in sorted({*self.wipe} & {*_UNWIPEABLE}):
            yield f"wipe must not have {content}: what can't be read or is in use is never wiped"
        if self.cache and self.cache.quota_bytes and self.filesystem != "xfs":
            yield "cache.quota_bytes needs the filesystem xfs"


def parse(document: Mapping[str, Any]) -> Settings:
    """Return the settings. Raises NodeError (``settings``) with all problems at once."""
    return settings_files.parse(Settings, document, "disk")


def _inside_root(name: str, path: str) -> Iterator[str]:
    parts = PurePosixPath(path).parts
    if not path.startswith("/") or len(parts) < 2 or ".." in parts:
        yield f"{name} must be an absolute path, and not /, not {shown(path)}"


def _below(name: str, path: str) -> Iterator[str]:
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or parts[0] == ".node":
        yield f"{name} must be a path below the mount point, outside .node, not {shown(path)}"
