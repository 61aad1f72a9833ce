"""The preload store: one read-only EROFS image with every layer that a node was baked with, and its manifest.

    /layers/<hex of a diff id>/     a layer's files, in overlay's format
    /layers/<hex>.<n>/              the same files for chains that can't use the first directory: directories without
                                    an entry in the layer differ there, or the chain has this layer more than once
    /docker/, /containerd/          the engine's metadata: ``records.json`` for small items, and files

The file has its dm-verity hash tree appended to the filesystem. The kernel checks each block when it is read, so a
damaged block causes an I/O error and never wrong data, and nothing is hashed at boot.
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
# Errors that prove that the store itself is damaged, or lacks a file. After any other it may be intact: the disk below
# it failed, the kernel lacks a module or a feature, a program timed out.
_CORRUPT = frozenset([errno.EUCLEAN, errno.EBADMSG])
_LOST = _CORRUPT | {errno.ENOENT}
# The superblock begins with this number (fs/erofs/erofs_fs.h), in bytes from the start of the file.
_MAGIC, _MAGIC_AT = bytes.fromhex("e2e1f5e0"), 1024


@dataclass(frozen=True)
class Verity:
    """A hash tree: its offset in the file (bytes), its root hash and salt. Blocks are 4 KiB, hashes SHA-256."""

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
    """The image behind a reference, from the archive's list or the store's manifest. Digests begin with ``sha256:``.

    ``digest`` may be that of an index. ``size`` is in bytes, unpacked; shared layers count for every image. Only the
    store's manifest says how an image gets to the disk (``mode``: ``reference`` (links, promoted later), ``copy`` (at
    boot) or ``archive``) and whether it is ``required``.
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
        """Return whether a node must have this image before others."""
        return self.pin or self.required


def parse_image(value: Mapping[str, Any]) -> Image:
    """Return the image that an object of the manifest describes. Raises KeyError, TypeError or ValueError."""
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
    """The engine that unpacked the layers: its version, and its program's path and size in bytes."""

    version: str
    binary: str
    bytes: int


@dataclass(frozen=True)
class Store:
    """The contents of ``store.json``.

    ``layers`` maps diff ids to the total size of their files in bytes; ``directories`` are the names below ``layers``.
    """

    id: str
    file: Path
    bytes: int
    verity: Verity | None
    engines: Mapping[str, BakedEngine]
    images: tuple[Image, ...]
    layers: Mapping[str, int]
    directories: frozenset[str]


def chain(diff_ids: Iterable[str]) -> Iterator[Layer]:
    """Yield an image's layers, lowest first (OCI image specification, "Layer ChainID")."""
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
    """Return the contents of a manifest. Raises AttributeError, KeyError, TypeError or ValueError."""
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
        # Manifests from before a layer could have several directories lack this key.
        directories=frozenset(
            str(layer.get("directory") or layer["diff_id"][len("sha256:") :]) for layer in document["layers"]
        ),
    )


def open_store(store: Store, *, verity: bool, at: Path = MOUNT_POINT) -> None:
    """Mount the store, checked by dm-verity, unless it is already mounted; compare it with its manifest.

    ``verity=False`` mounts it without that check, as the node's settings declare. Raises NodeError:
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
            except ProgramError as error:  # the program is missing or timed out
                raise NodeError("store.verity", f"{store.file} is not checked: {error.message}") from error
    try:
        _compare(store, at)
    except NodeError:
        if not was_mounted:  # otherwise an engine may be using it
            close_store(at)
        raise


def _mount_verified(file: Path, verity: Verity, at: Path) -> None:
    # Remove a mapping that a killed agent left behind; if there is none, this fails, which is fine.
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
    """Yield a loop device for a file; it disappears with its last user. Raises NodeError (``store.io``)."""
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
    """Return whether this store is still mapped, in use by containers after its release; if so, keep it mapped."""
    table = run(["dmsetup", "table", MAPPING], ok=range(256)).stdout
    if verity.root_hash not in table:
        return False
    return run(["dmsetup", "message", MAPPING, "0", "@cancel_deferred_remove"], ok=range(256)).status == 0


def _mount_mapping(file: Path, at: Path) -> None:
    try:
        mounts.mount(f"/dev/mapper/{MAPPING}", at, "erofs", mounts.RDONLY | mounts.NODEV)
    except OSError as error:
        run(["dmsetup", "remove", "--retry", MAPPING], ok=range(256))
        raise _unmountable(error, file) from error


def _mount_file(file: Path, at: Path) -> None:
    """Mount the file itself if the kernel can (6.12), otherwise through a loop device."""
    try:
        try:
            mounts.mount(file, at, "erofs", mounts.RDONLY | mounts.NODEV)
        except OSError as error:
            if error.errno != errno.ENOTBLK:
                raise
            with _loop_device(file) as device:
                mounts.mount(device, at, "erofs", mounts.RDONLY | mounts.NODEV)
    except OSError as error:
        raise _unmountable(error, file) from error


def _compare(store: Store, at: Path) -> None:
    """Raise NodeError unless the store has exactly the layers and engines of the manifest."""
    try:
        directories = set(os.listdir(at / LAYERS))
        engines = {name for name in os.listdir(at) if name != LAYERS}
    except OSError as error:
        raise unreadable(error, "store.damaged", f"{error.filename}: {error.strerror}") from error
    # Images that nodes load from the archive are listed, but aren't in the store.
    needed = {diff_id for image in store.images if image.mode != "archive" for diff_id in image.diff_ids}
    if directories != store.directories or not needed <= set(store.layers) or engines != set(store.engines):
        raise NodeError("store.disagrees", f"{store.file} does not hold what its manifest lists")


def unreadable(error: OSError, code: str, message: str) -> NodeError:
    """Return the error for a store that can't be read: ``code`` if it is lost for good, otherwise ``store.io``."""
    return NodeError(code if error.errno in _LOST else "store.io", message)


def _unmountable(error: OSError, file: Path) -> NodeError:
    """Return the error for a store that can't be mounted: ``store.mount`` if that proves damage, else ``store.io``.

    The kernel says EINVAL for a file that isn't EROFS, and for EROFS with a feature that it lacks.
    """
    is_damaged = error.errno in _CORRUPT or (error.errno == errno.EINVAL and not _may_be_erofs(file))
    code = "store.mount" if is_damaged else "store.io"
    return NodeError(code, f"{file} can't be mounted: {error.strerror}")


def _may_be_erofs(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            stream.seek(_MAGIC_AT)
            return stream.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return True


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an error while reading the store into one that can't be mistaken for the local disk's.

    Raises NodeError: ``store.damaged`` if the store is lost for good, otherwise ``store.io``.
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
    """Read a file, or all files below a directory, to the end. Raises OSError."""

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
    """Unmount the store. Running containers keep the parts they use until they end. Raises NodeError."""
    if mounts.at(at) is None:
        return
    try:
        run(["umount", os.fspath(at)])
    except ProgramError as error:
        raise NodeError("store.busy", error.message) from error
    run(["dmsetup", "remove", "--deferred", MAPPING], ok=range(256))
