"""Bytes on disks: our UUIDs, superblocks, and the pages that mark unfinished work."""

from __future__ import annotations

import os
import struct
import uuid

from image_builder.node.disk.model import Raid

MIB = 1 << 20
PAGE = 4096
# The namespace: a version 8 UUID (RFC 9562: custom format) that begins with these eight bytes was made by this program.
# The rest is random. So a single superblock, even that of an array's last member, is enough to show that this program
# made it.
_NAMESPACE = bytes.fromhex("6e6f64652d648000")
_VERSION_8 = 0x80
# The first bytes of a disk that is being erased, until the erasure is complete.
_ERASING = b"node-agent: this disk is being erased\n"
# The beginning of a disk's last MiB while a filesystem is being made on it. mkfs.ext4 writes its superblock last: if
# interrupted, it leaves blocks that nothing identifies. Of that MiB it writes only the last 64 KiB.
_MAKING = b"node-agent: a filesystem is being made on this disk\n"
# How much is erased at the beginning: a LUKS2 volume's second header may be at up to 4 MiB (libcryptsetup, luks2.h).
HEAD = 8 * MIB
# linux/raid/md_p.h, version 1.2: 4 KiB from the beginning.
_RAID_OFFSET, _RAID_MAGIC = 4096, 0xA92B4EFC


def new_uuid() -> str:
    """Return a new UUID of ours."""
    octets = bytearray(_NAMESPACE + os.urandom(8))
    octets[6] = _VERSION_8 | octets[6] & 0x0F
    octets[8] = 0x80 | octets[8] & 0x3F
    return str(uuid.UUID(bytes=bytes(octets)))


def is_ours(text: str) -> bool:
    """Return whether a UUID is one of ours, in any notation."""
    try:
        parsed = uuid.UUID(text.replace(":", "").replace("-", ""))
    except ValueError:
        return False
    return parsed.bytes[:8] == _NAMESPACE


def normal(text: str) -> str:
    """Return a UUID in RFC 9562's notation; mdadm writes colons, in other places."""
    return str(uuid.UUID(text.replace(":", "").replace("-", "")))


def erasure(size: int) -> list[tuple[int, bytes]]:
    """Return the writes, as offset and data, that make a disk blank; each must be durable before the next.

    The first marks the disk as being erased; the mark fits in one sector, so it is never half written. The last write
    removes it.
    """
    return [
        (0, _ERASING.ljust(PAGE, b"\0")),
        (max(PAGE, size - MIB), bytes(min(MIB, size - PAGE))),
        (PAGE, bytes(min(HEAD, size) - PAGE)),
        (0, bytes(PAGE)),
    ]


def is_erasing(head: bytes) -> bool:
    return head.startswith(_ERASING)


def making(size: int) -> tuple[int, bytes]:
    """Return the write, as offset and data, that marks a disk as having a filesystem made on it."""
    return max(PAGE, size - MIB), _MAKING.ljust(PAGE, b"\0")


def is_making(tail: bytes) -> bool:
    return tail.startswith(_MAKING)


def raid(head: bytes) -> Raid | None:
    """Return the contents of a RAID member's superblock; None if there is none of version 1.2.

    ``head`` begins with the disk's first byte and is at least 8 KiB long.
    """
    data = head[_RAID_OFFSET : _RAID_OFFSET + PAGE]
    if len(data) < PAGE:
        return None
    magic, major = struct.unpack_from("<II", data, 0)
    if (magic, major) != (_RAID_MAGIC, 1):
        return None
    level, _layout = struct.unpack_from("<iI", data, 72)
    (devices,) = struct.unpack_from("<I", data, 92)
    (number,) = struct.unpack_from("<I", data, 160)
    (most,) = struct.unpack_from("<I", data, 220)
    if number >= most or 256 + 2 * number + 2 > len(data):
        return None
    (role,) = struct.unpack_from("<H", data, 256 + 2 * number)
    name = data[32:64].rstrip(b"\0").decode(errors="replace").rpartition(":")[2]
    return Raid(str(uuid.UUID(bytes=data[16:32])), name, level, devices, role)


def is_superblock_whole(filesystem: str, head: bytes) -> bool:
    """Return whether the superblock in the first 4 KiB of a filesystem has the right checksum.

    xfs: big-endian, its own length at 102, the checksum at 224 (xfs_format.h); ext4: the checksum is the last field,
    written only with the feature metadata_csum (ext4.h).
    """
    if filesystem == "xfs" and head[:4] == b"XFSB" and len(head) >= PAGE:
        (size,) = struct.unpack_from(">H", head, 102)
        block = bytearray(head[: min(size, PAGE)])
        if len(block) < 512:
            return False
        (checksum,) = struct.unpack_from("<I", block, 224)
        block[224:228] = bytes(4)
        return bool(crc32c(bytes(block)) ^ 0xFFFFFFFF == checksum)
    if filesystem == "ext4" and len(head) >= 2048:
        block = bytearray(head[1024:2048])
        (checksum,) = struct.unpack_from("<I", block, 1020)
        return bool(crc32c(bytes(block[:1020])) == checksum)
    return False


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli), before its final inversion."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value
