"""The content of a disk that is or was ours: tables of names, signatures and superblocks."""

from __future__ import annotations

import errno
import json
import os
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from image_builder.node import child, mounts
from image_builder.node.disk import apply, layout, probe
from image_builder.node.disk.model import Array, Disk, Observation, Places, Raid, Signature, Survey, Volume
from image_builder.node.disk.settings import Settings
from image_builder.node.errors import NodeError

UUID = "6e6f6465-2d64-8000-8123-456789abcdef"
OTHER = "6e6f6465-2d64-8000-8123-456789abcd00"
OURS = Signature("xfs", UUID, "local")
MIB = 1 << 20
LOCAL = Disk("sdb", Path("/dev/sdb"), 64 * MIB, local=True)


def marker(uuid: str = UUID) -> str:
    return json.dumps({"uuid": uuid, "image": "one", "members": [{"serial": "S", "model": "M", "bytes": 1}]})


@pytest.mark.parametrize(
    ("files", "state"),
    [
        ({".node/disk.json": marker()}, "marked"),
        ({".node/disk.json": marker(), "kept": "x"}, "marked"),
        ({".node/disk.json": marker(OTHER)}, "unmarked"),
        ({".node/disk.json": marker(OTHER), "kept": "x"}, "unmarked"),
        ({".node/disk.json": "{"}, "empty"),
        ({".node/disk.json": "{", "kept": "x"}, "unmarked"),
        ({".node/disk.json": '{"uuid": "x"}'}, "empty"),
        ({".node/other": "x"}, "empty"),
        ({"lost+found/x": "x"}, "empty"),
        ({}, "empty"),
        ({"kept": "x"}, "unmarked"),
        ({".hidden": "x"}, "unmarked"),
    ],
)
def test_a_filesystem_is_ours_by_its_marker(tmp_path: Path, files: dict[str, str], state: str) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = probe._marked(Volume(Path("/dev/sdb"), "xfs", UUID, "damaged"), tmp_path)
    assert found.state == state
    assert (found.marker is not None) == (state == "marked")


@pytest.mark.parametrize(
    ("signatures", "is_ours"),
    [
        ((OURS,), True),
        ((replace(OURS, type="ext4"),), True),
        ((replace(OURS, type="btrfs"),), False),
        ((replace(OURS, label="data"),), False),
        ((replace(OURS, uuid="0" * 32),), False),
        ((OURS, Signature("gpt")), False),
        ((), False),
    ],
)
def test_a_filesystem_of_ours_is_known_by_label_and_uuid(
    signatures: tuple[Signature, ...], is_ours: bool
) -> None:
    assert probe.is_our_filesystem(signatures, Settings()) == is_ours


