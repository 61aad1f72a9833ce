"""A disk as Azure delivers it: one NTFS volume with a readme that says that data on it will be lost.

On a disk larger than 2 TB the partition table is a GPT, with Microsoft's reserved partition before the volume
(cloud-init's DataSourceAzure, LP: #1686514).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal
from uuid import UUID

from image_builder.node.disk import ntfs
from image_builder.node.disk.model import Observation

Content = Literal["", "blank", "files", "unreadable"]

README = "dataloss_warning_readme.txt"
# Windows creates it on every volume; only the system may write there. cloud-init ignores it, too.
_SYSTEM_FOLDER = "system volume information"
_SECTOR = 512
_MBR_NTFS, _MBR_GPT = 0x07, 0xEE
_RESERVED = UUID("e3c9e316-0b5c-4db8-817d-f92df00215ae")
_BASIC_DATA = UUID("ebd0a0a2-b9e5-4433-87c0-68b6b72699c7")
_ENTRY_BYTES, _MOST_ENTRIES = 128, 128
# Partition tables as wipefs names them.
_TABLES = (frozenset({"dos"}), frozenset({"gpt"}), frozenset({"gpt", "PMBR"}))


@dataclass(frozen=True)
class Partition:
    """A partition, in bytes. ``is_reserved``: Microsoft's reserved partition, which holds nothing."""

    offset: int
    bytes: int
    is_reserved: bool = False


def may_be(observation: Observation) -> bool:
    """Return whether a disk is worth a look: local, with a partition table and nothing else, and not in use."""
    kinds = frozenset(word.type for word in observation.signatures)
    return (
        observation.disk.local
        and kinds in _TABLES
        and len(observation.partitions) <= 2
        and not observation.mounts
        and not observation.holders
        and not observation.swap
    )


def content(read: ntfs.Read, observation: Observation) -> Content:
    """Return what is on a disk: nothing (``blank``), ``files``, ``unreadable``; empty if it isn't one of Azure's.

    ``read`` takes offsets from the disk's first byte. Raises OSError if it fails.
    """
    table = partitions(read, observation.disk.bytes)
    volumes = [partition for partition in table if not partition.is_reserved]
    # A kernel that doesn't read partition tables shows no partitions.
    if len(volumes) != 1 or len(observation.partitions) not in (0, len(table)):
        return ""
    volume = volumes[0]
    if read(volume.offset, 11)[3:] != b"NTFS    ":
        return ""
    try:
        entries = ntfs.root(lambda offset, count: read(volume.offset + offset, count), volume.bytes)
    except ntfs.UnreadableError:
        return "unreadable"
    return "blank" if is_blank(entries) else "files"


def is_blank(entries: Iterable[ntfs.Entry]) -> bool:
    """Return whether a root directory contains Azure's readme, and nothing else that anybody could want."""
    plain = [entry for entry in entries if not entry.is_metafile]
    named = {entry.record for entry in plain if not entry.is_dos_name}
    names = [entry for entry in plain if not (entry.is_dos_name and entry.record in named)]
    files = [entry.name.lower() for entry in names if not entry.is_directory and not entry.is_link]
    others = [entry.name.lower() for entry in names if entry.is_directory or entry.is_link]
    linked = any(entry.is_link for entry in names)
    return files == [README] and others in ([], [_SYSTEM_FOLDER]) and not linked


def partitions(read: ntfs.Read, size: int) -> list[Partition]:
    """Return the partitions of a disk of ``size`` bytes if they look like Azure's, else none. Raises OSError."""
    first = read(0, _SECTOR)
    if first[510:] != b"\x55\xaa":
        return []
    entries = [struct.unpack_from("<4xB3xII", first, 446 + 16 * n) for n in range(4)]
    used = [entry for entry in entries if entry != (0, 0, 0)]
    if len(used) != 1:
        return []
    kind, start, count = used[0]
    if kind == _MBR_NTFS:
        return _within([Partition(start * _SECTOR, count * _SECTOR)], size)
    return _within(_gpt(read, size), size) if kind == _MBR_GPT else []


def _gpt(read: ntfs.Read, size: int) -> list[Partition]:
    header = read(_SECTOR, 92)
    magic, _revision, length, crc = struct.unpack_from("<8sIII", header, 0)
    here, _other = struct.unpack_from("<QQ", header, 24)
    at, count, width, sum_of_entries = struct.unpack_from("<QIII", header, 72)
    plain = header[:16] + bytes(4) + header[20:]
    if (magic, length, here, width) != (b"EFI PART", 92, 1, _ENTRY_BYTES) or zlib.crc32(plain) != crc:
        return []
    if not 0 < count <= _MOST_ENTRIES or (at * _SECTOR + count * _ENTRY_BYTES) > size:
        return []
    raw = read(at * _SECTOR, count * _ENTRY_BYTES)
    if zlib.crc32(raw) != sum_of_entries:
        return []
    partitions = []
    for n in range(count):
        entry = raw[n * _ENTRY_BYTES : (n + 1) * _ENTRY_BYTES]
        kind = UUID(bytes_le=entry[:16])
        if kind.int == 0:
            continue
        if kind not in (_RESERVED, _BASIC_DATA):
            return []
        start, end = struct.unpack_from("<QQ", entry, 32)
        partitions.append(Partition(start * _SECTOR, (end - start + 1) * _SECTOR, kind == _RESERVED))
    return partitions


def _within(partitions: list[Partition], size: int) -> list[Partition]:
    """Return a single volume, or one after the reserved partition; none if they overlap or exceed the disk."""
    ordered = sorted(partitions, key=lambda partition: partition.offset)
    if [partition.is_reserved for partition in ordered] not in ([False], [True, False]):
        return []
    end = _SECTOR
    for partition in ordered:
        if partition.offset < end or partition.bytes <= 0 or partition.offset + partition.bytes > size:
            return []
        end = partition.offset + partition.bytes
    return ordered
