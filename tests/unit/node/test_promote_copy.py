"""Where a big file gets holes."""

from __future__ import annotations

import random

import pytest

from image_builder.node.promote.copy import BLOCK, extents

_DATA = b"\x01" * BLOCK
_ZERO = bytes(BLOCK)
_ALMOST = bytes(BLOCK - 1) + b"\x01"


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (_DATA, [(0, 4096)]),
        (_ZERO, []),
        (_ALMOST, [(0, 4096)]),
        (_ZERO + _DATA + _DATA + _ZERO, [(4096, 12288)]),
        (_DATA + _ZERO + _DATA, [(0, 4096), (8192, 12288)]),
        (_DATA + _ZERO[:100], [(0, 4096)]),
        (_ZERO + b"\x00\x01", [(4096, 4098)]),
    ],
)
def test_whole_blocks_of_zeros_are_left_out(data: bytes, wanted: list[tuple[int, int]]) -> None:
    assert extents(data) == wanted


def test_what_is_written_at_its_place_is_the_same_file() -> None:
    chance = random.Random(4)
    for _ in range(200):
        blocks = [chance.choice((_DATA, _ZERO, _ALMOST, chance.randbytes(BLOCK))) for _ in range(20)]
        data = b"".join(blocks) + chance.randbytes(chance.randrange(BLOCK))
        found = bytearray(len(data))
        for start, end in extents(data):
            found[start:end] = data[start:end]
            assert data[start:end].strip(b"\0")
        assert bytes(found) == data
