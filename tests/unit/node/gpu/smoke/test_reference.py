"""The reference against plain formulas written another way, and what makes its answers good ones."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import struct
from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from image_builder.node.gpu.smoke import reference, tensor
from image_builder.node.gpu.smoke.reference import ALL, LANES
from tests.support.gpu_stand_in import fragments, ptx

LOW = 2**32 - 1


def _inverse(lo: int, hi: int, key: int, steps: int) -> tuple[int, int]:
    """Undo the integer chain, from its end."""
    for step in reversed(range(steps)):
        turn = step % 32
        now = (key << turn | key >> 32 - turn) & LOW if turn else key
        before_lo = hi
        mixed = lo ^ before_lo ^ now
        mixed = (mixed - before_lo.bit_count()) % 2**32
        mixed = (mixed >> 13 | mixed << 19) & LOW
        mixed ^= before_lo * 0x85EBCA77 // 2**32
        lo, hi = before_lo, (mixed - before_lo * 0x9E3779B1) % 2**32
    return lo, hi


def test_the_integer_chain_can_be_undone_so_no_error_vanishes() -> None:
    operands = reference.int_operands(3)
    values = reference.int_values(operands, 100)
    for (lo, hi, key, _), value in zip(struct.iter_unpack("<4I", operands), values, strict=True):
        assert _inverse(value & LOW, value >> 32, key, 100) == (lo, hi)


def test_every_operand_bit_of_the_integer_chain_is_set_and_clear_somewhere() -> None:
    starts = [(lo, hi) for lo, hi, _, _ in struct.iter_unpack("<4I", reference.int_operands(0))]
    assert {(0, 0), (LOW, LOW), (0xAAAAAAAA, 0x55555555), (0x55555555, 0xAAAAAAAA)} <= set(starts)
    assert {hi << 32 | lo for lo, hi in starts} >= {1 << bit for bit in range(64)}


@dataclass
class _Rounding:
    """Sums as the hardware computes them: each FMA rounded, in the kernel's order."""

    size: int

    def sums(self, pairs: list[tuple[float, float]]) -> list[int]:
        totals = [0.0] * 4
        before = (0.0, 0.0)
        for a, b in pairs:
            factors = [(a, b), (-a, b), (a, before[1]), (before[0], b)]
            totals = [
                ptx.to_float(ptx.fused(x, y, total, self.size), self.size)
                for (x, y), total in zip(factors, totals, strict=True)
            ]
            before = (a, b)
        return [ptx.from_float(total, self.size) for total in totals]


def test_fp32_sums_are_the_same_rounded_after_each_step() -> None:
    operands = reference.ffma_operands(4)
    values = reference.ffma_values(operands, 64)
    for (start, a_scale, b_scale, _), value in itertools.islice(
        zip(struct.iter_unpack("<IffI", operands), values, strict=True), 12
    ):
        state, pairs = start, []
        for _ in range(64):
            state = (1664525 * state + 1013904223) % 2**32
            a, b = (state >> 20) % 2**11, (state >> 12) % 2**8
            pairs.append(((a - 2**11 * (a >= 2**10)) * a_scale, (b - 2**8 * (b >= 2**7)) * b_scale))
        assert reference.fold(_Rounding(32).sums(pairs)) == value


def test_fp64_sums_are_the_same_rounded_after_each_step() -> None:
    operands = reference.dfma_operands(4)
    values = reference.dfma_values(operands, 64)
    for (start, a_scale, b_scale, _), value in itertools.islice(
        zip(struct.iter_unpack("<QddQ", operands), values, strict=True), 12
    ):
        state, pairs = start, []
        for _ in range(64):
            state = (6364136223846793005 * state + 1442695040888963407) % 2**64
            a, b = (state >> 40) % 2**24, (state >> 16) % 2**22
            pairs.append(((a - 2**24 * (a >= 2**23)) * a_scale, (b - 2**22 * (b >= 2**21)) * b_scale))
        assert reference.fold(_Rounding(64).sums(pairs)) == value


