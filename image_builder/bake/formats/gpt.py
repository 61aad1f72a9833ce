"""GUID partition tables, read and checked (UEFI specification 2.10, chapter 5).

Sectors are 512 bytes. A GUID is stored little-endian in its first three fields.

``sfdisk --verify`` (2.38) is no substitute: it exits 0 whatever the damage, and finds no error in a hybrid MBR, a
damaged backup, partitions outside the usable range or two with the same UUID.
"""

from __future__ import annotations

import binascii
import os
import struct
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

SECTOR = 512
TYPE_ESP = "c12a7328-f81f-11d2-ba4b-00a0c93ec93b"
TYPE_ROOT_X86_64 = "4f68bce3-e8cd-4db1-96e7-fbcaf984b709"

_SIGNATURE = b"EFI PART"
_REVISION = 0x00010000
_HEADER = struct.Struct("<8sIIII QQQQ 16s QIII")
_ENTRY = struct.Struct("<16s16sQQQ72s")
_MAX_ENTRIES = 1024


class GptError(ValueError):
    """The bytes are not a valid partition table; the message says which rule they break."""


@dataclass(frozen=True)
class Partition:
    """One entry. ``start`` and ``size`` are bytes, ``number`` counts from 1, UUIDs are lower case."""

    number: int
    type: str
    uuid: str
    name: str
    start: int
    size: int
    attributes: int = 0


@dataclass(frozen=True)
class Gpt:
    """A partition table. ``size`` is the disk's size in bytes."""

    disk_uuid: str
    size: int
    partitions: tuple[Partition, ...]


@dataclass(frozen=True)
class _Header:
    own_lba: int
    other_lba: int
    first_usable: int
    last_usable: int
    disk_guid: bytes
    entries_lba: int
    entries_count: int
    entry_size: int
    entries_crc: int


def read(disk: BinaryIO) -> Gpt:
    """Read a disk's partition table and check all of it.

    Checked: the protective MBR, both headers and both tables with their CRCs, that the copies agree, that
    the backup is in the disk's last sector, and that partitions are in the usable range and don't overlap.
    Raises GptError.
    """
    size = disk.seek(0, os.SEEK_END)
    if size % SECTOR or size < 68 * SECTOR:
        raise GptError(f"{size} bytes: not a whole number of sectors, or too small for a partition table")
    _check_protective_mbr(_pread(disk, 0, SECTOR), size)
    last = size // SECTOR - 1
    primary = _parse_header(_pread(disk, SECTOR, SECTOR), 1, "primary")
    if primary.other_lba != last:
        raise GptError(f"the backup header is in sector {primary.other_lba}, not in the last one, {last}")
    backup = _parse_header(_pread(disk, last * SECTOR, SECTOR), last, "backup")
    _check_agreement(primary, backup, last)
    table = _read_table(disk, primary, "primary")
    if _read_table(disk, backup, "backup") != table:
        raise GptError("the primary and the backup partition table differ")
    partitions = _parse_table(table, primary)
    _check_partitions(partitions, primary)
    return Gpt(str(uuid.UUID(bytes_le=primary.disk_guid)), size, partitions)


def _pread(disk: BinaryIO, offset: int, length: int) -> bytes:
    disk.seek(offset)
    data = disk.read(length)
    if len(data) != length:
        raise GptError(f"the disk ends at byte {offset + len(data)}, in the middle of the partition table")
    return data


def _check_protective_mbr(sector: bytes, size: int) -> None:
    if sector[510:512] != b"\x55\xaa":
        raise GptError("sector 0 has no boot signature")
    kind, start, length = sector[450], *struct.unpack_from("<II", sector, 454)
    if kind != 0xEE or start != 1:
        raise GptError("the first entry of the MBR is not the protective one")
    if length not in (min(size // SECTOR - 1, 0xFFFFFFFF), 0xFFFFFFFF):
        raise GptError(f"the protective MBR covers {length} sectors, the disk has {size // SECTOR}")


def _parse_header(sector: bytes, lba: int, copy: str) -> _Header:
    fields = _HEADER.unpack_from(sector)
    signature, revision, header_size, crc = fields[:4]
    if signature != _SIGNATURE:
        raise GptError(f"no {copy} header in sector {lba}")
    if revision != _REVISION or not _HEADER.size <= header_size <= SECTOR:
        raise GptError(f"{copy} header: revision {revision:#x} with {header_size} bytes")
    if binascii.crc32(sector[:16] + bytes(4) + sector[20:header_size]) != crc:
        raise GptError(f"{copy} header: wrong CRC")
    header = _Header(*fields[5:])
    if header.own_lba != lba:
        raise GptError(f"{copy} header: claims to be in sector {header.own_lba}, but is in {lba}")
    if header.entry_size < _ENTRY.size or header.entry_size % 8 or header.entries_count > _MAX_ENTRIES:
        raise GptError(f"{copy} header: {header.entries_count} entries of {header.entry_size} bytes")
    return header


def _check_agreement(primary: _Header, backup: _Header, last: int) -> None:
    for name in ("first_usable", "last_usable", "disk_guid", "entries_count", "entry_size", "entries_crc"):
        if getattr(primary, name) != getattr(backup, name):
            raise GptError(f"the primary and the backup header differ in {name}")
    if backup.other_lba != 1:
        raise GptError(f"backup header: claims that the primary one is in sector {backup.other_lba}")
    sectors = -(-primary.entries_count * primary.entry_size // SECTOR)
    if primary.entries_lba < 2 or primary.entries_lba + sectors > primary.first_usable:
        raise GptError("the primary partition table overlaps the usable range")
    if backup.entries_lba <= primary.last_usable or backup.entries_lba + sectors > last:
        raise GptError("the backup partition table overlaps the usable range")


def _read_table(disk: BinaryIO, header: _Header, copy: str) -> bytes:
    table = _pread(disk, header.entries_lba * SECTOR, header.entries_count * header.entry_size)
    if binascii.crc32(table) != header.entries_crc:
        raise GptError(f"{copy} partition table: wrong CRC")
    return table


def _parse_table(table: bytes, header: _Header) -> tuple[Partition, ...]:
    partitions = []
    for index in range(header.entries_count):
        kind, own, first, last, attributes, name = _ENTRY.unpack_from(table, index * header.entry_size)
        if kind == bytes(16):
            continue
        try:
            label = name.decode("utf-16-le").split("\0", 1)[0]
        except UnicodeDecodeError as error:
            raise GptError(f"partition {index + 1}: its name is not UTF-16") from error
        partitions.append(
            Partition(
                number=index + 1,
                type=str(uuid.UUID(bytes_le=kind)),
                uuid=str(uuid.UUID(bytes_le=own)),
                name=label,
                start=first * SECTOR,
                size=(last - first + 1) * SECTOR,
                attributes=attributes,
            )
        )
    return tuple(partitions)


def _check_partitions(partitions: Sequence[Partition], header: _Header) -> None:
    end, before = header.first_usable * SECTOR, 0
    for partition in sorted(partitions, key=lambda p: p.start):
        if partition.size <= 0:
            raise GptError(f"partition {partition.number} ends before it starts")
        if partition.start < end:
            fault = f"overlaps partition {before}" if before else "starts before the usable range"
            raise GptError(f"partition {partition.number} {fault}")
        end, before = partition.start + partition.size, partition.number
    if end > (header.last_usable + 1) * SECTOR:
        raise GptError(f"partition {before} ends after the usable range")
    uuids = [p.uuid for p in partitions]
    if len(set(uuids)) != len(uuids):
        raise GptError("two partitions have the same UUID")
