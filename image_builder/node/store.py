"""The preload store: one read-only EROFS with every layer that a node was baked with, and its manifest.

    /layers/<hex of a diff id>/     a layer's files, as overlay wants them
    /docker/, /containerd/          what each engine keeps beside them: ``records.json`` for what is small, and files

The file carries its dm-verity hash tree behind the filesystem. The kernel checks each block when it is read, so a
damaged block is an I/O error and never a wrong byte, and nothing is hashed at boot.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from image_builder.node import files, mounts
from image_builder.node.child import run
from image_builder.node.errors import NodeError, ProgramError
from image_builder.node.layout import LAYERS, MANIFEST, MOUNT_POINT

FORMAT = 1
BLOCK = 4096
_CHUNK = 1 << 20
MAPPING = "image-builder-preload"
# What says that the disk below the store failed, for now: the store itself may be sound.
_FOR_NOW = frozenset([errno.EIO, errno.ENOMEM, errno.EBUSY, errno.ENOSPC, errno.EAGAIN, errno.EINTR])


@dataclass(frozen=True)
class Verity:
    """A hash tree: where it begins in the file (bytes), and what leads to it. Blocks are 4 KiB, hashes SHA-256."""

    root_hash: str
    salt: str
    hash_offset: int

    def table(self, device: str) -> str:
        """Return the device-mapper table (Documentation/admin-guide/device-mapper/verity.rst)."""
        blocks = self.hash_offset // BLOCK
        fields = ("1", device, device, BLOCK, BLOCK, blocks, blocks, "sha256", self.root_hash, self.salt)
        return f"0 {blocks * (BLOCK // 512)} verity {' '.join(map(str, fields))}"


@dataclass(frozen=True)
class Image:
    """What a reference means, as the archive's list and the store's manifest have it. Digests begin with ``sha256:``.

    ``digest`` may be an index's. ``size`` is in bytes, unpacked; layers that images share count for each. The store's
    alone say how an image gets to the disk, ``mode``: ``reference`` (links, promoted later), ``copy`` (at boot) or
    ``archive``; and whether it is ``required``.
    """

    ref: str
    digest: str
    manifest: str
    id: str
    pin: bool
    diff_ids: tuple[str, ...]
    size: int = 0
    required: bool = False
    mode: str = "archive"

    @property
    def by_digest(self) -> str:
        return f"{self.ref.rpartition(':')[0]}@{self.digest}"

    @property
    def is_essential(self) -> bool:
        """Tell whether a node must have it before others."""
        return self.pin or self.required


def parse_image(value: Mapping[str, Any]) -> Image:
    """Return an image of a document. Raises KeyError, TypeError or ValueError."""
    return Image(
        **{key: str(value[key]) for key in ("ref", "digest", "manifest", "id", "mode")},
        pin=bool(value["pin"]),
        required=bool(value["required"]),
        diff_ids=tuple(map(str, value["diff_ids"])),
        size=int(value["bytes"]),
    )


@dataclass(frozen=True)
class Layer:
    """A layer in a chain. Both ids begin with ``sha256:``; ``parent`` is empty for the lowest."""

    chain: str
    diff_id: str
    parent: str


@dataclass(frozen=True)
class BakedEngine:
    """The engine that unpacked the layers: its version, and the program by path and size in bytes."""

    version: str
    binary: str
    bytes: int


@dataclass(frozen=True)
class Store:
    """``store.json``. ``layers`` maps diff ids to the bytes of their files."""

    id: str
    file: Path
    bytes: int
    verity: Verity | None
    engines: Mapping[str, BakedEngine]
    images: tuple[Image, ...]
    layers: Mapping[str, int]


def chain(diff_ids: Iterable[str]) -> Iterator[Layer]:
    """Yield an image's layers, the lowest first (OCI image specification, "Layer ChainID")."""
    parent = ""
    for diff_id in diff_ids:
        digest = hashlib.sha256(f"{parent} {diff_id}".encode()).hexdigest()
        this = f"sha256:{digest}" if parent else diff_id
        yield Layer(this, diff_id, parent)
        parent = this


