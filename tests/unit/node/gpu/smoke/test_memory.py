"""Memory: one bit is caught and located, untested memory doesn't pass. Copies: their bytes count like their time."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from image_builder.node.gpu.model import Measurement
from image_builder.node.gpu.smoke import bandwidth, cuda, memory, reference
from image_builder.node.gpu.smoke.memory import Chunk
from tests.support.gpu_stand_in import libcuda
from tests.support.gpu_stand_in.libcuda import KIB, Gpu

UUID = "GPU-12345678-9abc-def0-1234-56789abcdef0"
CHUNK, UNIT = 4 * KIB, KIB
SMALL = 20 * KIB


@pytest.fixture(autouse=True)
def _few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch few threads: interpreting one takes time even if it has nothing left to do."""
    monkeypatch.setattr(memory, "_BLOCKS_PER_SM", 1)
    monkeypatch.setattr(bandwidth, "_BLOCKS_PER_SM", 1)


def _measure(device: cuda.Device, fraction: float = 0.95, *, corrupt: bool = False) -> memory.Tested:
    return memory.measure(device, fraction, [5], 0, corrupt=corrupt, chunk=CHUNK, unit=UNIT)


def test_memory_that_is_well_passes_and_tells_how_much_of_it() -> None:
    gpu = Gpu(UUID, sms=1, bytes=SMALL)
    device, fake = libcuda.device(gpu)
    tested = _measure(device)
    assert (tested.measurement.status, tested.measurement.measured) == ("done", 0.0)
    assert (tested.free, tested.tested) == (SMALL, 19 * KIB)
    assert fake.raised == [] and gpu.allocated == {}


def test_a_part_of_memory_is_chosen_at_random_and_is_enough() -> None:
    device, _ = libcuda.device(Gpu(UUID, sms=1, bytes=SMALL))
    assert _measure(device, 0.25).tested >= 0.25 * SMALL
    chunks = [Chunk(0x1000 * n, 100, 0) for n in range(100)]
    selections = [tuple(memory.chosen(chunks, 2450, seed)) for seed in range(20)]
    assert {len(selection) for selection in selections} == {25} and len(set(selections)) > 15


@pytest.mark.parametrize("launch", [1, 6, 9])
def test_one_bit_that_changes_is_found_with_its_address(launch: int) -> None:
    """Five chunks: launches 1 to 5 fill, 6 to 10 verify and rewrite, the others verify the complement."""

    def decay(gpu: Gpu, kernel: str, arguments: Sequence[int]) -> None:
        if gpu.launches == launch:
            address = arguments[0] + 8 * 33
            fake.memory.write(address, 8, fake.memory.read(address, 8) ^ 1 << 50)
            places.append(address)

    places: list[int] = []
    gpu = Gpu(UUID, sms=1, bytes=SMALL, after_launch=decay)
    device, fake = libcuda.device(gpu)
    measurement = _measure(device).measurement
    assert (measurement.status, measurement.measured, measurement.seed) == ("failed", 1.0, 5)
    assert f"1 wrong words, the first at {places[0]:#x} (byte " in measurement.detail
    parts = measurement.detail.split()
    assert int(parts[-3].rstrip(","), 16) ^ int(parts[-1], 16) == 1 << 50


def test_a_line_of_the_address_that_is_stuck_shows() -> None:
    """Chunks alias: what is written to a later one also lands in the first."""

    def alias(gpu: Gpu, kernel: str, arguments: Sequence[int]) -> None:
        if kernel == "mem_fill" and arguments[2]:
            first = min(gpu.allocated)
            block, at = fake.memory.place(arguments[0], 64)
            target, to = fake.memory.place(first, 64)
            target[to : to + 64] = block[at : at + 64]

    device, fake = libcuda.device(Gpu(UUID, sms=1, bytes=SMALL, after_launch=alias))
    measurement = _measure(device).measurement
    assert measurement.status == "failed" and measurement.measured == 8.0
    assert "bits 0x" in measurement.detail


def test_verification_that_finds_nothing_fails() -> None:
    """A GPU that finds every word right, even the one that was changed on purpose."""

    def blind(gpu: Gpu, kernel: str, arguments: Sequence[int]) -> None:
        if kernel == "mem_verify":
            block, at = fake.memory.place(arguments[6], 32)
            block[at + 8 : at + 32] = struct.pack("<3Q", 0, reference.ALL, 0)

    device, fake = libcuda.device(Gpu(UUID, sms=1, bytes=SMALL, after_launch=blind))
    measurement = _measure(device).measurement
    assert (
        measurement.status == "failed"
        and "was flipped on purpose, but verification found" in measurement.detail
    )


def test_words_that_were_not_compared_fail() -> None:
    def lazy(gpu: Gpu, kernel: str, arguments: Sequence[int]) -> None:
        if kernel == "mem_verify":
            block, at = fake.memory.place(arguments[6], 32)
            block[at : at + 8] = struct.pack("<Q", arguments[1] - 2)

    device, fake = libcuda.device(Gpu(UUID, sms=1, bytes=SMALL, after_launch=lazy))
    measurement = _measure(device).measurement
    assert measurement.status == "failed" and "the GPU compared 510 of 512 words" in measurement.detail


def test_memory_that_can_not_be_allocated_is_an_error_and_no_pass() -> None:
    device, _ = libcuda.device(Gpu(UUID, sms=1, bytes=SMALL, refuses={"cuMemAlloc_v2": 2}))
    tested = _measure(device, 0.25)
    assert (tested.measurement.status, tested.measurement.measured, tested.tested) == ("error", None, 0)
    assert tested.measurement.detail == f"only 0 of {SMALL} free bytes could be allocated"


