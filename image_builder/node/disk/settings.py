"""``/etc/node-agent/disk.json``, as the role local_disk writes it.

    {"policy": "require", "mount_point": "/mnt/local", "filesystem": "xfs", "label": "local",
     "selector": {"kind": "azure"},
     "expected_disks": 0, "wait_seconds": 10, "incomplete_array": "keep", "wipe": [],
     "directories": [{"path": "docker", "mode": "0710"}],
     "cache": {"path": "cache", "quota_bytes": 100000000000},
     "binds": [{"source": "kubelet/pods", "target": "/var/lib/kubelet/pods"}]}

Every key has a default; an unknown one is refused. Paths of directories, of the cache and of ``source`` are
relative to the mount point.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from image_builder.node.errors import NodeError

POLICIES = ("require", "prefer")
INCOMPLETE = ("keep", "rebuild")
# The longest label of each filesystem, in bytes.
LABEL_BYTES: Mapping[str, int] = {"xfs": 12, "ext4": 16}
# What is never wiped whatever the configuration says: what can't be named, and what is in use.
_UNWIPEABLE = ("busy", "error", "unreadable")


@dataclass(frozen=True)
class Selector:
    """Which disks are local ones. ``azure``: by what the platform says. ``configured``: by all that is given.

    ``model`` and each of ``serials`` and ``by_path`` are shell patterns; ``by_path`` names links below
    ``/dev/disk/by-path``.
    """

    kind: str = "azure"
    model: str = ""
    serials: tuple[str, ...] = ()
    by_path: tuple[str, ...] = ()
    minimum_bytes: int = 0


@dataclass(frozen=True)
class Directory:
    path: str
    mode: int = 0o755


@dataclass(frozen=True)
class Cache:
    path: str
    quota_bytes: int | None = None


@dataclass(frozen=True)
class Bind:
    source: str
    target: str


@dataclass(frozen=True)
class Settings:
    """``expected_disks``: 0 for any number. ``wipe``: kinds of foreign content that may go, on local disks alone.

    ``incomplete_array``: what becomes of an array of ours that lacks members, and of disks that don't belong together.
    """

    policy: str = "require"
    mount_point: str = "/mnt/local"
    filesystem: str = "xfs"
    label: str = "local"
    selector: Selector = Selector()
    expected_disks: int = 0
    wait_seconds: float = 10
    incomplete_array: str = "keep"
    wipe: tuple[str, ...] = ()
    directories: tuple[Directory, ...] = ()
    cache: Cache | None = None
    binds: tuple[Bind, ...] = ()


def parse(found: Mapping[str, Any]) -> Settings:
    """Return the settings; raises NodeError (``settings``) with all that is wrong at once."""
    problems: list[str] = []
    unknown = sorted(set(found) - set(Settings.__dataclass_fields__))
    problems += [f"{name}: there is no such setting" for name in unknown]
    made = Settings()
    try:
        made = _build(found)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        problems.append(f"it has another shape than it should: {error!r}")
    problems += _problems(made)
    if problems:
        raise NodeError("settings", "disk.json: " + "; ".join(problems))
    return made


def _build(found: Mapping[str, Any]) -> Settings:
    default = Settings()
    selector = dict(found.get("selector") or {})
    cache = found.get("cache") or None
    return Settings(
        policy=str(found.get("policy", default.policy)),
        mount_point=str(found.get("mount_point", default.mount_point)),
        filesystem=str(found.get("filesystem", default.filesystem)),
        label=str(found.get("label", default.label)),
        selector=Selector(
            kind=str(selector.pop("kind", "azure")),
            model=str(selector.pop("model", None) or ""),
            serials=_words(selector.pop("serials", None) or ()),
            by_path=_words(selector.pop("by_path", None) or ()),
            minimum_bytes=int(selector.pop("minimum_bytes", None) or 0),
            **selector,
        ),
        expected_disks=int(found.get("expected_disks", default.expected_disks)),
        wait_seconds=float(found.get("wait_seconds", default.wait_seconds)),
        incomplete_array=str(found.get("incomplete_array", default.incomplete_array)),
        wipe=_words(found.get("wipe", ())),
        directories=tuple(
            Directory(str(item["path"]), int(str(item.get("mode", "0755")), 8))
            for item in found.get("directories", ())
        ),
        cache=Cache(str(cache["path"]), _bytes(cache.get("quota_bytes"))) if cache else None,
        binds=tuple(Bind(str(item["source"]), str(item["target"])) for item in found.get("binds", ())),
    )


def _words(value: Sequence[str]) -> tuple[str, ...]:
    if isinstance(value, str):
        raise TypeError(f"{value!r} is no list")
    return tuple(str(word) for word in value)


def _bytes(value: Any) -> int | None:
    return int(value) if value else None


def _problems(made: Settings) -> list[str]:
    selector = made.selector
    below = [item.path for item in made.directories] + [item.source for item in made.binds]
    below += [made.cache.path] if made.cache else []
    longest = LABEL_BYTES.get(made.filesystem, 0)
    chosen = selector.model or selector.serials or selector.by_path
    rules = {
        f"policy: {made.policy!r} is none of {', '.join(POLICIES)}": made.policy in POLICIES,
        f"incomplete_array: {made.incomplete_array!r} is none of {', '.join(INCOMPLETE)}": (
            made.incomplete_array in INCOMPLETE
        ),
        f"filesystem: {made.filesystem!r} is none of {', '.join(LABEL_BYTES)}": longest > 0,
        f"mount_point: {made.mount_point!r} is no absolute path": _is_absolute(made.mount_point),
        f"label: {made.label!r} is not 1 to {longest} of letters, digits, '.', '_' and '-'": bool(
            re.fullmatch(rf"[A-Za-z0-9._-]{{1,{longest or 12}}}", made.label)
        ),
        f"selector: {selector.kind!r} is none of azure, configured": selector.kind in ("azure", "configured"),
        "selector: a configured one needs a model, serials or by_path": selector.kind != "configured"
        or bool(chosen),
        "selector: azure has no model, serials or by_path": selector.kind != "azure" or not chosen,
        "expected_disks and wait_seconds: not below 0": min(made.expected_disks, made.wait_seconds) >= 0,
        "wait_seconds: at most 300": made.wait_seconds <= 300,
        "wipe: what can't be read or is in use is never wiped": not set(made.wipe) & set(_UNWIPEABLE),
        "cache: a quota needs xfs": not (made.cache and made.cache.quota_bytes) or made.filesystem == "xfs",
        **{f"{path!r} is no path below the mount point": _is_below(path) for path in below},
        **{f"{item.target!r} is no absolute path": _is_absolute(item.target) for item in made.binds},
    }
    return [words for words, is_kept in rules.items() if not is_kept]


def _is_absolute(path: str) -> bool:
    return (
        len(PurePosixPath(path).parts) > 1 and path.startswith("/") and ".." not in PurePosixPath(path).parts
    )


def _is_below(path: str) -> bool:
    parts = PurePosixPath(path).parts
    return bool(parts) and not path.startswith("/") and ".." not in parts and parts[0] != ".node"
