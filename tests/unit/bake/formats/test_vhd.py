"""Fixed VHDs: the footer's bytes, and every way in which a footer can be wrong."""

from __future__ import annotations

import io
import struct
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from image_builder.bake.formats import vhd

# Written by `qemu-img convert -O vpc -o subformat=fixed,force_size` (10.0.13) for a disk of 30 GiB.
GOLDEN = bytes.fromhex(
    "636f6e6563746978" "00000002" "00010000" "ffffffffffffffff" "329427c7" "71656d32" "00050003" "5769326b"
    "0000000780000000" "0000000780000000" "ffff10ff" "00000002" "ffffe3a5" "c9d1d7d44bef45728726312546d48282"
) + bytes(428)  # fmt: skip
UNIQUE = uuid.UUID("c9d1d7d4-4bef-4572-8726-312546d48282")
EPOCH = 1795255111
SIZE = 30 << 30


def _file(size: int = 2 * vhd.MIB, footer: bytes | None = None) -> io.BytesIO:
    return io.BytesIO(bytes(size) + (footer or vhd.build_footer(size, EPOCH, UNIQUE)))


def _patched(footer: bytes, offset: int, data: bytes) -> bytes:
    """Change a footer and correct its checksum."""
    changed = footer[:offset] + data + footer[offset + len(data) :]
    return changed[:64] + struct.pack(">I", vhd.checksum(changed)) + changed[68:]


def test_the_footer_is_the_one_that_qemu_writes() -> None:
    assert vhd.build_footer(SIZE, EPOCH, UNIQUE).hex() == GOLDEN.hex()
    assert vhd.parse_footer(GOLDEN) == vhd.Footer(SIZE, SIZE, EPOCH, UNIQUE)


@given(st.integers(1, vhd.MAX_SIZE // vhd.MIB), st.integers(vhd.EPOCH, vhd.EPOCH + 2**32 - 1), st.uuids())
def test_a_footer_says_what_it_was_built_from(mib: int, epoch: int, unique: uuid.UUID) -> None:
    footer = vhd.build_footer(mib * vhd.MIB, epoch, unique)
    assert len(footer) == vhd.FOOTER_SIZE
    assert vhd.parse_footer(footer) == vhd.Footer(mib * vhd.MIB, mib * vhd.MIB, epoch, unique)


@given(st.integers(0, vhd.FOOTER_SIZE - 1), st.integers(1, 255))
def test_no_changed_byte_goes_unnoticed(offset: int, change: int) -> None:
    footer = bytearray(GOLDEN)
    footer[offset] ^= change
    with pytest.raises(vhd.VhdError):
        vhd.parse_footer(bytes(footer))


@given(st.binary(max_size=1024))
def test_no_bytes_are_mistaken_for_a_footer(data: bytes) -> None:
    with pytest.raises(vhd.VhdError):
        vhd.parse_footer(data)


def test_a_time_before_2000_counts_as_2000() -> None:
    assert vhd.parse_footer(vhd.build_footer(SIZE, 0, UNIQUE)).timestamp == vhd.EPOCH


@pytest.mark.parametrize("size", [0, -vhd.MIB, vhd.MIB + 512, 3 * vhd.MIB - 1, vhd.MAX_SIZE + vhd.MIB])
def test_sizes_that_azure_refuses_are_refused(size: int) -> None:
    with pytest.raises(vhd.VhdError):
        vhd.build_footer(size, EPOCH, UNIQUE)


@pytest.mark.parametrize(
    ("offset", "data", "what"),
    [
        (0, b"cxsparse", "cookie"),
        (8, struct.pack(">I", 0), "features"),
        (12, struct.pack(">I", 0x00020000), "version"),
        (16, struct.pack(">Q", 512), "disk type"),
        (60, struct.pack(">I", 3), "disk type 3"),
        (84, b"\x01", "saved state"),
        (85, b"\x01", "reserved"),
        (511, b"\x01", "reserved"),
    ],
)
def test_a_footer_with_a_right_checksum_can_still_be_wrong(offset: int, data: bytes, what: str) -> None:
    with pytest.raises(vhd.VhdError, match=what):
        vhd.parse_footer(_patched(GOLDEN, offset, data))


def test_a_whole_file_is_read() -> None:
    assert vhd.read(_file()).current_size == 2 * vhd.MIB


@pytest.mark.parametrize("size", [vhd.MIB, 3 * vhd.MIB], ids=["longer", "shorter"])
def test_a_file_of_another_length_than_its_footer_says_is_refused(size: int) -> None:
    with pytest.raises(vhd.VhdError, match="the file holds"):
        vhd.read(_file(footer=vhd.build_footer(size, EPOCH, UNIQUE)))


def test_a_file_that_is_not_whole_mib_is_refused() -> None:
    size = 2 * vhd.MIB + 4096
    footer = _patched(GOLDEN, 40, struct.pack(">QQ", size, size))
    with pytest.raises(vhd.VhdError, match="whole MiB"):
        vhd.read(_file(size, footer))


def test_a_raw_disk_and_a_scrap_are_no_vhd() -> None:
    with pytest.raises(vhd.VhdError, match="cookie"):
        vhd.read(io.BytesIO(bytes(vhd.MIB)))
    with pytest.raises(vhd.VhdError, match="too small"):
        vhd.read(io.BytesIO(b"conectix"))
