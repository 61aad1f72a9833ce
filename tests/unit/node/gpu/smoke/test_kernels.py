"""The kernels' own text, interpreted, computes what the reference says, without a GPU and without shared code."""

from __future__ import annotations

import random
import struct
from dataclasses import replace

import pytest

from image_builder.node.gpu.smoke import reference, tensor
from image_builder.node.gpu.smoke.reference import ALL, Case
from tests.support.gpu_stand_in import ptx
from tests.unit.node.gpu.smoke import grids

ALL_CASES = (*reference.CASES, *tensor.cases((9, 0)), *tensor.cases((7, 5)))
# A warp with mma costs the interpreter milliseconds per step.
SMALL = {"kat_int": (32, 40), "kat_ffma": (32, 64), "kat_dfma": (32, 64), "det_fp32": (32, 64)}


def _name(case: Case) -> str:
    return f"{case.module}-{case.kernel}"


def _small(case: Case) -> tuple[int, int]:
    """Return threads and steps that are quick to interpret."""
    return SMALL.get(case.kernel, (32, 3))


@pytest.mark.parametrize("case", ALL_CASES, ids=_name)
@pytest.mark.parametrize("seed", [0, 2**63 + 12345])
def test_a_kernel_computes_what_the_reference_says(case: Case, seed: int) -> None:
    threads, steps = _small(case)
    operands = case.operands(seed)[: threads * case.operand_bytes]
    values = case.values(operands, steps)
    block = grids.block_of(case, operands, values, steps=steps, rounds=2, threads=threads)
    assert block == reference.records(values, 2)
    assert len(set(values)) > threads // 2  # they differ, or the test would prove little


@pytest.mark.parametrize("case", ALL_CASES, ids=_name)
def test_a_kernel_tells_of_a_value_that_is_not_the_expected_one(case: Case) -> None:
    threads, steps = 32, 1
    operands = case.operands(7)[: threads * case.operand_bytes]
    values = case.values(operands, steps)
    expected = list(values)
    expected[19] ^= 1 << 40
    block = grids.block_of(case, operands, expected, steps=steps, rounds=3, threads=threads)
    records = list(reference.RECORD.iter_unpack(block))
    good = list(reference.RECORD.iter_unpack(reference.records(values, 3)))
    assert records[19] == (good[19][0], values[19], 3, 0)
    assert [record for n, record in enumerate(records) if n != 19] == [
        record for n, record in enumerate(good) if n != 19
    ]


@pytest.mark.parametrize("case", ALL_CASES, ids=_name)
def test_one_bit_of_an_operand_changes_the_result(case: Case) -> None:
    threads, steps = 32, 16 if case.module == "base" else 1
    operands = bytearray(case.operands(11)[: threads * case.operand_bytes])
    values = case.values(bytes(operands), steps)
    operands[5 * case.operand_bytes + 1] ^= 2
    block = grids.block_of(case, bytes(operands), values, steps=steps, rounds=1, threads=threads)
    records = list(reference.RECORD.iter_unpack(block))
    good = list(reference.RECORD.iter_unpack(reference.records(values, 1)))
    wrong = {number for number, record in enumerate(records) if record != good[number]}
    # Only that thread, or those of its warp that multiply by its element.
    assert 5 in wrong
    assert wrong == {5} or (case.id == "kat.mma" and all(records[number][2] == 1 for number in wrong))


def test_a_changed_constant_in_a_kernel_is_seen() -> None:
    case = reference.CASES[0]
    text = (grids.KERNELS / "base.ptx").read_text()
    changed = ptx.parse(text.replace("shf.l.wrap.b32 %a, %a, %a, 13;", "shf.l.wrap.b32 %a, %a, %a, 12;"))
    operands = case.operands(1)[: 32 * case.operand_bytes]
    values = case.values(operands, 4)
    memory = ptx.Memory()
    addresses = [memory.allocate(size) for size in (32 * 24, 4, len(operands), 8 * 32)]
    memory.blocks[addresses[2]][:] = operands
    memory.blocks[addresses[3]][:] = struct.pack("<32Q", *values)
    ptx.launch(changed["kat_int"], memory, [*addresses, 4, 1], blocks=1, threads=32)
    assert bytes(memory.blocks[addresses[0]]) != reference.records(values, 1)


def test_blocks_write_beside_each_other_and_tell_their_sm() -> None:
    case = replace(reference.CASES[3], steps=2)
    operands = case.operands(3)[: 64 * case.operand_bytes]
    values = case.values(operands, 2)
    memory = ptx.Memory()
    addresses = [memory.allocate(size) for size in (3 * 64 * 24, 12, len(operands), 8 * 64)]
    memory.blocks[addresses[2]][:] = operands
    memory.blocks[addresses[3]][:] = struct.pack("<64Q", *values)
    kernel = grids.module("base")["det_fp32"]
    ptx.launch(kernel, memory, [*addresses, 2, 1], blocks=3, threads=64, places=[9, 4, 9])
    assert bytes(memory.blocks[addresses[0]]) == reference.records(values, 1) * 3
    assert struct.unpack("<3I", memory.blocks[addresses[1]]) == (9, 4, 9)


# -- memory ----------------------------------------------------------------------------------------------------


