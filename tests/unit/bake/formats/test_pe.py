"""Signed EFI programs, built here byte by byte."""

from __future__ import annotations

import hashlib
import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from image_builder.bake.formats import pe

_PE, _OPTIONAL = 0x80, 0x98
_CHECKSUM, _ENTRY = _OPTIONAL + 64, _OPTIONAL + 112 + 32
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
    return hashlib.sha256(data[:_CHECKSUM] + data[_CHECKSUM + 4 : _ENTRY] + data[_ENTRY + 8 :]).digest()


def sign(data: bytes, *, of: bytes | None = None) -> bytes:
    return b"\x30\x82" + digest_of(of or data)


def test_a_signature_of_these_bytes_counts() -> None:
    plain = build()
    assert not pe.parse(plain).signed
    signed = pe.parse(build(signatures=(b"another", sign(plain))))
    assert signed.signed
    assert len(signed.signatures) == 2
    assert signed.digest == digest_of(plain).hex() == pe.parse(plain).digest


def test_a_signature_of_other_bytes_does_not_count() -> None:
    other = build(b"evil" * 100)
    program = pe.parse(build(signatures=(sign(other),)))
    assert program.signatures
    assert not program.signed


def test_the_checksum_is_no_part_of_the_digest() -> None:
    data = bytearray(build())
    before = pe.parse(bytes(data)).digest
    struct.pack_into("<I", data, _CHECKSUM, 0xDEADBEEF)
    assert pe.parse(bytes(data)).digest == before


def test_shims_certificate_is_found() -> None:
    certificate = b"\x30\x82" + bytes(range(200))
    table = struct.pack("<IIII", len(certificate), 0, 16, 0) + certificate
    program = pe.parse(build(table, section=b".vendor_"))
    with pytest.raises(pe.PeError, match="no section"):
        pe.vendor_certificate(program)
    renamed = pe.Program(program.digest, (), (pe.Section(".vendor_cert", table),))
    assert pe.vendor_certificate(renamed) == certificate


@pytest.mark.parametrize(
    "table", [b"", struct.pack("<IIII", 0, 0, 16, 0), struct.pack("<IIII", 99, 0, 16, 0)]
)
def test_a_shim_without_a_certificate_is_refused(table: bytes) -> None:
    with pytest.raises(pe.PeError):
        pe.vendor_certificate(pe.Program("", (), (pe.Section(".vendor_cert", table),)))


@given(st.integers(0, len(build()) - 1))
def test_a_cut_file_never_does_worse_than_pe_error(length: int) -> None:
    with suppress(pe.PeError):
        pe.parse(build()[:length])


@given(st.binary(max_size=400))
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(pe.PeError):
        pe.parse(b"MZ" + data)
