"""A store's manifest, its dm-verity table, and what is compared once it's mounted."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from image_builder.node import mounts, store
from image_builder.node.child import Completed
from image_builder.node.errors import NodeError, ProgramError
from image_builder.node.store import (
    MAPPING,
    Verity,
    _compare,
    _mount_file,
    _mount_verified,
    parse_manifest,
    read_manifest,
)
from tests.unit.node.stores import digest, manifest


def test_a_manifest_is_read(tmp_path: Path) -> None:
    path = tmp_path / "store.json"
    path.write_text(json.dumps(manifest()))
    store = read_manifest(path)
    assert store.file == Path("/opt/preload/store.erofs") and store.bytes == 8192
    assert store.verity == Verity("1" * 64, "2" * 64, 4096)
    assert store.engines["docker"].bytes == 10
    assert [image.ref for image in store.images] == ["lab/one:1", "lab/two:1"]
    assert store.images[0].diff_ids == (digest("base"), digest("a"))
    assert store.layers == {digest(name): 4096 for name in ("base", "a", "b")}


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"bytes": "many"},
        {"verity": "yes"},
        {"verity": {"root_hash": "1"}},
        {"engines": []},
        {"engines": {"docker": {"version": "1"}}},
        {"images": [{"ref": "x"}]},
        {"images": 3},
        {"layers": [{"bytes": 1}]},
        {"file": None},
    ],
)
def test_a_manifest_of_another_shape_is_told(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "store.json"
    path.write_text(json.dumps(manifest(**change)))
    with pytest.raises(NodeError) as caught:
        read_manifest(path)
    assert caught.value.code == "store.manifest" and str(path) in caught.value.message


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"{", b"\xff\xfe\x00", b"[" * 100])
def test_garbage_is_no_manifest(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "store.json"
    path.write_bytes(data)
    with pytest.raises(NodeError) as caught:
        read_manifest(path)
    assert caught.value.code == "store.manifest"


def test_the_table_is_the_device_mappers() -> None:
    table = Verity("aa", "bb", 3 * 4096).table("/dev/loop7")
    assert table == "0 24 verity 1 /dev/loop7 /dev/loop7 4096 4096 3 3 sha256 aa bb"


def _mounted(where: Path, layers: list[str], engines: list[str]) -> Path:
    for name in layers:
        (where / "layers" / digest(name)[7:]).mkdir(parents=True)
    for name in engines:
        (where / name).mkdir()
    return where


def test_a_store_has_exactly_what_its_manifest_lists(tmp_path: Path) -> None:
    _compare(parse_manifest(manifest()), _mounted(tmp_path, ["base", "a", "b"], ["docker"]))


def test_layers_of_an_image_for_the_archive_are_not_in_the_store(tmp_path: Path) -> None:
    document = manifest()
    document["images"][1]["mode"] = "archive"
    document["layers"].pop()
    _compare(parse_manifest(document), _mounted(tmp_path, ["base", "a"], ["docker"]))


@pytest.mark.parametrize(
    ("layers", "engines"),
    [
        (["base", "a"], ["docker"]),
        (["base", "a", "b", "c"], ["docker"]),
        (["base", "a", "b"], []),
        (["base", "a", "b"], ["docker", "containerd"]),
        (["base", "a", "b"], ["containerd"]),
    ],
)
def test_more_or_less_is_told(layers: list[str], engines: list[str], tmp_path: Path) -> None:
    with pytest.raises(NodeError) as caught:
        _compare(parse_manifest(manifest()), _mounted(tmp_path, layers, engines))
    assert caught.value.code == "store.disagrees"


def test_a_store_without_layers_is_damaged(tmp_path: Path) -> None:
    with pytest.raises(NodeError) as caught:
        _compare(parse_manifest(manifest()), tmp_path)
    assert caught.value.code == "store.damaged"


VERITY = Verity("1" * 64, "2" * 64, 4096)
OTHER = Verity("3" * 64, "2" * 64, 4096)
LOOP, FILE, AT = "/dev/loop7", Path("/opt/preload/store.erofs"), Path("/var/lib/preload")
MAPPED = f"/dev/mapper/{MAPPING}"


@dataclass
class Kernel:
    """The kernel state that losetup, dmsetup and mount(2) change.

    ``losetup`` and ``mounting`` are failures: an exit status, and errnos by what is mounted. ``mapped`` is the root
    hash of the store that is mapped, ``deferred`` whether the mapping is removed with its last user.
    """

    losetup: int = 0
    mounting: dict[str, int] = field(default_factory=dict)
    loops: list[str] = field(default_factory=list)
    mapped: str = ""
    deferred: bool = False
    mounted: str = ""

    def run(self, argv: Sequence[str], *, ok: Container[int] = (0,)) -> Completed:
        status, said = self._program(list(argv))
        if status not in ok:
            raise ProgramError(f"`{' '.join(argv)}` ended with {status}", status, said)
        return Completed(status, said, "")

    def _program(self, argv: list[str]) -> tuple[int, str]:
        match argv:
            case ["losetup", "--find", *_]:
                self.loops += [] if self.losetup else [LOOP]
                return self.losetup, f"{LOOP}\n"
            case ["losetup", "--detach", device]:
                self.loops.remove(device)
            case ["dmsetup", "remove", *_]:
                return 1, "Device or resource busy"  # running containers have its files open
            case ["dmsetup", "table", _]:
                return (
                    (0, f"0 8 verity 1 7:1 7:1 4096 4096 1 1 sha256 {self.mapped} 2")
                    if self.mapped
                    else (1, "")
                )
            case ["dmsetup", "message", _, "0", "@cancel_deferred_remove"]:
                self.deferred = False
            case ["dmsetup", "create", *_]:
                return 1, "Device or resource busy"
            case _:
                raise AssertionError(argv)
        return 0, ""

    def mount(self, source: str | Path, target: str | Path, filesystem: str, flags: int) -> None:
        assert (target, filesystem, flags) == (AT, "erofs", mounts.RDONLY | mounts.NODEV)
        if number := self.mounting.get(os.fspath(source)):
            raise OSError(number, os.strerror(number), os.fspath(target))
        self.mounted = os.fspath(source)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel()
    monkeypatch.setattr(store, "run", made.run)
    monkeypatch.setattr(mounts, "mount", made.mount)
    return made


def test_a_kernel_that_mounts_no_file_gets_a_loop_device(kernel: Kernel) -> None:
    kernel.mounting = {os.fspath(FILE): errno.ENOTBLK}
    _mount_file(FILE, AT)
    assert kernel.mounted == LOOP and kernel.loops == [], "the mount takes it along"


@pytest.mark.parametrize(
    ("losetup", "on_file", "on_loop", "code"),
    [
        (0, errno.EUCLEAN, 0, "store.mount"),
        (0, errno.EIO, 0, "store.io"),
        (0, errno.ENOTBLK, errno.EBADMSG, "store.mount"),
        # A kernel without EROFS, or without one of its features; a file that isn't visible yet; a timeout; a policy.
        *(
            (0, errno.ENOTBLK, number, "store.io")
            for number in (errno.ENODEV, errno.EOPNOTSUPP, errno.ETIMEDOUT, errno.EPERM, errno.EREMOTEIO)
        ),
        (0, errno.ENODEV, 0, "store.io"),
        (0, errno.ENODATA, 0, "store.io"),
        (0, errno.ENOENT, 0, "store.io"),
        (0, errno.ENOTBLK, errno.EIO, "store.io"),
        (0, errno.ENOTBLK, errno.EBUSY, "store.io"),
        (1, errno.ENOTBLK, 0, "store.io"),
        (124, errno.ENOTBLK, 0, "store.io"),
        (127, errno.ENOTBLK, 0, "store.io"),
    ],
)
def test_only_what_a_file_holds_keeps_it_from_being_mounted_for_good(
    losetup: int, on_file: int, on_loop: int, code: str, kernel: Kernel
) -> None:
    kernel.losetup, kernel.mounting = losetup, {os.fspath(FILE): on_file, LOOP: on_loop}
    with pytest.raises(NodeError) as caught:
        _mount_file(FILE, AT)
    assert caught.value.code == code and str(FILE) in caught.value.message
    assert kernel.mounted == "" and kernel.loops == []


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (bytes(1024) + bytes.fromhex("e2e1f5e0") + bytes(100), "store.io"),
        (bytes(4096), "store.mount"),
        (b"short", "store.mount"),
        (None, "store.io"),
    ],
    ids=["EROFS", "zeros", "short", "unreadable"],
)
def test_a_file_that_the_kernel_finds_invalid_is_damaged_if_it_is_not_erofs(
    data: bytes | None, code: str, kernel: Kernel, tmp_path: Path
) -> None:
    file = tmp_path / "store.erofs"
    if data is not None:
        file.write_bytes(data)
    kernel.mounting = {os.fspath(file): errno.EINVAL}
    with pytest.raises(NodeError) as caught:
        _mount_file(file, AT)
    assert caught.value.code == code


def test_a_store_that_containers_still_use_after_a_release_is_used_on(kernel: Kernel) -> None:
    kernel.mapped, kernel.deferred = VERITY.root_hash, True
    _mount_verified(FILE, VERITY, AT)
    assert kernel.mounted == MAPPED
    assert not kernel.deferred, "or it would go with the last of them, beneath the mount"


def test_another_store_that_is_still_mapped_is_not_taken_for_this_one(kernel: Kernel) -> None:
    kernel.mapped, kernel.deferred = OTHER.root_hash, True
    with pytest.raises(NodeError) as caught:
        _mount_verified(FILE, VERITY, AT)
    assert caught.value.code == "store.verity"
    assert kernel.mounted == "" and kernel.deferred and kernel.loops == []
