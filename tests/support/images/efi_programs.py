"""Signed EFI programs, built byte by byte."""

from __future__ import annotations

import hashlib
import struct

_PE, _OPTIONAL = 0x80, 0x98
CHECKSUM, _ENTRY = _OPTIONAL + 64, _OPTIONAL + 112 + 32
_TABLE = _OPTIONAL + 240


def build(
    body: bytes = b"code" * 100, signatures: tuple[bytes, ...] = (), section: bytes = b".text"
) -> bytes:
    """Return a PE32+ file with one section."""
    start = 0x200
    data = bytearray(start)
    data[:2] = b"MZ"
    struct.pack_into("<I", data, 0x3C, _PE)
    struct.pack_into("<4sHHIIIHH", data, _PE, b"PE\0\0", 0x8664, 1, 0, 0, 0, 240, 0)
    struct.pack_into("<H", data, _OPTIONAL, 0x20B)
    # The fields that sbsign relies on: alignments, sizes of image and headers, number of directories.
    struct.pack_into("<II", data, _OPTIONAL + 32, 0x1000, start)
    struct.pack_into("<II", data, _OPTIONAL + 56, 0x2000, start)
    struct.pack_into("<I", data, _OPTIONAL + 108, 16)
    struct.pack_into("<8sIIII", data, _TABLE, section, len(body), 0x1000, len(body), start)
    data += body + bytes(-len(body) % 8)
    table = b"".join(struct.pack("<IHH", 8 + len(s), 0x200, 2) + s + bytes(-len(s) % 8) for s in signatures)
    if table:
        struct.pack_into("<II", data, _ENTRY, len(data), len(table))
    return bytes(data) + table


def digest_of(data: bytes) -> bytes:
    """Return the Authenticode digest of an unsigned file, computed from its definition."""
    return hashlib.sha256(data[:CHECKSUM] + data[CHECKSUM + 4 : _ENTRY] + data[_ENTRY + 8 :]).digest()


def sign(data: bytes, *, of: bytes | None = None) -> bytes:
    return b"\x30\x82" + digest_of(of or data)
