"""The semantics of ``mma.sync``: matrices are assembled from the fragments that the threads of a warp hold,
multiplied, and split up again, by the formulas in the PTX ISA under "Matrix Fragments for mma.…".

Written only from those formulas, with exact fractions: it uses nothing of the program's own reference.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from fractions import Fraction

Matrix = dict[tuple[int, int], Fraction]
Place = Callable[[int, int], tuple[int, int]]  # lane, number of the element -> row, column


_HALVES = "sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
_BYTES = "sync.aligned.m16n8k32.row.col.s32.s8.s8.s32"
_QUADS = "sync.aligned.m8n8k4.row.col.f32.f16.f16.f32"
SHAPES = (_HALVES, _BYTES, _QUADS)


def multiply(shape: str, lanes: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
    """Return each lane's registers of D = A * B + C. ``lanes`` has each lane's registers of A, B and C.

    Raises ValueError for an instruction that isn't one of SHAPES, or a sum that its type can't hold.
    """
    if shape == _HALVES:
        return _one(lanes, 16, "e", (_a_16, _b_16), "f")
    if shape == _BYTES:
        return _one(lanes, 32, "b", (_a_32, _b_32), "i")
    if shape == _QUADS:
        return _four(lanes)
    raise ValueError(f"mma.{shape}")


def _elements(registers: Sequence[int], kind: str) -> list[Fraction]:
    """Return the elements in 32-bit registers, low to high."""
    data = struct.pack(f"<{len(registers)}I", *registers)
    return [Fraction(value) for (value,) in struct.iter_unpack(f"<{kind}", data)]


def _bits(value: Fraction, kind: str) -> int:
    """Return a sum's bits. It must be exact: these kernels' operands ensure that, on every GPU."""
    packed = struct.pack(f"<{kind}", float(value) if kind == "f" else int(value))
    if Fraction(struct.unpack(f"<{kind}", packed)[0]) != value:
        raise ValueError(f"{value} is not exact")
    return int.from_bytes(packed, "little")


def _one(
    lanes: Sequence[Sequence[Sequence[int]]], depth: int, kind: str, places: tuple[Place, Place], sums: str
) -> list[list[int]]:
    a, b, c = (_gather(lanes, operand, code, place) for operand, code, place in
               zip(range(3), (kind, kind, sums), (*places, _c_16), strict=True))  # fmt: skip
    product = _product(a, b, c, 16, 8, depth)
    return [[_bits(product[_c_16(lane, i)], sums) for i in range(4)] for lane in range(32)]


def _gather(lanes: Sequence[Sequence[Sequence[int]]], operand: int, kind: str, place: Place) -> Matrix:
    matrix: Matrix = {}
    for lane, groups in enumerate(lanes):
        for number, value in enumerate(_elements(groups[operand], kind)):
            where = place(lane, number)
            if where in matrix:
                raise ValueError(f"two threads hold element {where}")
            matrix[where] = value
    return matrix


def _product(a: Matrix, b: Matrix, c: Matrix, rows: int, columns: int, depth: int) -> Matrix:
    return {
        (row, column): c[row, column] + sum(a[row, k] * b[k, column] for k in range(depth))
        for row in range(rows)
        for column in range(columns)
    }


def _a_16(lane: int, i: int) -> tuple[int, int]:
    group, in_group = lane >> 2, lane % 4
    row = group if 0 <= i < 2 or 4 <= i < 6 else group + 8
    return row, in_group * 2 + (i & 1) + (8 if i >= 4 else 0)


def _b_16(lane: int, i: int) -> tuple[int, int]:
    group, in_group = lane >> 2, lane % 4
    return in_group * 2 + (i & 1) + (8 if i >= 2 else 0), group


def _a_32(lane: int, i: int) -> tuple[int, int]:
    group, in_group = lane >> 2, lane % 4
    row = group if 0 <= i < 4 or 8 <= i < 12 else group + 8
    return row, in_group * 4 + (i & 3) + (16 if i >= 8 else 0)


def _b_32(lane: int, i: int) -> tuple[int, int]:
    group, in_group = lane >> 2, lane % 4
    return in_group * 4 + (i & 3) + (16 if i >= 4 else 0), group


def _c_16(lane: int, i: int) -> tuple[int, int]:
    group, in_group = lane >> 2, lane % 4
    return (group if i < 2 else group + 8), in_group * 2 + (i & 1)


def _four(lanes: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
    """Return the result of m8n8k4: four computations, each by a quad in lanes 0 to 15 and the quad 16 lanes above."""
    answers: list[list[int]] = [[] for _ in range(32)]
    for computation in range(4):
        members = [lane for lane in range(32) if lane % 16 // 4 == computation]
        a, b, c = Matrix(), Matrix(), Matrix()
        for lane in members:
            high = 0 if lane < 16 else 4
            of_a, of_b = (_elements(lanes[lane][operand], "e") for operand in range(2))
            for i in range(4):
                a[lane % 4 + high, i] = of_a[i]
                b[i, lane % 4 + high] = of_b[i]
            for i, value in enumerate(_elements(lanes[lane][2], "f")):
                c[_c_8(lane, i)] = value
        product = _product(a, b, c, 8, 8, 4)
        for lane in members:
            answers[lane] = [_bits(product[_c_8(lane, i)], "f") for i in range(8)]
    return answers


def _c_8(lane: int, i: int) -> tuple[int, int]:
    x = (lane & 0b1) + (i & 0b10)
    return (x if lane < 16 else x + 4), (i & 0b100) + (lane & 0b10) + (i & 0b1)