def read_manifest(path: Path = MANIFEST) -> Store:
    """Read ``store.json``. Raises NodeError: ``store.manifest``, ``store.io``."""
    try:
        return parse_manifest(json.loads(path.read_bytes()))
    except OSError as error:
        raise unreadable(error, "store.manifest", f"{path}: {error.strerror}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise NodeError(
            "store.manifest",
            f"{path} is not the manifest of a preload store: {type(error).__name__}: {error}",
        ) from error


def parse_manifest(document: Mapping[str, Any]) -> Store:
    """Return what a manifest says. Raises AttributeError, KeyError, TypeError or ValueError."""
    if document["format"] != FORMAT:
        raise ValueError(f"format {document['format']}, this program reads {FORMAT}")
    verity = document["verity"]
    return Store(
        id=str(document["id"]),
        file=Path(document["file"]),
        bytes=int(document["bytes"]),
        verity=Verity(str(verity["root_hash"]), str(verity["salt"]), int(verity["hash_offset"]))
        if verity
        else None,
        engines={
            str(name): BakedEngine(str(e["version"]), str(e["binary"]), int(e["bytes"]))
            for name, e in document["engines"].items()
        },
        images=tuple(map(parse_image, document["images"])),
        layers={str(layer["diff_id"]): int(layer["bytes"]) for layer in document["layers"]},
    )


def open_store(store: Store, *, verity: bool, at: Path = MOUNT_POINT) -> None:
    """Mount the store, checked by dm-verity; nothing happens when it is mounted already.

    ``verity`` False takes a store without the check, as the node's settings declare. Raises NodeError:
    ``store.truncated``, ``store.verity``, ``store.mount``, ``store.disagrees``, ``store.damaged``, ``store.io``.
    """
    was_mounted = mounts.at(at) is not None
    if not was_mounted:
        try:
            size = store.file.stat().st_size
        except OSError as error:
            raise unreadable(error, "store.truncated", f"{store.file}: {error.strerror}") from error
        if size != store.bytes:
            raise NodeError("store.truncated", f"{store.file} has {size} bytes, not {store.bytes}")
        if store.verity and size <= store.verity.hash_offset:
            raise NodeError("store.disagrees", f"{store.file} has {size} bytes, and no hash tree behind them")
        at.mkdir(parents=True, exist_ok=True)
        if not verity:
            _mount_file(store.file, at)
        elif store.verity is None:
            raise NodeError(
                "store.verity", f"{store.file} was baked without dm-verity, this node requires it"
            )
        else:
            try:
                _mount_verified(store.file, store.verity, at)
            except ProgramError as error:  # the program is missing, or did not end
                raise NodeError("store.verity", f"{store.file} is not checked: {error.message}") from error
    try:
        _compare(store, at)
    except NodeError:
        if not was_mounted:  # else an engine may use it
            close_store(at)
        raise


def _mount_verified(file: Path, verity: Verity, at: Path) -> None:
    # A mapping that a killed agent left; without one this fails, and that is all right.
    run(["dmsetup", "remove", MAPPING], ok=range(256))
    if _is_mapped(verity):
        _mount_mapping(file, at)
        return
    with _loop_device(file) as device:
        try:
            run(["dmsetup", "create", MAPPING, "--readonly", "--table", verity.table(device)])
            _mount_mapping(file, at)
        except ProgramError as error:
            raise NodeError("store.verity", f"dm-verity refuses {file}: {error.message}") from error


@contextmanager
def _loop_device(file: Path) -> Iterator[str]:
    """Yield a loop device for a file. Its last user takes it along. Raises NodeError (``store.io``)."""
    try:
        loop = run(["losetup", "--find", "--show", "--read-only", "--direct-io=on", os.fspath(file)])
    except ProgramError as error:
        raise NodeError("store.io", f"no loop device for {file}: {error.message}") from error
    device = loop.stdout.strip()
    try:
        yield device
    finally:
        with suppress(ProgramError):
            run(["losetup", "--detach", device], ok=range(256))


