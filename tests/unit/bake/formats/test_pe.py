"""Signed EFI programs: their sections, their signatures, and the digest that these are of."""

from __future__ import annotations

import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from image_builder.bake.formats import pe
from tests.support.images.efi_programs import CHECKSUM, build, digest_of, sign


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
    struct.pack_into("<I", data, CHECKSUM, 0xDEADBEEF)
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
