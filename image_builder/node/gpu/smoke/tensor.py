"""The right answers of the tensor kernels, for one block of threads.

A warp's threads hold the matrices in fragments, as the PTX ISA says under "Matrix Fragments for mma.m8n8k4 with .f16
floating point type", "mma.m16n8k16 with floating point type" and "mma.m16n8k32".
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from operator import mul

from image_builder.node.gpu.smoke import reference
from image_builder.node.gpu.smoke.reference import LANES, Case

WARP = 32
STEPS = 256  # more would not be exact in fp32
Elements = list[list[float]]  # of each register, low to high
Order = tuple[tuple[int, ...], tuple[int, ...]]  # which register stands where, of A and of B
ORDERS_SM70: tuple[Order, ...] = (((0, 1), (0, 1)), ((1, 0), (0, 1)), ((0, 1), (1, 0)), ((1, 0), (1, 0)))
ORDERS_SM80: tuple[Order, ...] = tuple(
    (tuple((register + turn) % 4 for register in range(4)), swapped)
    for swapped in ((0, 1), (1, 0))
    for turn in range(4)
)


def half_operands_sm70(seed: int) -> bytes:
    """Return a thread's four registers of two fp16 numbers each."""
    return _half_operands(seed, 4, 0)


def half_operands(seed: int) -> bytes:
    """Return a thread's six registers of two fp16 numbers each, and 8 bytes of nothing."""
    return _half_operands(seed, 6, 8)


def _half_operands(seed: int, registers: int, padding: int) -> bytes:
    """Return odd whole numbers up to 31 times a power of two of their warp and matrix. B has the last two registers."""
    random = reference.numbers(seed, "half")
    threads, scales = [], [1.0, 1.0]
    for thread in range(LANES):
        if thread % WARP == 0:
            scales = [2.0 ** (next(random) % 9 - 4) for _ in range(2)]
        whole = [next(random) % 32 * 2 - 31 for _ in range(2 * registers)]
        scaled = [number * scales[place >= 2 * (registers - 2)] for place, number in enumerate(whole)]
        threads.append(struct.pack(f"<{2 * registers}e", *scaled) + bytes(padding))
    return b"".join(threads)


def byte_operands(seed: int) -> bytes:
    """Return a thread's six registers of four int8 numbers each, all values alike likely, and 8 bytes of nothing."""
    random = reference.numbers(seed, "byte")
    return b"".join(struct.pack("<3Q", *[next(random) for _ in range(3)]) + bytes(8) for _ in range(LANES))


def half_values_sm70(operands: bytes, steps: int) -> list[int]:
    """Return what kat_mma_f16 of tc_sm70 computes."""
    return _values(_registers(operands, 2, 2, 0, "e"), steps, ORDERS_SM70, _quads, reference.float_bits)


def half_values(operands: bytes, steps: int) -> list[int]:
    """Return what kat_mma_f16 of tc_sm80 computes."""
    return _values(_registers(operands, 4, 2, 8, "e"), steps, ORDERS_SM80, _warp, reference.float_bits)


def byte_values(operands: bytes, steps: int) -> list[int]:
    """Return what kat_mma_s8 computes."""
    registers = _registers(operands, 4, 4, 8, "b")
    return _values(registers, steps, ORDERS_SM80, _warp, lambda total: int(total) & 0xFFFF_FFFF)


def _registers(
    operands: bytes, of_a: int, each: int, padding: int, kind: str
) -> list[tuple[Elements, Elements]]:
    """Return each thread's registers of A, and its two of B, as lists of their elements."""
    pairs = []
    for elements in struct.iter_unpack(f"<{(of_a + 2) * each}{kind}{padding}x", operands):
        split = [list(elements[start : start + each]) for start in range(0, len(elements), each)]
        pairs.append((split[:of_a], split[of_a:]))
    return pairs


Product = Callable[[Sequence[Elements], Sequence[Elements]], list[list[float]]]


def _values(
    threads: Sequence[tuple[Elements, Elements]],
    steps: int,
    orders: Iterable[Order],
    product: Product,
    bits: Callable[[float], int],
) -> list[int]:
    """Return each thread's sums, folded: of each order in turn, ``steps`` times its product."""
    if steps > STEPS:
        raise ValueError(f"sums are exact up to {STEPS} steps")
    sums: list[list[int]] = [[] for _ in threads]
    for start in range(0, len(threads), WARP):
        warp = threads[start : start + WARP]
        for of_a, of_b in orders:
            parts = product([[a[r] for r in of_a] for a, _ in warp], [[b[r] for r in of_b] for _, b in warp])
            for lane, part in enumerate(parts):
                sums[start + lane] += [bits(number * steps) for number in part]
    return [reference.fold(parts) for parts in sums]


def _warp(a: Sequence[Elements], b: Sequence[Elements]) -> list[list[float]]:
    """Return what each thread holds of A (16 rows) times B (8 columns): m16n8k16 of fp16, m16n8k32 of int8."""
    each = len(a[0][0])
    rows = [[0.0] * 8 * each for _ in range(16)]
    columns = [[0.0] * 8 * each for _ in range(8)]
    for lane in range(WARP):
        group, place = divmod(lane, 4)
        for register in range(4):
            at = each * place + 4 * each * (register >> 1)
            rows[group + 8 * (register & 1)][at : at + each] = a[lane][register]
        for register in range(2):
            at = each * place + 4 * each * register
            columns[group][at : at + each] = b[lane][register]
    product = [[sum(map(mul, row, column)) for column in columns] for row in rows]
    return [
        [product[lane // 4 + 8 * (i >> 1)][lane % 4 * 2 + (i & 1)] for i in range(4)] for lane in range(WARP)
    ]


def _quads(a: Sequence[Elements], b: Sequence[Elements]) -> list[list[float]]:
    """Return what each thread holds of the four products of m8n8k4: eight threads make one."""
    products: list[list[list[float]]] = []
    for quad in range(4):
        lanes = [*range(4 * quad, 4 * quad + 4), *range(4 * quad + 16, 4 * quad + 20)]
        rows = [a[lane][0] + a[lane][1] for lane in lanes]
        columns = [b[lane][0] + b[lane][1] for lane in lanes]
        products.append([[sum(map(mul, row, column)) for column in columns] for row in rows])
    return [
        [
            products[lane % 16 // 4][(lane & 1) + (i & 2) + 4 * (lane >= 16)][(i & 4) + (lane & 2) + (i & 1)]
            for i in range(8)
        ]
        for lane in range(WARP)
    ]


_SM70 = (
    Case("kat.mma", "tc_sm70", "kat_mma_f16", STEPS, 256, 16, half_operands_sm70, half_values_sm70, 4 * 2048),
)
_SM80 = (
    Case("kat.mma", "tc_sm80", "kat_mma_f16", STEPS, 256, 32, half_operands, half_values, 8 * 4096),
    Case("kat.mma", "tc_sm80", "kat_mma_s8", STEPS, 256, 32, byte_operands, byte_values, 8 * 8192),
)


def cases(capability: tuple[int, int]) -> tuple[Case, ...]:
    """Return the kernels for a GPU's compute capability; none before Volta."""
    if capability >= (8, 0):
        return _SM80
    return _SM70 if capability >= (7, 0) else ()
