"""Partition tables: what is read, and that no damage goes unnoticed."""

from __future__ import annotations

import binascii
import io
import struct
import uuid
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from image_builder.bake.formats import gpt

MIB = 1 << 20
SIZE = 8 * MIB
DISK = uuid.UUID("40a4a6b2-d4b0-48b9-9d20-226ca6b985e1")
ESP = gpt.Partition(1, gpt.TYPE_ESP, "5bfa6388-8a05-533a-86d0-0d2bbfc824b5", "esp", MIB, 2 * MIB)
ROOT = gpt.Partition(
    2, gpt.TYPE_ROOT_X86_64, "d5919233-d195-5610-b521-43bd46d0784b", "root", 3 * MIB, 4 * MIB, 1 << 59
)


def _entry(p: gpt.Partition) -> bytes:
    first = p.start // gpt.SECTOR
    last = first + p.size // gpt.SECTOR - 1
    guids = uuid.UUID(p.type).bytes_le + uuid.UUID(p.uuid).bytes_le
    return (
        guids + struct.pack("<QQQ", first, last, p.attributes) + p.name.encode("utf-16-le").ljust(72, b"\0")
    )


def _header(own: int, other: int, entries: int, last_usable: int, table: bytes) -> bytes:
    def pack(crc: int) -> bytes:
        head = struct.pack("<8sIIIIQQQQ", b"EFI PART", 0x10000, 92, crc, 0, own, other, 34, last_usable)
        return head + DISK.bytes_le + struct.pack("<QIII", entries, 128, 128, binascii.crc32(table))

    return pack(binascii.crc32(pack(0))).ljust(gpt.SECTOR, b"\0")


def build(partitions: tuple[gpt.Partition, ...] = (ESP, ROOT), size: int = SIZE) -> bytearray:
    """Build a disk from the specification, independently of the code under test."""
    disk = bytearray(size)
    last = size // gpt.SECTOR - 1
    table = bytearray(128 * 128)
    for p in partitions:
        table[(p.number - 1) * 128 : p.number * 128] = _entry(p)
    disk[446:462] = struct.pack("<B3sB3sII", 0, b"\0\2\0", 0xEE, b"\xff\xff\xff", 1, last)
    disk[510:512] = b"\x55\xaa"
    disk[512:1024] = _header(1, last, 2, last - 33, bytes(table))
    disk[1024 : 1024 + len(table)] = table
    backup = (last - 32) * gpt.SECTOR
    disk[backup : backup + len(table)] = table
    disk[last * gpt.SECTOR :] = _header(last, 1, last - 32, last - 33, bytes(table))
    return disk


def _read(disk: bytes | bytearray) -> gpt.Gpt:
    return gpt.read(io.BytesIO(disk))


def test_a_disk_is_read() -> None:
    assert _read(build()) == gpt.Gpt(str(DISK), SIZE, (ESP, ROOT))


@given(
    st.lists(st.tuples(st.integers(1, 200), st.uuids(version=4)), max_size=20, unique_by=lambda p: p[1]),
    st.text(st.characters(codec="ascii", min_codepoint=33), max_size=36),
)
def test_any_layout_is_read_back(sizes: list[tuple[int, uuid.UUID]], name: str) -> None:
    start, partitions = MIB, []
    for number, (sectors, own) in enumerate(sizes, 1):
        size = sectors * gpt.SECTOR
        partitions.append(gpt.Partition(number, gpt.TYPE_ESP, str(own), name, start, size))
        start += size
    assert _read(build(tuple(partitions), 4 * MIB)).partitions == tuple(partitions)


_META = [*range(446, 462), *range(510, 512), *range(512, 512 + 92), *range(1024, 1024 + 256)]


@given(st.sampled_from(_META), st.integers(1, 255))
def test_no_changed_byte_of_the_table_goes_unnoticed(offset: int, change: int) -> None:
    if 446 <= offset < 450 or 451 <= offset < 454:  # CHS addresses, which are never read
        return
    disk = build(size=8 * MIB)
    disk[offset] ^= change
    with pytest.raises(gpt.GptError):
        _read(disk)


def _zero_backup(disk: bytearray) -> None:
    disk[-gpt.SECTOR :] = bytes(gpt.SECTOR)


def _damage_backup_table(disk: bytearray) -> None:
    disk[-33 * gpt.SECTOR] ^= 1


def _grow(disk: bytearray) -> None:
    disk += bytes(MIB)


def _cut(disk: bytearray) -> None:
    del disk[-MIB:]


def _hybrid(disk: bytearray) -> None:
    disk[450] = 0x0C


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (_zero_backup, "no backup header"),
        (_damage_backup_table, "backup partition table: wrong CRC"),
        (_grow, "protective MBR covers"),
        (_cut, "protective MBR covers"),
        (_hybrid, "not the protective one"),
    ],
)
def test_damage_is_named(damage: Callable[[bytearray], None], what: str) -> None:
    disk = build()
    damage(disk)
    with pytest.raises(gpt.GptError, match=what):
        _read(disk)


@pytest.mark.parametrize(
    ("second", "what"),
    [
        (gpt.Partition(2, gpt.TYPE_ROOT_X86_64, ROOT.uuid, "root", 2 * MIB, MIB), "overlaps partition 1"),
        (gpt.Partition(2, gpt.TYPE_ROOT_X86_64, ROOT.uuid, "root", 7 * MIB, MIB), "ends after"),
        (
            gpt.Partition(2, gpt.TYPE_ROOT_X86_64, ROOT.uuid, "root", 16 * gpt.SECTOR, 8192),
            "before the usable",
        ),
        (gpt.Partition(2, gpt.TYPE_ROOT_X86_64, ESP.uuid, "root", 4 * MIB, MIB), "same UUID"),
    ],
)
def test_partitions_that_can_not_be_are_refused(second: gpt.Partition, what: str) -> None:
    with pytest.raises(gpt.GptError, match=what):
        _read(build((ESP, second)))


def test_what_is_no_disk_is_refused() -> None:
    with pytest.raises(gpt.GptError, match="whole number of sectors"):
        _read(bytes(1000))
    with pytest.raises(gpt.GptError, match="boot signature"):
        _read(bytes(MIB))