def _filled(count: int, start: int, mask: int, seed: int, flip: int) -> tuple[ptx.Memory, int]:
    memory = ptx.Memory()
    base = memory.allocate(8 * count)
    arguments = [base, count, start, mask, seed, flip]
    ptx.launch(grids.module("memory")["mem_fill"], memory, arguments, blocks=2, threads=32)
    return memory, base


def _verified(
    memory: ptx.Memory, base: int, count: int, start: int, mask: int, seed: int, flip: int, rewrite: int
) -> tuple[int, ...]:
    tally = memory.allocate(32)
    memory.blocks[tally][:] = struct.pack("<4Q", 0, 0, ALL, 0)
    arguments = [base, count, start, mask, seed, flip, tally, rewrite]
    ptx.launch(grids.module("memory")["mem_verify"], memory, arguments, blocks=2, threads=32)
    return struct.unpack("<4Q", memory.blocks[tally])


@pytest.mark.parametrize("count", [2, 128, 300])
@pytest.mark.parametrize(
    ("start", "mask", "seed", "flip"), [(0, ALL, 0, 0), (2**34 + 6, ALL, 99, ALL), (0, 63, 2**64 - 3, 5)]
)
def test_the_pattern_is_the_references(count: int, start: int, mask: int, seed: int, flip: int) -> None:
    memory, base = _filled(count, start, mask, seed, flip)
    pattern = struct.unpack(f"<{count}Q", memory.blocks[base])
    expected = [reference.pattern(start + n, seed, flip=flip, mask=mask) for n in range(count)]
    assert list(pattern) == expected
    assert _verified(memory, base, count, start, mask, seed, flip, 0) == (count, 0, ALL, 0)


def test_verification_leaves_the_complement_where_it_is_told_to() -> None:
    memory, base = _filled(130, 1000, ALL, 4, 0)
    assert _verified(memory, base, 130, 1000, ALL, 4, 0, 1) == (130, 0, ALL, 0)
    assert _verified(memory, base, 130, 1000, ALL, 4, ALL, 0) == (130, 0, ALL, 0)
    pattern = struct.unpack("<130Q", memory.blocks[base])
    assert list(pattern) == [reference.pattern(1000 + n, 4) ^ ALL for n in range(130)]


@pytest.mark.parametrize("word", [0, 1, 77, 128, 299])
def test_each_flipped_bit_is_found_and_placed(word: int) -> None:
    memory, base = _filled(300, 5000, ALL, 8, 0)
    for bit in (0, 31, 32, 63):
        memory.write(base + 8 * word, 8, reference.pattern(5000 + word, 8) ^ 1 << bit)
        assert _verified(memory, base, 300, 5000, ALL, 8, 0, 0) == (300, 1, 5000 + word, 1 << bit)


def test_of_several_wrong_words_the_lowest_is_named_and_all_bits() -> None:
    memory, base = _filled(300, 0, ALL, 8, 0)
    for word, bit in ((250, 3), (40, 60), (41, 7)):
        memory.write(base + 8 * word, 8, reference.pattern(word, 8) ^ 1 << bit)
    assert _verified(memory, base, 300, 0, ALL, 8, 0, 0) == (300, 3, 40, 1 << 3 | 1 << 60 | 1 << 7)


@pytest.mark.parametrize("count", [1, 31, 64, 255, 256, 257, 700])
def test_a_copy_is_whole_and_nothing_more(count: int) -> None:
    memory = ptx.Memory()
    source, target = memory.allocate(16 * count), memory.allocate(16 * count + 16)
    memory.blocks[source][:] = random.Random(count).randbytes(16 * count)
    kernel = grids.module("memory")["stream_copy"]
    ptx.launch(kernel, memory, [target, source, count], blocks=2, threads=32)
    assert memory.blocks[target][:-16] == memory.blocks[source]
    assert memory.blocks[target][-16:] == b"\xcc" * 16


def test_spin_ends_only_when_its_flag_is_set() -> None:
    memory = ptx.Memory()
    flag = memory.allocate(4)
    memory.write(flag, 4, 0)
    spin = grids.module("memory")["spin"]
    with pytest.raises(ptx.PtxError, match="did not end"):
        ptx.launch(spin, memory, [flag], blocks=1, threads=1, limit=1000)
    memory.write(flag, 4, 1)
    ptx.launch(spin, memory, [flag], blocks=1, threads=1, limit=1000)


# -- the interpreter itself ------------------------------------------------------------------------------------


def test_what_the_interpreter_does_not_know_is_an_error() -> None:
    text = ".visible .entry k(\n    .param .u64 a\n)\n{\n    .reg .u32 %x;\n    sin.approx.f32 %x, %x;\n}\n"
    with pytest.raises(ptx.PtxError, match="not understood: sin"):
        ptx.launch(ptx.parse(text)["k"], ptx.Memory(), [0], blocks=1, threads=1)


def test_memory_outside_of_an_allocation_or_not_aligned_is_an_error() -> None:
    memory = ptx.Memory()
    base = memory.allocate(64)
    with pytest.raises(ptx.PtxError, match="in no allocation"):
        memory.read(base + 64, 8)
    with pytest.raises(ptx.PtxError, match="not aligned"):
        memory.read(base + 4, 8)
    kernel = grids.module("memory")["mem_fill"]
    with pytest.raises(ptx.PtxError, match="in no allocation"):
        ptx.launch(kernel, memory, [base, 10, 0, ALL, 0, 0], blocks=1, threads=32)
