"""Fixed virtual hard disks, as Azure takes them: a raw disk and a footer of 512 bytes.

The layout is Microsoft's "Virtual Hard Disk Image Format Specification" 1.0, all numbers big-endian. Azure
also requires a fixed disk, and a current size that is a whole number of MiB and equals the data's length.
The footer is the one that ``qemu-img convert -O vpc -o subformat=fixed,force_size`` writes, except for the
time and the unique id, which are given here, so that the same disk gives the same bytes.
"""

from __future__ import annotations

import os
import struct
import uuid
from dataclasses import dataclass
from typing import BinaryIO

FOOTER_SIZE = 512
MIB = 1 << 20
EPOCH = 946684800  # 2000-01-01T00:00:00Z in seconds since 1970
MAX_SIZE = 1023 << 30  # Azure's limit for an uploaded operating system disk
FIXED = 2

_FOOTER = struct.Struct(">8sIIQI4sHH4sQQHBBII16sB427x")
_CHECKSUM_AT = 64
_COOKIE = b"conectix"
_RESERVED_FEATURE = 0x00000002
_VERSION = 0x00010000
_NO_OFFSET = 0xFFFFFFFFFFFFFFFF
# `qem2` makes every version of qemu take the size from the footer and not from the geometry. `Wi2k` is the
# host system that Azure expects.
_CREATOR = (b"qem2", 5, 3, b"Wi2k")
_GEOMETRY = (65535, 16, 255)


class VhdError(ValueError):
    """The bytes are not a fixed VHD that Azure takes; the message says which rule they break."""


@dataclass(frozen=True)
class Footer:
    """The contents of a footer. Sizes are bytes, ``timestamp`` is seconds since 1970."""

    current_size: int
    original_size: int
    timestamp: int
    unique_id: uuid.UUID
    creator: str = "qem2"
    geometry: tuple[int, int, int] = _GEOMETRY
    disk_type: int = FIXED


def checksum(footer: bytes) -> int:
    """Return the one's complement of the sum of the footer's bytes, its checksum field taken as zero."""
    summed = sum(footer[:_CHECKSUM_AT]) + sum(footer[_CHECKSUM_AT + 4 : FOOTER_SIZE])
    return ~summed & 0xFFFFFFFF


def build_footer(size: int, timestamp: int, unique_id: uuid.UUID) -> bytes:
    """Return the footer of a disk of ``size`` bytes.

    ``timestamp`` is seconds since 1970; a time before 2000 counts as 2000. Raises VhdError for a size that
    Azure refuses.
    """
    _check_size(size)
    stamp = min(max(timestamp - EPOCH, 0), 0xFFFFFFFF)
    app, major, minor, system = _CREATOR
    head = (_COOKIE, _RESERVED_FEATURE, _VERSION, _NO_OFFSET, stamp, app, major, minor, system)
    footer = _FOOTER.pack(*head, size, size, *_GEOMETRY, FIXED, 0, unique_id.bytes, 0)
    return footer[:_CHECKSUM_AT] + struct.pack(">I", checksum(footer)) + footer[_CHECKSUM_AT + 4 :]


def parse_footer(footer: bytes) -> Footer:
    """Parse a footer; raises VhdError when it isn't the one of a fixed disk."""
    if len(footer) != FOOTER_SIZE:
        raise VhdError(f"a footer has {FOOTER_SIZE} bytes, not {len(footer)}")
    fields = _FOOTER.unpack(footer)
    cookie, features, version, offset, stamp, app, _major, _minor, _system = fields[:9]
    original, current, cylinders, heads, sectors, kind, recorded, unique, saved = fields[9:]
    if cookie != _COOKIE:
        raise VhdError(f"the cookie is {cookie!r}, not {_COOKIE!r}: not a VHD footer")
    if recorded != checksum(footer):
        raise VhdError(f"wrong checksum: {recorded:#010x}, the bytes give {checksum(footer):#010x}")
    if not features & _RESERVED_FEATURE or version != _VERSION:
        raise VhdError(f"features {features:#x}, version {version:#x}: not a version 1.0 footer")
    if kind != FIXED or offset != _NO_OFFSET:
        raise VhdError(f"disk type {kind}: only fixed disks (type {FIXED}) are taken")
    if saved:
        raise VhdError("the disk is in a saved state")
    if any(footer[_FOOTER.size - 427 :]):
        raise VhdError("the reserved bytes are not zero")
    creator = app.decode("ascii", "replace")
    geometry = (cylinders, heads, sectors)
    return Footer(current, original, stamp + EPOCH, uuid.UUID(bytes=unique), creator, geometry, kind)


def read(disk: BinaryIO) -> Footer:
    """Read a VHD's footer and check it against the file; raises VhdError."""
    size = disk.seek(0, os.SEEK_END)
    if size < FOOTER_SIZE:
        raise VhdError(f"{size} bytes: too small for a VHD")
    disk.seek(size - FOOTER_SIZE)
    footer = parse_footer(disk.read(FOOTER_SIZE))
    if footer.current_size != size - FOOTER_SIZE:
        raise VhdError(
            f"the footer declares {footer.current_size} bytes, the file holds {size - FOOTER_SIZE} before it"
        )
    _check_size(footer.current_size)
    return footer


def _check_size(size: int) -> None:
    if size <= 0 or size % MIB:
        raise VhdError(f"{size} bytes: Azure takes whole MiB only")
    if size > MAX_SIZE:
        raise VhdError(f"{size >> 30} GiB: Azure takes {MAX_SIZE >> 30} GiB at most")
