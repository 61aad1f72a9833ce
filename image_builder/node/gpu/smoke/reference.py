"""The right answers of every kernel, computed on the host from integers and IEEE 754, for one block of threads.

No GPU is involved, and no answer depends on the GPU's model: integers are exact, and floating point is
either exact in any order (small whole numbers times a power of two) or a chain whose every rounding IEEE 754 says.
The kernels are ``kernels/*.ptx``; those for tensor cores are in ``tensor``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

LANES = 256  # threads in a block, each with operands of its own
ALL = 0xFFFF_FFFF_FFFF_FFFF
NONE = 0xFFFF_FFFF  # the first wrong round where none was wrong
RECORD = struct.Struct("<QQII")  # checksum, first wrong value, wrong rounds, first wrong round
_LOW = 0xFFFF_FFFF
_GOLDEN = 0x9E37_79B9_7F4A_7C15  # 2^64 / the golden ratio, odd
_BASIS, _PRIME = 0xCBF2_9CE4_8422_2325, 0x0100_0000_01B3  # FNV-1a's


@dataclass(frozen=True)
class Case:
    """One kernel with a known answer.

    ``id`` is the measurement that it belongs to. ``operands`` gives ``operand_bytes`` for each thread of a block, from
    a seed; ``values`` what each thread must compute from them in one round of ``steps``. A launch makes ``rounds``
    of them: some 10 ms on a big GPU. ``operations`` are what one warp multiplies and adds in one step, where the
    kernel's rate is of interest.
    """

    id: str
    module: str
    kernel: str
    steps: int
    rounds: int
    operand_bytes: int
    operands: Callable[[int], bytes]
    values: Callable[[bytes, int], list[int]]
    operations: int = 0


def numbers(seed: int, purpose: str) -> Iterator[int]:
    """Yield 64-bit numbers for a seed: splitmix64, the same on every Python."""
    state = (seed * _GOLDEN + int.from_bytes(purpose.encode()[:8].ljust(8), "little")) & ALL
    while True:
        state = (state + _GOLDEN) & ALL
        mixed = ((state ^ state >> 30) * 0xBF58_476D_1CE4_E5B9) & ALL
        mixed = ((mixed ^ mixed >> 27) * 0x94D0_49BB_1331_11EB) & ALL
        yield mixed ^ mixed >> 31


def fold(values: Sequence[int]) -> int:
    """Return several results as one 64-bit value. Each step is one-to-one: a difference in one can't vanish."""
    value = _BASIS
    for word in values:
        value = (value ^ word) * _PRIME & ALL
    return value


def records(values: Sequence[int], rounds: int) -> bytes:
    """Return what a block without an error writes: a RECORD for each thread."""
    factor = 0
    for _ in range(rounds):
        factor = (factor * _PRIME + 1) & ALL
    return b"".join(RECORD.pack(value * factor & ALL, 0, 0, NONE) for value in values)


def float_bits(value: float) -> int:
    """Return the bits of a number as fp32, rounded to nearest even."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def double_bits(value: float) -> int:
    """Return the bits of a number as fp64."""
    return int(struct.unpack("<Q", struct.pack("<d", value))[0])


# -- integers --------------------------------------------------------------------------------------------------


def int_operands(seed: int) -> bytes:
    """Return lo, hi, key, 0 of each thread: all-zero, all-one and alternating bits, one walking bit, then random."""
    random = numbers(seed, "int")
    starts = [(0, 0), (_LOW, _LOW), (0xAAAA_AAAA, 0x5555_5555), (0x5555_5555, 0xAAAA_AAAA)]
    starts += [(1 << bit & _LOW, 1 << bit >> 32) for bit in range(64)]
    while len(starts) < LANES:
        word = next(random)
        starts.append((word & _LOW, word >> 32))
    return b"".join(struct.pack("<4I", lo, hi, next(random) & _LOW, 0) for lo, hi in starts)


def int_values(operands: bytes, steps: int) -> list[int]:
    """Return what kat_int computes: ``steps`` Feistel steps."""
    results = []
    for start_lo, start_hi, start_key, _ in struct.iter_unpack("<4I", operands):
        lo, hi, key = start_lo, start_hi, start_key
        for _ in range(steps):
            mixed = (lo * 0x9E37_79B1 + hi ^ lo * 0x85EB_CA77 >> 32) & _LOW
            mixed = (mixed << 13 | mixed >> 19) & _LOW
            mixed = (mixed + lo.bit_count() & _LOW) ^ lo ^ key
            key = (key << 1 | key >> 31) & _LOW
            lo, hi = mixed, lo
        results.append(hi << 32 | lo)
    return results


# -- floating point, exact -------------------------------------------------------------------------------------


def ffma_operands(seed: int) -> bytes:
    """Return the state and the scales of a and b of each thread; the scales are powers of two."""
    random = numbers(seed, "ffma")
    return b"".join(
        struct.pack("<IffI", next(random) & _LOW, *_scales(next(random), 30), 0) for _ in range(LANES)
    )


def _scales(number: int, limit: int) -> tuple[float, float]:
    return 2.0 ** (number % (2 * limit + 1) - limit), 2.0 ** ((number >> 32) % (2 * limit + 1) - limit)


def ffma_values(operands: bytes, steps: int) -> list[int]:
    """Return what kat_ffma computes. Raises ValueError where its sums wouldn't be exact."""
    if steps > 64:
        raise ValueError("kat_ffma is exact up to 64 steps")
    results = []
    for start, a_scale, b_scale, _ in struct.iter_unpack("<IffI", operands):
        state, pairs = start, []
        for _ in range(steps):
            state = (state * 1664525 + 1013904223) & _LOW
            pairs.append((_signed(state >> 20, 11), _signed(state >> 12, 8)))
        results.append(fold([float_bits(total * a_scale * b_scale) for total in _sums(pairs)]))
    return results