@pytest.mark.parametrize(("at", "is_zero"), [(None, True), (0, False), (-1, False), (5 << 20, True)])
def test_a_disk_is_blank_by_its_ends(tmp_path: Path, at: int | None, is_zero: bool) -> None:
    data = bytearray(16 << 20)
    if at is not None:
        data[at] = 1
    (tmp_path / "sdb").write_bytes(data)
    one = replace(LOCAL, path=tmp_path / "sdb", bytes=len(data))
    found = probe._first_look(one, Places(sys=tmp_path, proc=tmp_path), [])
    assert (found.ends_zero, found.error) == (is_zero, "")


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of what is looked into: the root tests cover the mount and the NTFS reader."""
    seen: list[str] = []

    def volume(path: Path, *_: object) -> Volume:
        seen.append("volume")
        return Volume(path, "xfs", UUID, "empty")

    def content(*_: object) -> str:
        seen.append("platform")
        return "blank"

    monkeypatch.setattr(probe, "_volume", volume)
    monkeypatch.setattr(probe, "_platform", content)
    return seen


OUR_DISK = Observation(LOCAL, (OURS,))
TABLE = Observation(LOCAL, (Signature("dos"),), ("sdb1",))


@pytest.mark.parametrize(
    ("seen", "what"),
    [
        (OUR_DISK, ["volume"]),
        (replace(OUR_DISK, holders=("dm-0",)), []),
        (replace(OUR_DISK, partitions=("sdb1",)), []),
        (replace(OUR_DISK, swap=True), []),
        (replace(OUR_DISK, error="x"), []),
        (replace(OUR_DISK, disk=replace(LOCAL, system=True)), []),
        (replace(OUR_DISK, signatures=(Signature("xfs", OTHER[:-1], "local"),)), []),
        (TABLE, ["platform"]),
        (replace(TABLE, disk=replace(LOCAL, local=False)), []),
        (replace(TABLE, mounts=("/data",)), []),
        (replace(TABLE, signatures=(Signature("ext4"),)), []),
    ],
)
def test_what_is_looked_into(looked: list[str], seen: Observation, what: list[str]) -> None:
    probe._with_content(seen, Settings(), Places(), [])
    assert looked == what


def xfs(size: int = 512) -> bytes:
    block = bytearray(b"XFSB".ljust(size, b"\0"))
    struct.pack_into(">H", block, 102, size)
    struct.pack_into("<I", block, 224, layout.crc32c(bytes(block)) ^ 0xFFFFFFFF)
    return bytes(block).ljust(4096, b"\xee")


def ext4() -> bytes:
    block = b"\x53\xef".ljust(1020, b"\1")
    return bytes(1024) + block + struct.pack("<I", layout.crc32c(block)) + bytes(2048)


def changed(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    ("filesystem", "head", "is_whole"),
    [
        ("xfs", xfs(), True),
        ("xfs", xfs(4096), True),
        ("xfs", changed(xfs(), 300), False),
        ("xfs", changed(xfs(4096), 4000), False),
        ("xfs", changed(xfs(), 3000), True),  # beyond the superblock
        ("xfs", changed(xfs(), 0), False),
        ("xfs", bytes(4096), False),
        ("xfs", b"XFSB".ljust(4096, b"\0"), False),
        ("xfs", b"", False),
        ("ext4", ext4(), True),
        ("ext4", changed(ext4(), 1030), False),
        ("ext4", bytes(4096), False),
        ("ext4", b"", False),
        ("btrfs", ext4(), False),
    ],
)
def test_a_superblock_with_its_sum_is_whole(filesystem: str, head: bytes, is_whole: bool) -> None:
    assert layout.is_superblock_whole(filesystem, head) == is_whole


def test_castagnolis_crc() -> None:
    assert layout.crc32c(b"123456789") ^ 0xFFFFFFFF == 0xE3069283


@pytest.mark.parametrize(
    ("code", "head", "state"),
    [
        (errno.EINVAL, xfs(), "newer"),
        (errno.EINVAL, changed(xfs(), 300), "damaged"),
        (errno.EUCLEAN, xfs(), "damaged"),
        (errno.EBADMSG, xfs(), "damaged"),
    ],
)
def test_what_the_kernel_refuses_is_damaged_or_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, head: bytes, state: str
) -> None:
    @contextmanager
    def refuse(*_: object) -> Iterator[Path]:
        raise OSError(code, os.strerror(code))
        yield

    monkeypatch.setattr(mounts, "read_only", refuse)
    (tmp_path / "disk").write_bytes(head)
    found = probe._volume(tmp_path / "disk", OURS, Places(run=tmp_path), [])
    assert (found.state, found.reason) == (state, os.strerror(code))


@pytest.mark.parametrize("number", [errno.EIO, errno.ENODATA, errno.ETIMEDOUT, errno.EREMOTEIO])
def test_a_disk_that_fails_is_not_damaged(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(mounts, "mount", refuse)
    (tmp_path / "disk").write_bytes(xfs())
    with pytest.raises(OSError, match=re.escape(os.strerror(number))):
        probe._volume(tmp_path / "disk", OURS, Places(run=tmp_path), [])


@pytest.mark.parametrize(
    ("number", "is_absent"), [(errno.ENOENT, True), (errno.EACCES, True), (errno.ENOMEM, False)]
)
def test_a_program_that_the_image_lacks_is_not_the_disks_error(
    number: int, is_absent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(argv: list[str], **_: object) -> None:
        raise child.cannot_start(argv, OSError(number, os.strerror(number)))

    (tmp_path / "disk").write_bytes(bytes(4 * MIB))
    places = Places(sys=tmp_path, proc=tmp_path)
    monkeypatch.setattr(child, "run", run)
    looked_at = Disk("disk", tmp_path / "disk", 4 * MIB)
    for look in (
        lambda: probe.observe([looked_at], places, [])[0],
        lambda: probe._array(UUID, [Observation(looked_at)], Settings(), places),
    ):
        if is_absent:
            with pytest.raises(NodeError) as caught:
                look()
            assert caught.value.code == "program.absent"
        else:
            assert look().error


class PowerCutError(Exception):
    pass


@pytest.mark.parametrize("writes", range(9))
def test_no_disk_is_blank_while_another_still_says_that_it_is_a_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    """The power fails after each write in turn while two members are erased."""
    several = []
    for name in ("one", "two"):
        (tmp_path / name).write_bytes(b"x" * (16 * MIB))
        several.append(Observation(Disk(name, tmp_path / name, 16 * MIB)))
    real, left = apply._write, [writes]

    def write(fd: int, offset: int, data: bytes) -> None:
        if not left[0]:
            raise PowerCutError
        left[0] -= 1
        real(fd, offset, data)

    monkeypatch.setattr(apply, "_write", write)
    with suppress(PowerCutError):
        apply.erase(several)
    heads = [probe.read_ends(one.disk)[0] for one in several]
    untouched = [head.startswith(b"x") for head in heads]
    erasing = [layout.is_erasing(head) for head in heads]
    assert not any(untouched) or writes < 2
    assert writes in (0, 8) or any(erasing)
    assert writes != 8 or all(head == bytes(MIB) for head in heads)


@pytest.mark.parametrize(
    ("at", "data", "is_blank"),
    [
        (0, b"", True),
        (100, b"x", False),
        (MIB - 1, b"x", False),
        (3 * MIB + 5000, b"x", False),
        (4 * MIB - 1, b"x", False),
    ],
)
def test_a_device_is_looked_at_right_before_it_is_formatted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, data: bytes, is_blank: bool
) -> None:
    device = tmp_path / "device"
    monkeypatch.setattr(probe, "signatures", lambda paths: {str(path): () for path in paths})
    offset, page = layout.making(4 * MIB)
    content = bytearray(4 * MIB)
    content[offset : offset + len(page)] = page
    content[at : at + len(data)] = data
    device.write_bytes(content)
    if is_blank:
        apply._check_blank(device, page)
        with pytest.raises(NodeError, match="data on it"):
            apply._check_blank(device)
    else:
        with pytest.raises(NodeError, match="data on it"):
            apply._check_blank(device, page)


def test_a_signature_right_before_it_is_formatted_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = tmp_path / "device"
    device.write_bytes(bytes(4 * MIB))
    monkeypatch.setattr(
        probe, "signatures", lambda paths: {str(path): (Signature("btrfs"),) for path in paths}
    )
    with pytest.raises(NodeError, match="has btrfs on it"):
        apply._check_blank(device)


ONE, TWO = (Disk(f"n{n}", Path(f"/dev/n{n}"), MIB, serial=f"S{n}", sequence="7", local=True) for n in (1, 2))


@pytest.mark.parametrize(
    ("now", "is_same"),
    [
        ([ONE, TWO], True),
        ([TWO, ONE], True),
        ([replace(ONE, found_by="azure/local/by-index", order="1"), TWO], True),
        ([ONE, TWO, replace(ONE, name="sys", system=True)], True),
        ([ONE], False),
        ([ONE, TWO, replace(ONE, name="n3", serial="S3")], False),
        ([ONE, replace(TWO, sequence="8")], False),
        ([ONE, replace(TWO, serial="S9")], False),
        ([ONE, replace(TWO, wwid="naa.9")], False),
        ([ONE, replace(TWO, bytes=2)], False),
        ([ONE, replace(TWO, local=False)], False),
        ([ONE, replace(TWO, system=True)], False),
    ],
)
def test_the_disks_are_the_same_when_they_are_written_to(now: list[Disk], is_same: bool) -> None:
    if is_same:
        apply._check_same([ONE, TWO], now)
    else:
        with pytest.raises(NodeError) as caught:
            apply._check_same([ONE, TWO], now)
        assert caught.value.code == "disk.changed"


def test_bytes_that_a_mount_will_hide_are_counted(tmp_path: Path) -> None:
    assert apply.hidden_bytes(tmp_path / "nothing") == 0
    (tmp_path / "docker/overlay2").mkdir(parents=True)
    assert apply.hidden_bytes(tmp_path) == 0
    (tmp_path / "docker/overlay2/layer").write_bytes(b"x" * 10_000)
    (tmp_path / "link").symlink_to("/usr")
    assert 10_000 <= apply.hidden_bytes(tmp_path) < 40_000


def test_data_that_came_since_the_last_look_is_not_formatted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = tmp_path / "device"
    device.write_bytes(b"x".ljust(4 * MIB, b"\0"))
    monkeypatch.setattr(probe, "signatures", lambda paths: {str(path): () for path in paths})
    monkeypatch.setattr(child, "run", lambda *_, **__: pytest.fail("it was formatted"))
    with pytest.raises(NodeError, match="right before it was formatted"):
        apply._filesystem([Disk("device", device, 4 * MIB)], Settings(), Places())


@pytest.mark.parametrize("is_same", [True, False])
def test_an_array_is_stopped_when_its_members_have_been_looked_at_again(
    is_same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = tmp_path / "md127"
    array.touch()
    disks = [Disk(f"n{n}", tmp_path / f"n{n}", 4 * MIB) for n in (1, 2)]
    for disk in disks:
        disk.path.write_bytes(bytes(4 * MIB))
    kind = "linux_raid_member" if is_same else "ext4"
    seen = [
        Observation(disk, (Signature(kind),), holders=("md127",), raid=Raid(UUID, "local", 0, 2, number))
        for number, disk in enumerate(disks)
    ]

    def stop(argv: list[str], **_: object) -> None:
        assert argv == ["mdadm", "--stop", os.fspath(array)]
        array.unlink()

    def erase(_several: object) -> None:
        assert not array.exists(), "its members would be busy"
        raise NodeError("program", "erased")

    monkeypatch.setattr(probe, "observe_disks", lambda *_: seen)
    monkeypatch.setattr(child, "run", stop)
    monkeypatch.setattr(apply, "erase", erase)
    assembled = Survey(tuple(seen), {UUID: Array(UUID, "md127")})
    with pytest.raises(NodeError, match="erased" if is_same else "changed since it was looked at: ext4"):
        apply._make(disks, assembled, Settings(), Places(dev=tmp_path), lambda: disks)
    assert array.exists() is not is_same, "one whose members are somebody else's by now goes on"
