"""An engine's data root: its links into the store, its layers, and what is using it.

The seed creates the links; the promotion replaces them with copies.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from image_builder.node import files, mounts
from image_builder.node.layout import LAYERS, MOUNT_POINT, diff_id_of

# containerd's snapshots by number and blobs by digest; Docker's layer records by chain id.
SNAPSHOTS = Path("io.containerd.snapshotter.v1.overlayfs/snapshots")
BLOBS = Path("io.containerd.content.v1.content/blobs/sha256")
RECORDS = Path("image/overlay2/layerdb/sha256")
# Files that containerd writes into its root before the first pull. A snapshotter's database is listed only if its
# snapshots are directories next to it.
_FIRST_FILES = frozenset(
    Path(f"io.containerd.{name}")
    for name in (
        "metadata.v1.bolt/meta.db",
        "grpc.v1.introspection/uuid",
        *(f"snapshotter.v1.{kind}/metadata.db" for kind in ("overlayfs", "native", "erofs", "blockfile")),
    )
)
# For each engine, the directory with one entry for each layer, and the name of the layer's files in that entry.
_FOLDERS: Mapping[str, tuple[Path, str]] = {
    "docker": (Path("overlay2"), "diff"),
    "containerd": (SNAPSHOTS, "fs"),
}
# Databases below its data root that an engine keeps locked (flock, by bbolt) for as long as it runs. A lock is better
# evidence than an answer on the engine's socket, which systemd may hold and which doesn't identify a data root.
_LOCKED: Mapping[str, Sequence[str]] = {
    "docker": ("volumes/metadata.db", "network/files/local-kv.db"),
    "containerd": ("io.containerd.metadata.v1.bolt/meta.db",),
}


@dataclass(frozen=True)
class Link:
    """A symbolic link in the data root that points into the store.

    ``diff_id`` is empty if the link doesn't identify its layer. ``bytes`` is the size of a file, or of a directory
    whose layer is in no manifest; else 0.
    """

    path: Path
    target: Path
    diff_id: str
    directory: bool
    bytes: int = 0


def find_links(engine: str, data_root: Path, store: Path = MOUNT_POINT) -> list[Link]:
    """Return a data root's links into the store that is mounted at ``store``, in no particular order.

    Looks only where the seed makes links: a container's own files may contain any link. Raises OSError.
    """
    folder, name = _FOLDERS[engine]
    places = [(layer / name, True) for layer in listed(data_root / folder)]
    if engine == "docker":
        places += [(record / "tar-split.json.gz", False) for record in listed(data_root / RECORDS)]
    else:
        places += [(blob, False) for blob in listed(data_root / BLOBS)]
    return [link for path, directory in places if (link := _link(path, directory, store))]


def is_new(root: Path) -> bool:
    """Return whether containerd's root is as its first start leaves it. Raises OSError.

    A new root has only the plugins' empty directories and databases: no content, snapshots or containers, and no
    foreign files.
    """
    plugins = listed(root)
    if any(
        not (p.is_dir() and p.name.startswith("io.containerd.")) and p.name != "tmpmounts" for p in plugins
    ):
        return False
    return all(_is_new(place, root) for plugin in plugins for place in listed(plugin))


def _is_new(place: Path, root: Path) -> bool:
    if place.is_symlink() or not place.is_dir():
        return place.relative_to(root) in _FIRST_FILES
    return all(inner == root / BLOBS and not listed(inner) for inner in listed(place))


def listed(folder: Path) -> list[Path]:
    """Return a directory's entries, in no particular order; none if the directory doesn't exist. Raises OSError."""
    try:
        return [folder / name for name in os.listdir(folder)]
    except FileNotFoundError:
        return []


def _link(path: Path, directory: bool, store: Path) -> Link | None:
    try:
        target = Path(os.readlink(path))
    except OSError:  # not a link, missing, or removed in the meantime
        return None
    if store not in target.parents:
        return None
    diff_id = _diff_id(path, target, store)
    size = 0 if directory else _size(target)
    return Link(path, target, diff_id, directory, size)


def _diff_id(path: Path, target: Path, store: Path) -> str:
    if target.parent == store / LAYERS:
        return diff_id_of(target.name)
    try:  # next to Docker's tar-split.json.gz is a file with the diff id
        return (path.parent / "diff").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def _size(target: Path) -> int:
    """Return a file's size in bytes; 0 if the store can't be read, an error that the copy will hit and report."""
    try:
        info = target.stat()
    except OSError:
        return 0
    return info.st_size if stat.S_ISREG(info.st_mode) else 0


# -- layers ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Links:
    """A data root's layers: diff ids (hexadecimal) ``served`` by the store and, among these, ``broken`` links.

    ``directories`` counts the layers on the local disk itself, including those of containers. ``local`` has Docker's
    local layers by chain id (hexadecimal); it is None for containerd, whose records only containerd can read.
    """

    served: frozenset[str]
    broken: frozenset[str]
    directories: int
    local: frozenset[str] | None = None


def scan(data_root: Path, engine: str) -> Links:
    """Return the layers of a data root; none if the data root doesn't exist or the engine is unknown."""
    if engine not in _FOLDERS:  # the image has no preload
        return Links(frozenset(), frozenset(), 0)
    served, broken, directories = set(), set(), 0
    folder, name = _FOLDERS[engine]
    try:
        layers = listed(data_root / folder)
    except OSError:
        layers = []
    for place in (layer / name for layer in layers):
        try:
            layer = diff_id_of(os.path.basename(os.readlink(place))).removeprefix("sha256:")
        except OSError:  # not a link, or no longer one: the promotion may be running at the same time
            directories += os.path.isdir(place)
            continue
        served.add(layer)
        if not os.path.isdir(place):
            broken.add(layer)
    local = _docker_chains(data_root) if engine == "docker" else None
    return Links(frozenset(served), frozenset(broken), directories, local)


def cache_id(record: str | Path) -> str:
    """Return the directory in ``overlay2`` that a layer's record names; empty if it is damaged. Raises OSError."""
    name = files.read_text(f"{record}/cache-id")
    return "" if "/" in name or name in (".", "..") else name


def _docker_chains(root: Path) -> frozenset[str]:
    """Return the chain ids of the layers that Docker has a record of and that are on the local disk."""
    chains = set()
    try:
        records = listed(root / RECORDS)
    except OSError:
        records = []
    for record in records:
        try:
            cache = cache_id(record)
        except OSError:
            continue
        diff = root / "overlay2" / cache / "diff"
        if cache and diff.is_dir() and not diff.is_symlink():
            chains.add(record.name)
    return frozenset(chains)


# -- use -------------------------------------------------------------------------------------------------------


def user(engine: str, data_root: Path) -> str:
    """Return what is using a data root, as the end of a sentence; empty if nothing is. Raises OSError."""
    if any(_is_locked(data_root / name) for name in _LOCKED[engine]):
        return f"{engine} runs on it"
    real = os.path.realpath(data_root)
    below = [target for target in mounts.below(data_root) if target != real]
    return f"{below[0]} is mounted below it" if below else ""


def _is_locked(path: Path) -> bool:
    try:
        with files.descriptor(path, os.O_NOFOLLOW) as fd:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
