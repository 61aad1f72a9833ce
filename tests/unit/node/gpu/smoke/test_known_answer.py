"""Each kind of wrong answer is caught and located by SM, thread and round; what wasn't run doesn't pass."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace

import pytest

from image_builder.node.gpu.smoke import cuda, known_answer, reference, tensor
from image_builder.node.gpu.smoke.known_answer import compare
from image_builder.node.gpu.smoke.reference import LANES, RECORD, Case
from tests.support.gpu_stand_in import libcuda
from tests.support.gpu_stand_in.libcuda import Gpu

UUID = "GPU-12345678-9abc-def0-1234-56789abcdef0"
QUICK = tuple(replace(case, steps=2, rounds=2) for case in reference.CASES)
TENSOR = (replace(tensor.cases((7, 0))[0], steps=1, rounds=1),)
VALUES = [reference.pattern(thread, 1) for thread in range(LANES)]
PLACES = struct.pack("<3I", 0, 5, 2)


def _records(rounds: int = 4) -> bytearray:
    return bytearray(reference.records(VALUES, rounds) * 3)


def test_what_is_right_is_right_and_tells_its_sms() -> None:
    comparison = compare(bytes(_records()), PLACES, VALUES, 4)
    assert comparison.count == 0 and comparison.wrong == () and comparison.sms == {0, 5, 2}


@pytest.mark.parametrize("bit", range(8 * RECORD.size))
def test_every_single_bit_of_a_record_counts(bit: int) -> None:
    records = _records()
    at = (1 * LANES + 77) * RECORD.size
    records[at + bit // 8] ^= 1 << bit % 8
    comparison = compare(bytes(records), PLACES, VALUES, 4)
    assert comparison.count == 1 and comparison.wrong_sms == {5}
    assert (comparison.wrong[0].block, comparison.wrong[0].sm, comparison.wrong[0].thread) == (1, 5, 77)


def test_a_wrong_value_is_named_with_its_round() -> None:
    records = _records()
    RECORD.pack_into(records, (2 * LANES + 40) * RECORD.size, 123, VALUES[40] ^ 1 << 17, 3, 1)
    comparison = compare(bytes(records), PLACES, VALUES, 4)
    detail = known_answer.detail(QUICK[0], comparison)
    assert detail == (
        f"kat_int: 1 threads wrong, on SM 2; SM 2, block 2, warp 1, lane 8, round 1: "
        f"expected {VALUES[40]:#018x}, found {VALUES[40] ^ 1 << 17:#018x}"
    )


def test_an_error_that_the_device_did_not_count_is_named_by_its_checksum() -> None:
    records = _records()
    good = struct.unpack_from("<Q", records, 0)[0]
    struct.pack_into("<Q", records, 0, good ^ 4)
    detail = known_answer.detail(QUICK[0], compare(bytes(records), PLACES, VALUES, 4))
    assert f"SM 0, block 0, warp 0, lane 0: expected checksum {good:#018x}, found {good ^ 4:#018x}" in detail


def test_a_gpu_that_gets_all_wrong_is_told_of_in_few_words() -> None:
    records = bytes(3 * LANES * RECORD.size)
    comparison = compare(records, PLACES, VALUES, 4)
    assert comparison.count == 3 * LANES and comparison.wrong_sms == {0, 2, 5}
    assert len(known_answer.detail(QUICK[0], comparison)) <= 512


def test_records_that_are_too_few_are_an_error() -> None:
    with pytest.raises(ValueError, match="bytes of records for 3 blocks"):
        compare(bytes(_records()[:-1]), PLACES, VALUES, 4)


# -- the whole, with interpreted kernels -----------------------------------------------------------------------


def _measure(gpu: Gpu, case: Case) -> tuple[str, float | None, str, int]:
    device, fake = libcuda.device(gpu)
    measured, sms = known_answer.measure(device, case.id, [case], [3], 0)
    assert fake.raised == [] and gpu.allocated == {}
    assert measured.gpu == UUID and measured.unit == "mismatches"
    return measured.status, measured.measured, measured.detail, sms


@pytest.mark.parametrize("case", [*QUICK, *TENSOR], ids=lambda case: case.kernel)
def test_a_gpu_that_is_well_passes(case: Case) -> None:
    assert _measure(Gpu(UUID), case) == ("done", 0.0, "", 2)


@pytest.mark.parametrize("case", [*QUICK, *TENSOR], ids=lambda case: case.kernel)
def test_one_bit_flipped_in_a_result_fails_and_names_sm_and_lane(case: Case) -> None:
    def flip(gpu: Gpu, kernel: str, arguments: Sequence[int]) -> None:
        if kernel != case.kernel or gpu.launches < 2:
            return  # the first launch tests the expectation that is wrong on purpose
        block, at = fake.memory.place(arguments[0], RECORD.size)
        block[at + (3 * LANES + 100) * RECORD.size + 2] ^= 1 << 6

    gpu = Gpu(UUID, after_launch=flip)
    device, fake = libcuda.device(gpu)
    measured, _ = known_answer.measure(device, case.id, [case], [3], 0)
    assert (measured.status, measured.measured) == ("failed", 1.0)
    assert "1 threads wrong, on SM 1; SM 1, block 3, warp 3, lane 4: expected" in measured.detail
    assert measured.seed == 3


@pytest.mark.parametrize("case", [*QUICK, *TENSOR], ids=lambda case: case.kernel)
def test_a_gpu_that_computes_from_a_flipped_operand_fails(case: Case) -> None:
    device, _ = libcuda.device(Gpu(UUID))

    def spoil(case: Case, operands: bytes) -> bytes:
        changed = bytearray(operands)
        changed[case.operand_bytes * 77 + 1] ^= 2
        return bytes(changed)

    measured, _ = known_answer.measure(device, case.id, [case], [3], 0, spoil=spoil)
    assert measured.status == "failed" and (measured.measured or 0) >= 16  # at least one thread of each block
    assert "warp 2, lane" in measured.detail and "round 0: expected" in measured.detail


def test_an_sm_that_gets_no_block_is_an_error_and_no_pass() -> None:
    gpu = Gpu(UUID, sms=3, bytes=4 << 20, unused_sms=frozenset([1]))
    case = replace(QUICK[3], steps=1, rounds=1)
    assert _measure(gpu, case) == ("error", None, "det_fp32: 2 of 3 SMs were seen", 2)
    assert gpu.launches == 1 + len(known_answer.BLOCKS_PER_SM)


def test_a_device_that_compares_nothing_fails() -> None:
    """Its threads count no error, whatever they are told to expect."""

    def blind(gpu: Gpu, kernel: str, arguments: Sequence[int]) -> None:
        block, at = fake.memory.place(arguments[0], RECORD.size)
        for start in range(at, len(block), RECORD.size):
            block[start + 8 : start + RECORD.size] = struct.pack("<QII", 0, 0, reference.NONE)

    device, fake = libcuda.device(Gpu(UUID, after_launch=blind))
    measured, sms = known_answer.measure(device, "kat.int", QUICK[:1], [3], 0)
    assert (measured.status, sms) == ("failed", 0)
    assert measured.detail == "kat_int: 0 threads noticed a wrong expectation for thread 3 of 2 blocks"


def test_a_launch_that_does_nothing_fails() -> None:
    """What the previous launch left must not count."""

    class Idle(libcuda.Library):
        def _cuLaunchKernel(self, function: int, *more: int) -> None:  # noqa: N802
            if self.gpu.launches < 2:
                super()._cuLaunchKernel(function, *more)

    device = cuda.Device(libcuda.Driver(Gpu(UUID), kind=Idle), 0)
    with known_answer.prepared(device, QUICK[0], 3, 2) as run:
        comparisons = []
        for _ in range(3):
            run.start()
            comparisons.append(run.read())
    assert [each.count for each in comparisons] == [0, 0, 2 * LANES]
    assert comparisons[2].sms == {2**32 - 1}  # no SM has that number


def test_a_generation_without_a_kernel_is_an_error() -> None:
    device, _ = libcuda.device(Gpu(UUID, capability=(6, 0)))
    measured, sms = known_answer.measure(device, "kat.mma", (), [3], 0)
    assert (measured.status, measured.measured, sms) == ("error", None, 0)
    assert measured.detail == "compute capability (6, 0) has no kernel"


def test_every_seed_and_case_is_tried() -> None:
    gpu = Gpu(UUID)
    device, _ = libcuda.device(gpu)
    small = [replace(case, steps=1, rounds=1) for case in (QUICK[0], QUICK[3])]
    known_answer.measure(device, "kat.int", small, [3, 4, 5], 0)
    assert gpu.launches == 2 * 3 * 2  # for each, the wrong expectation and the test itself


def test_the_rate_counts_every_product_and_compares() -> None:
    device, fake = libcuda.device(Gpu(UUID))
    measurement = known_answer.rate(device, TENSOR[0], 3, 0, warm=0)
    # 16 blocks of 8 warps, one step and round of four times four 8x8x4 products, in the fake's millisecond
    assert measurement.measured == round(16 * 8 * 4 * 4 * 8 * 8 * 4 * 2 / 1e-3 / 1e12, 2)
    assert (measurement.id, measurement.status, measurement.unit) == ("perf.mma", "done", "TFLOP/s")

    def flip(gpu: Gpu, kernel: str, arguments: Sequence[int]) -> None:
        block, at = fake.memory.place(arguments[0], RECORD.size)
        block[at] ^= 1

    fake.gpus[0].after_launch = flip
    measurement = known_answer.rate(device, TENSOR[0], 3, 0, warm=0)
    assert (measurement.status, measurement.measured, measurement.unit) == ("failed", None, "TFLOP/s")
