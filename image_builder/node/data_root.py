"""An engine's data root: the names in it that lead into the store, its layers, and who uses it.

The seed makes the names, the promotion replaces them by copies.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from image_builder.node import files, mounts
from image_builder.node.layout import LAYERS, MOUNT_POINT

# containerd's snapshots by number and blobs by digest, Docker's records of layers by chain id.
SNAPSHOTS = Path("io.containerd.snapshotter.v1.overlayfs/snapshots")
BLOBS = Path("io.containerd.content.v1.content/blobs/sha256")
RECORDS = Path("image/overlay2/layerdb/sha256")
# What containerd writes into its root before anybody pulls. A snapshotter's database is here only if its snapshots are
# directories beside it.
_FIRST_FILES = frozenset(
    Path(f"io.containerd.{name}")
    for name in (
        "metadata.v1.bolt/meta.db",
        "grpc.v1.introspection/uuid",
        *(f"snapshotter.v1.{kind}/metadata.db" for kind in ("overlayfs", "native", "erofs", "blockfile")),
    )
)
# A directory for each layer, and the name of its files in it.
_FOLDERS: Mapping[str, tuple[Path, str]] = {
    "docker": (Path("overlay2"), "diff"),
    "containerd": (SNAPSHOTS, "fs"),
}
# Databases that an engine keeps locked (flock, by bbolt) from its start to its end, below its data root. That says
# more than an answer on its socket, which systemd may hold, and which does not name a data root.
_LOCKED: Mapping[str, Sequence[str]] = {
    "docker": ("volumes/metadata.db", "network/files/local-kv.db"),
    "containerd": ("io.containerd.metadata.v1.bolt/meta.db",),
}


@dataclass(frozen=True)
class Link:
    """A name in the data root that leads into the store.

    ``diff_id`` is empty where the name does not tell its layer. ``bytes`` is the size of a file, and of a directory
    whose layer is in no manifest; else 0.
    """

    path: Path
    target: Path
    diff_id: str
    directory: bool
    bytes: int = 0


def find_links(engine: str, data_root: Path, store: Path = MOUNT_POINT) -> list[Link]:
    """Return the links of a data root into the store that is mounted at ``store``, in no order.

    Only names where the seed makes links are looked at: a container's own files may hold any link. Raises OSError.
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

    Then it has its plugins' empty directories and databases, and nothing else: no content, snapshot, container or
    file of anybody else's.
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
    """Return what is in a directory, in no order; nothing where there is none. Raises OSError."""
    try:
        return [folder / name for name in os.listdir(folder)]
    except FileNotFoundError:
        return []


def _link(path: Path, directory: bool, store: Path) -> Link | None:
    try:
        target = Path(os.readlink(path))
    except OSError:  # no link, nothing there, or gone meanwhile
        return None
    if store not in target.parents:
        return None
    diff_id = _diff_id(path, target, store)
    size = 0 if directory else _size(target)
    return Link(path, target, diff_id, directory, size)


def _diff_id(path: Path, target: Path, store: Path) -> str:
    if target.parent == store / LAYERS:
        return f"sha256:{target.name}"
    try:  # beside Docker's tar-split.json.gz lies a file with the diff id
        return (path.parent / "diff").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def _size(target: Path) -> int:
    """Return a file's bytes; 0 where the store can't be read, which the copy then finds out and tells."""
    try:
        info = target.stat()
    except OSError:
        return 0
    return info.st_size if stat.S_ISREG(info.st_mode) else 0


# -- layers ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Links:
    """What a data root has: diff ids (hexadecimal) served by the store; of those, links that lead nowhere.

    ``directories`` counts the layers that are on the local disk itself, those of containers included. ``local`` are
    Docker's, by chain id (hexadecimal); None for containerd, whose records only it can read.
    """

    served: frozenset[str]
    broken: frozenset[str]
    directories: int
    local: frozenset[str] | None = None


def scan(data_root: Path, engine: str) -> Links:
    """Look at each layer's directory of a data root; nothing where there is none."""
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
            layer = os.readlink(place)
        except OSError:  # no link, or none any more: the promotion goes on meanwhile
            directories += os.path.isdir(place)
            continue
        served.add(os.path.basename(layer))
        if not os.path.isdir(place):
            broken.add(os.path.basename(layer))
    local = _docker_chains(data_root) if engine == "docker" else None
    return Links(frozenset(served), frozenset(broken), directories, local)


def _docker_chains(root: Path) -> frozenset[str]:
    """Return the chain ids of the layers that Docker has on record and on the local disk."""
    chains = set()
    try:
        records = listed(root / RECORDS)
    except OSError:
        records = []
    for record in records:
        try:
            diff = root / "overlay2" / (record / "cache-id").read_text() / "diff"
        except (OSError, ValueError):
            continue
        if diff.is_dir() and not diff.is_symlink():
            chains.add(record.name)
    return frozenset(chains)


# -- use -------------------------------------------------------------------------------------------------------


def user(engine: str, data_root: Path) -> str:
    """Return who uses a data root, as the end of a sentence; empty where nobody does. Raises OSError."""
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