@pytest.mark.parametrize(("values", "steps"), [(reference.ffma_values, 65), (reference.dfma_values, 129)])
def test_more_steps_than_are_exact_are_refused(values: object, steps: int) -> None:
    assert callable(values)
    with pytest.raises(ValueError, match="is exact up to"):
        values(b"", steps)
    with pytest.raises(ValueError, match="exact up to 256"):
        tensor.half_values(bytes(32 * 256), 257)


def test_the_worst_sums_are_still_exact() -> None:
    assert 64 * 2**10 * 2**7 < 2**24
    assert 128 * 2**23 * 2**21 < 2**53
    assert tensor.STEPS * 16 * 31 * 31 < 2**22
    assert tensor.STEPS * 32 * 128 * 128 < 2**31


def test_the_logistic_map_is_rounded_as_exact_fractions_say() -> None:
    operands = reference.det_operands(9)[: 6 * 8]
    values = reference.det_values(operands, 300)
    for (start, parameter), value in zip(struct.iter_unpack("<ff", operands), values, strict=True):
        bits = ptx.from_float(start, 32)
        for _ in range(300):
            x = ptx.to_float(bits, 32)
            product = ptx.to_float(ptx.rounded(Fraction(parameter) * Fraction(x), 32), 32)
            bits = ptx.fused(-product, x, product, 32)
        assert reference.fold([bits]) == value
        assert 0 < ptx.to_float(bits, 32) < 1


_FLOATS = st.floats(min_value=2.0**-20, max_value=2.0**20, width=32) | st.floats(
    min_value=-(2.0**20), max_value=-(2.0**-20), width=32
)


@settings(max_examples=300, deadline=None)
@given(_FLOATS, _FLOATS, _FLOATS)
def test_the_fused_multiply_add_is_rounded_once(a: float, b: float, c: float) -> None:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    result = reference._fma(a, b, c)
    assert reference.float_bits(result) == (ptx.rounded(exact, 32) if exact else reference.float_bits(0.0))


def test_a_sum_that_rounding_twice_gets_wrong_is_right() -> None:
    # 1 + 2^-24 is halfway between two fp32 numbers. What is beyond it decides, and fp64 drops that.
    a = b = 1.0 + 2.0**-23
    c = 2.0**-24 - 2.0**-22 - 2.0**-46 + 2.0**-47
    c32 = struct.unpack("<f", struct.pack("<f", c))[0]
    exact = Fraction(a) * Fraction(b) + Fraction(c32)
    assert reference.float_bits(reference._fma(a, b, c32)) == ptx.rounded(exact, 32)
    tiny, half = 2.0**-100, 2.0**-24
    for product in ((half, 1.0 + 2.0**-23), (half, 1.0 - 2.0**-24), (half, 1.0)):
        exact = Fraction(product[0]) * Fraction(product[1]) + 1
        assert reference.float_bits(reference._fma(*product, 1.0)) == ptx.rounded(exact, 32)
    assert reference._fma(tiny, tiny, 1.0) == 1.0
    above = (2.0**-12 + 2.0**-35, 2.0**-12)  # 2^-24 + 2^-47
    assert float(struct.unpack("<f", struct.pack("<f", above[0] * above[1] + 1.0))[0]) == 1.0 + 2.0**-23
    assert reference._fma(*above, 1.0) == 1.0 + 2.0**-23
    # A tie, which goes to the even number below.
    beyond = (2.0**-24, 1.0)
    assert reference._fma(*beyond, 1.0) == 1.0