def _is_mapped(verity: Verity) -> bool:
    """Tell whether this store is mapped, by containers that still use it after a release; it goes on being so."""
    table = run(["dmsetup", "table", MAPPING], ok=range(256)).stdout
    if verity.root_hash not in table:
        return False
    return run(["dmsetup", "message", MAPPING, "0", "@cancel_deferred_remove"], ok=range(256)).status == 0


def _mount_mapping(file: Path, at: Path) -> None:
    try:
        mounts.mount(f"/dev/mapper/{MAPPING}", at, "erofs", mounts.RDONLY | mounts.NODEV)
    except OSError as error:
        run(["dmsetup", "remove", "--retry", MAPPING], ok=range(256))
        raise unreadable(error, "store.mount", f"{file} can't be mounted: {error.strerror}") from error


def _mount_file(file: Path, at: Path) -> None:
    """Mount the file itself where the kernel can (6.12), else by a loop device."""
    try:
        try:
            mounts.mount(file, at, "erofs", mounts.RDONLY | mounts.NODEV)
        except OSError as error:
            if error.errno != errno.ENOTBLK:
                raise
            with _loop_device(file) as device:
                mounts.mount(device, at, "erofs", mounts.RDONLY | mounts.NODEV)
    except OSError as error:
        raise unreadable(error, "store.mount", f"{file} can't be mounted: {error.strerror}") from error


def _compare(store: Store, at: Path) -> None:
    """Raise NodeError unless the store has exactly the layers and engines of the manifest."""
    try:
        layers = {f"sha256:{name}" for name in os.listdir(at / LAYERS)}
        engines = {name for name in os.listdir(at) if name != LAYERS}
    except OSError as error:
        raise unreadable(error, "store.damaged", f"{error.filename}: {error.strerror}") from error
    # What nodes load from the archive is listed, and is not in the store.
    needed = {diff_id for image in store.images if image.mode != "archive" for diff_id in image.diff_ids}
    if layers != set(store.layers) or not needed <= layers or engines != set(store.engines):
        raise NodeError("store.disagrees", f"{store.file} does not hold what its manifest lists")


def unreadable(error: OSError, code: str, message: str) -> NodeError:
    """Return the error of a store that can't be read: ``code``, or ``store.io`` where a retry may succeed."""
    return NodeError("store.io" if error.errno in _FOR_NOW else code, message)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an error while the store is read into one that can't be taken for the disk's.

    Raises NodeError: ``store.io`` where a retry may succeed, else ``store.damaged``.
    """
    try:
        yield
    except OSError as error:
        raise unreadable(error, "store.damaged", f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise NodeError("store.damaged", f"{path}: {error}") from error


def copy(source: Path, target: Path) -> None:
    """Copy a small file of the store with its mode; the caller syncs it. Raises OSError, NodeError (``reading``)."""
    with reading(source):
        data, mode = source.read_bytes(), source.stat().st_mode & 0o7777
    files.write(target, data, mode, durable=False)


def read_through(path: Path) -> None:
    """Read a file, or all files below a directory, to their ends. Raises OSError."""

    def refuse(error: OSError) -> None:
        raise error

    def read(name: str, folder: int | None) -> None:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            while os.read(fd, _CHUNK):
                pass
        finally:
            os.close(fd)

    if not stat.S_ISDIR(path.lstat().st_mode):
        read(os.fspath(path), None)
        return
    for _, _, names, folder in os.fwalk(path, onerror=refuse):
        for name in names:
            if stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                read(name, folder)


def close_store(at: Path = MOUNT_POINT) -> None:
    """Unmount the store. Containers that run keep what they use of it until they end. Raises NodeError."""
    if mounts.at(at) is None:
        return
    try:
        run(["umount", os.fspath(at)])
    except ProgramError as error:
        raise NodeError("store.busy", error.message) from error
    run(["dmsetup", "remove", "--deferred", MAPPING], ok=range(256))