def dfma_operands(seed: int) -> bytes:
    """Return the state and the scales of a and b of each thread; the scales are powers of two."""
    random = numbers(seed, "dfma")
    return b"".join(struct.pack("<QddQ", next(random), *_scales(next(random), 200), 0) for _ in range(LANES))


def dfma_values(operands: bytes, steps: int) -> list[int]:
    """Return what kat_dfma computes. Raises ValueError where its sums wouldn't be exact."""
    if steps > 128:
        raise ValueError("kat_dfma is exact up to 128 steps")
    results = []
    for start, a_scale, b_scale, _ in struct.iter_unpack("<QddQ", operands):
        state, pairs = start, []
        for _ in range(steps):
            state = (state * 0x5851_F42D_4C95_7F2D + 0x1405_7B7E_F767_814F) & ALL
            pairs.append((_signed(state >> 40, 24), _signed(state >> 16, 22)))
        results.append(fold([double_bits(total * a_scale * b_scale) for total in _sums(pairs)]))
    return results


def _signed(number: int, bits: int) -> int:
    number &= (1 << bits) - 1
    return number - (1 << bits) if number >> bits - 1 else number


def _sums(pairs: Sequence[tuple[int, int]]) -> tuple[int, int, int, int]:
    """Return the four sums of the FMA kernels: of a*b, of -a*b, of a and the b before, of b and the a before."""
    straight = sum(a * b for a, b in pairs)
    back = sum(pairs[n][0] * pairs[n - 1][1] for n in range(1, len(pairs)))
    ahead = sum(pairs[n - 1][0] * pairs[n][1] for n in range(1, len(pairs)))
    return straight, -straight, back, ahead


# -- floating point, rounded -----------------------------------------------------------------------------------


def det_operands(seed: int) -> bytes:
    """Return x between 0 and 1, and the map's parameter between 3.7 and 3.99, of each thread."""
    random = numbers(seed, "det")
    return b"".join(
        struct.pack("<ff", 0.1 + 0.8 * (next(random) / 2**64), 3.7 + 0.29 * (next(random) / 2**64))
        for _ in range(LANES)
    )


def det_values(operands: bytes, steps: int) -> list[int]:
    """Return what det_fp32 computes: the logistic map, each step rounded twice as IEEE 754 says."""
    results = []
    for start, parameter in struct.iter_unpack("<ff", operands):
        x = start
        for _ in range(steps):
            product = _round(parameter * x)  # 24 by 24 bits: exact before it is rounded
            x = _fma(-product, x, product)
        results.append(fold([float_bits(x)]))
    return results


def _round(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def _fma(a: float, b: float, c: float) -> float:
    """Return a * b + c of three fp32 numbers, rounded once to fp32.

    The product is exact in fp64; the sum is rounded to odd there, after which rounding to fp32 is as if it were the
    first (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
    """
    product = a * b
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    if error and not double_bits(total) & 1:
        total = math.nextafter(total, math.inf if error > 0 else -math.inf)
    return _round(total)


# -- memory ----------------------------------------------------------------------------------------------------


def pattern(index: int, seed: int, *, flip: int = 0, mask: int = ALL) -> int:
    """Return the word at an index of the memory test."""
    mixed = ((index & mask) + seed) * _GOLDEN & ALL
    return mixed ^ mixed >> 32 ^ flip


def pattern_bytes(count: int, seed: int) -> bytes:
    """Return the first words of the memory test's pattern."""
    return struct.pack(f"<{count}Q", *[pattern(index, seed) for index in range(count)])


CASES = (
    Case("kat.int", "base", "kat_int", 1024, 64, 16, int_operands, int_values),
    Case("kat.ffma", "base", "kat_ffma", 64, 512, 16, ffma_operands, ffma_values),
    Case("kat.dfma", "base", "kat_dfma", 64, 512, 32, dfma_operands, dfma_values),
    Case("det.fp32", "base", "det_fp32", 512, 128, 8, det_operands, det_values),
)