def test_smaller_chunks_are_taken_where_a_big_one_is_refused() -> None:
    device, fake = libcuda.device(Gpu(UUID, sms=1, bytes=7 * KIB))
    chunks = memory.allocate(device, 7 * KIB, CHUNK, UNIT)
    assert [(chunk.size, chunk.start) for chunk in chunks] == [(4096, 0), (3072, 512)]
    fake.gpus[0].bytes = 12 * KIB  # 5 KiB are left
    more = memory.allocate(device, 16 * KIB, 16 * KIB, UNIT)
    assert [chunk.size for chunk in more] == [4096, KIB]


def test_a_drill_of_memory_is_caught() -> None:
    device, _ = libcuda.device(Gpu(UUID, sms=1, bytes=SMALL))
    measurement = _measure(device, corrupt=True).measurement
    assert (measurement.status, measurement.measured) == ("failed", 1.0)


# -- copies ----------------------------------------------------------------------------------------------------

Copy = Callable[..., Measurement]
LINK: dict[str, Any] = {"size": 4 * KIB, "tile": 128}


@pytest.mark.parametrize(
    ("copy", "sizes", "kernel_bytes"),
    [(bandwidth.hbm, {"size": 4 * KIB}, 2), (bandwidth.to_device, LINK, 1), (bandwidth.to_host, LINK, 1)],
)
def test_a_copy_is_timed_and_compared(copy: Copy, sizes: dict[str, int], kernel_bytes: int) -> None:
    gpu = Gpu(UUID, sms=1)
    device, fake = libcuda.device(gpu)
    measurement = copy(device, 3, 2, **sizes)
    assert (measurement.status, measurement.unit) == ("done", "GB/s")
    assert measurement.measured == round(
        kernel_bytes * 4 * KIB / 1e-3 / 1e9, 2
    )  # the fake's copies take 1 ms
    assert fake.raised == [] and gpu.allocated == {} and fake._pinned == {}
    failed = copy(device, 3, 2, corrupt=True, **sizes)
    assert (failed.status, failed.measured) == ("failed", None)
    assert "1 wrong words" in failed.detail and "expected 0x" in failed.detail
    assert gpu.allocated == {} and fake._pinned == {}


def test_a_copy_that_never_happens_fails() -> None:
    class Lazy(libcuda.Library):
        def _cuMemcpyHtoDAsync(self, to: int, source: int, size: int, stream: int) -> None:  # noqa: N802
            pass

        def _cuMemcpyDtoHAsync(self, to: int, source: int, size: int, stream: int) -> None:  # noqa: N802
            pass

    device = cuda.Device(libcuda.Driver(Gpu(UUID, sms=1), kind=Lazy), 0)
    assert bandwidth.to_device(device, 3, 1, **LINK).status == "failed"
    assert bandwidth.to_host(device, 3, 1, **LINK).status == "failed"


@pytest.mark.parametrize("bit", [0, 7, 8 * 2048 + 3, 8 * 4095 + 7])
def test_each_bit_that_arrives_wrong_is_placed(bit: int) -> None:
    golden = reference.pattern_bytes(128, 4)
    data = bytearray(golden * 4)
    assert bandwidth.differs(memoryview(data), golden) == ""
    data[bit // 8] ^= 1 << bit % 8
    complaint = bandwidth.differs(memoryview(data), golden)
    assert f"1 wrong words in the 1024 bytes from byte {bit // 8 // 1024 * 1024}" in complaint
    assert f"the first at byte {bit // 64 * 8}: expected 0x" in complaint


def test_peers_are_linked_ones_and_their_bytes_are_compared() -> None:
    others = [Gpu(UUID[:-1] + "1", sms=1, linked=False), Gpu(UUID[:-1] + "2", sms=1)]
    driver = libcuda.Driver(Gpu(UUID, sms=1), *others)
    devices = cuda.devices(driver)
    measurement = bandwidth.peer(devices[0], devices[1:], 3, 2, size=4 * KIB)
    assert (measurement.status, measurement.measured) == ("done", round(4 * KIB / 1e-3 / 1e9, 2))
    assert measurement.detail.startswith(f"to {others[1].uuid}: ")
    skipped = bandwidth.peer(devices[0], devices[1:2], 3, 2, size=4 * KIB)
    assert (skipped.status, skipped.measured, skipped.detail) == ("skipped", None, "no peer by NVLink")
    assert all(gpu.allocated == {} for gpu in driver.fake.gpus)


def test_bytes_that_change_on_the_link_fail() -> None:
    class Noisy(libcuda.Library):
        def _cuMemcpyPeerAsync(self, to: int, _a: int, source: int, _b: int, size: int, stream: int) -> None:  # noqa: N802
            super()._cuMemcpyPeerAsync(to, _a, source, _b, size, stream)
            self.memory.write(to + 16, 8, self.memory.read(to + 16, 8) ^ 2)

    devices = cuda.devices(libcuda.Driver(Gpu(UUID, sms=1), Gpu(UUID[:-1] + "1", sms=1), kind=Noisy))
    measurement = bandwidth.peer(devices[0], devices[1:], 3, 1, size=4 * KIB)
    assert measurement.status == "failed" and "1 wrong words" in measurement.detail