@pytest.mark.parametrize(
    ("case", "shape", "of_a", "counts"),
    [
        (0, "sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", 4, (4, 4)),
        (1, "sync.aligned.m16n8k32.row.col.s32.s8.s8.s32", 4, (4, 4)),
        (2, "sync.aligned.m8n8k4.row.col.f32.f16.f16.f32", 2, (2, 8)),
    ],
)
def test_tensor_values_are_those_of_repeated_products(
    case: int, shape: str, of_a: int, counts: tuple[int, int]
) -> None:
    chosen = (*tensor.cases((8, 0)), *tensor.cases((7, 0)))[case]
    operands = chosen.operands(6)
    values = chosen.values(operands, 5)
    size = chosen.operand_bytes // 4
    for warp in (0, 7):
        lanes = [
            struct.unpack_from(f"<{of_a + 2}I", operands, 4 * size * (32 * warp + lane)) for lane in range(32)
        ]
        sums: list[list[int]] = [[] for _ in range(32)]
        for swapped, turn in itertools.product((False, True), range(counts[0])):
            c = [[0] * counts[1] for _ in range(32)]
            for _ in range(5):
                a = [[lane[(turn + r) % of_a] for r in range(of_a)] for lane in lanes]
                b = [list(lane[of_a:])[:: -1 if swapped else 1] for lane in lanes]
                c = fragments.multiply(shape, list(zip(a, b, c, strict=True)))
            for lane in range(32):
                sums[lane] += c[lane]
        assert [reference.fold(parts) for parts in sums] == values[32 * warp : 32 * warp + 32]


def test_operands_are_exact_in_their_type_and_never_zero() -> None:
    for case in (tensor.cases((9, 0))[0], tensor.cases((7, 0))[0]):
        registers = case.operand_bytes // 4 if case.operand_bytes == 16 else 6
        for thread in range(LANES):
            halves = struct.unpack_from(f"<{2 * registers}e", case.operands(2), thread * case.operand_bytes)
            for half in halves:
                mantissa = abs(Fraction(half))
                while mantissa.denominator > 1 or mantissa.numerator % 2 == 0:
                    mantissa *= 2 if mantissa.denominator > 1 else Fraction(1, 2)
                assert half != 0 and mantissa <= 31


@given(st.lists(st.integers(0, ALL), min_size=1, max_size=32), st.data())
def test_folding_keeps_every_single_difference(values: list[int], data: st.DataObject) -> None:
    changed = list(values)
    at = data.draw(st.integers(0, len(values) - 1))
    changed[at] ^= 1 << data.draw(st.integers(0, 63))
    assert reference.fold(changed) != reference.fold(values)


def test_a_records_checksum_is_the_one_that_the_rounds_add_up_to() -> None:
    values = [random.Random(n).getrandbits(64) for n in range(5)]
    for rounds in (1, 2, 17):
        records = list(reference.RECORD.iter_unpack(reference.records(values, rounds)))
        for value, record in zip(values, records, strict=True):
            total = 0
            for _ in range(rounds):
                total = (total * 0x100000001B3 + value) % 2**64
            assert record == (total, 0, 0, LOW)


def test_the_pattern_tells_each_address_and_its_complement_is_all_other_bits() -> None:
    starts = [0, 2**20, 2**34, 2**37]
    patterns = [reference.pattern(start + n, 5) for start in starts for n in range(500)]
    assert len(set(patterns)) == len(patterns)
    for word, other in zip(patterns, [reference.pattern(n, 5, flip=ALL) for n in range(500)], strict=False):
        assert word ^ other == ALL
    assert reference.pattern_bytes(64, 9) == struct.pack(
        "<64Q", *[reference.pattern(n, 9) for n in range(64)]
    )
    ones = sum(word.bit_count() for word in patterns) / len(patterns)
    assert math.isclose(ones, 32, rel_tol=0.05)


def test_the_answers_are_what_they_were() -> None:
    """A changed answer makes this a different test: results from before and after are no longer comparable."""
    digest = hashlib.sha256()
    for case in (*reference.CASES, *tensor.cases((9, 0)), *tensor.cases((7, 0))):
        operands = case.operands(2026)
        digest.update(operands + struct.pack(f"<{LANES}Q", *case.values(operands, case.steps)))
    assert digest.hexdigest() == "aa369b053126b113a578336758e578080828a5233c9c8f5f2fcd3405d290df13"


def test_a_gpu_gets_the_tensor_kernels_of_its_generation() -> None:
    assert [case.module for case in tensor.cases((7, 0))] == ["tc_sm70"]
    assert [case.module for case in tensor.cases((7, 5))] == ["tc_sm70"]
    assert [case.kernel for case in tensor.cases((8, 0))] == ["kat_mma_f16", "kat_mma_s8"]
    assert tensor.cases((12, 0)) == tensor.cases((8, 0))
    assert tensor.cases((6, 1)) == ()
