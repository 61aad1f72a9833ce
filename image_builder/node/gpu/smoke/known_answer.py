"""Known answers: every SM computes what the host has computed before it, and no bit may differ.

A kernel's threads compare by themselves and write a record each; the host compares the records with what a block
without an error writes. So neither side is trusted alone, and an error has an SM, a thread and a round. Before a
kernel counts, it must notice an expectation that is wrong on purpose.
"""

from __future__ import annotations

import functools
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from image_builder.node.gpu.model import DETAIL_CHARACTERS, Measurement
from image_builder.node.gpu.smoke import reference
from image_builder.node.gpu.smoke.cuda import THREADS, U32, U64, Argument, Device
from image_builder.node.gpu.smoke.reference import LANES, RECORD, Case

BLOCKS_PER_SM = (8, 16, 32, 64)  # more are started while an SM has not taken part
_WARM_SECONDS = 1.0  # an idle GPU's clocks are low
_BLOCK_BYTES = LANES * RECORD.size
_REPORTED, _STORED = 3, 64  # wrong threads that a detail names, and that are kept

assert LANES == THREADS


@dataclass(frozen=True)
class Wrong:
    """One thread's record that isn't what it must be. ``round`` is None where the device itself saw no error."""

    block: int
    sm: int
    thread: int
    expected: int
    actual: int
    round: int | None

    def __str__(self) -> str:
        where = f"SM {self.sm}, block {self.block}, warp {self.thread // 32}, lane {self.thread % 32}"
        if self.round is None:
            return f"{where}: expected checksum {self.expected:#018x}, found {self.actual:#018x}"
        return f"{where}, round {self.round}: expected {self.expected:#018x}, found {self.actual:#018x}"


@dataclass(frozen=True)
class Compared:
    """A launch's comparison: the SMs that took part, the wrong threads and their SMs, the first of them in full."""

    sms: frozenset[int]
    count: int = 0
    wrong_sms: frozenset[int] = frozenset()
    wrong: tuple[Wrong, ...] = ()


def compare(records: bytes, places: bytes, values: Sequence[int], rounds: int) -> Compared:
    """Compare what all blocks wrote with what they must write. ``places`` has a u32 for each block: its SM."""
    sms = struct.unpack(f"<{len(places) // 4}I", places)
    golden = reference.records(values, rounds)
    if len(records) != len(golden) * len(sms):
        raise ValueError(f"{len(records)} bytes of records for {len(sms)} blocks")
    if records == golden * len(sms):
        return Compared(frozenset(sms))
    wrong = []
    for block, sm in enumerate(sms):
        actual = records[block * len(golden) : (block + 1) * len(golden)]
        if actual == golden:
            continue
        for thread, (good, bad) in enumerate(
            zip(RECORD.iter_unpack(golden), RECORD.iter_unpack(actual), strict=True)
        ):
            if good != bad:
                wrong.append((block, sm, thread, values[thread], good, bad))
    mismatches = tuple(_wrong(*entry) for entry in wrong[:_STORED])
    return Compared(frozenset(sms), len(wrong), frozenset(entry[1] for entry in wrong), mismatches)


def _wrong(
    block: int, sm: int, thread: int, value: int, good: tuple[int, ...], bad: tuple[int, ...]
) -> Wrong:
    checksum, actual, rounds, first = bad
    if rounds and actual != value:
        return Wrong(block, sm, thread, value, actual, first)
    return Wrong(block, sm, thread, good[0], checksum, None)


def detail(case: Case, result: Compared) -> str:
    """Return what to say of wrong threads, within a detail's length."""
    sms = ", ".join(map(str, sorted(result.wrong_sms)[:16]))
    parts = [f"{case.kernel}: {result.count} threads wrong, on SM {sms}"]
    parts += [str(mismatch) for mismatch in result.wrong[:_REPORTED]]
    return "; ".join(parts)[:DETAIL_CHARACTERS]


# -- launches --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prepared:
    """A case whose operands and expectations lie on the GPU."""

    start: Callable[[], None]
    read: Callable[[], Compared]


@functools.lru_cache(maxsize=2)
def _computed(
    operands: Callable[[int], bytes], values: Callable[[bytes, int], list[int]], steps: int, seed: int
) -> tuple[bytes, tuple[int, ...]]:
    """Return a case's operands and values; they are needed several times in a row."""
    data = operands(seed)
    return data, tuple(values(data, steps))


@contextmanager
def prepared(
    device: Device,
    case: Case,
    seed: int,
    blocks: int,
    *,
    expect: Callable[[list[int]], list[int]] = list,
    spoil: Callable[[Case, bytes], bytes] | None = None,
) -> Iterator[Prepared]:
    """Lay a case out on the GPU until the block ends.

    ``expect`` changes the device's expectations, ``spoil`` its operands; the host compares with the results of the
    unchanged operands.
    """
    operands, values = _computed(case.operands, case.values, case.steps, seed)
    kernel = device.kernel(case.module, case.kernel)
    sizes = (blocks * _BLOCK_BYTES, 4 * blocks, len(operands), 8 * LANES)
    addresses: list[int] = []
    try:
        for size in sizes:
            addresses.append(device.allocate(size))
        records, places, inputs, expectations = addresses
        device.upload(inputs, spoil(case, operands) if spoil else operands)
        device.upload(expectations, struct.pack(f"<{LANES}Q", *expect(list(values))))
        arguments: list[Argument] = [
            *(U64(address) for address in addresses),
            U32(case.steps),
            U32(case.rounds),
        ]

        def start() -> None:
            device.launch(kernel, blocks, arguments)

        def clear() -> None:
            # So that what is read later was written by the next launch.
            for address, size in zip(addresses, sizes[:2], strict=False):
                device.set_bytes(address, 0xFF, size)

        def read() -> Compared:
            written = device.download(records, sizes[0]), device.download(places, sizes[1])
            clear()
            return compare(*written, values, case.rounds)

        clear()
        yield Prepared(start, read)
    finally:
        for address in addresses:
            device.free(address)


def notices(device: Device, case: Case, seed: int) -> str:
    """Return an empty string where the device notices one wrong expectation, in that thread and no other.

    A comparison that can't fail proves nothing; what is wrong with it is returned otherwise.
    """
    lane = seed % LANES
    small = replace(case, rounds=2)

    def expect(values: list[int]) -> list[int]:
        return [value ^ (number == lane) for number, value in enumerate(values)]

    with prepared(device, small, seed, device.sms, expect=expect) as run:
        run.start()
        result = run.read()
    # What was computed is right, and its checksum: only the count of wrong rounds shows it.
    if result.count == device.sms and {wrong.thread for wrong in result.wrong} == {lane}:
        return ""
    complaint = f"{result.count} threads noticed a wrong expectation for thread {lane} of {device.sms} blocks"
    return f"{case.kernel}: {complaint}"


@dataclass(frozen=True)
class Answered:
    """A case's result: the measurement's status and detail, the wrong threads, and how many SMs took part."""

    status: Literal["done", "failed", "error"]
    detail: str
    wrong: int
    sms_seen: int


def answer(
    device: Device,
    case: Case,
    seed: int,
    seconds: float,
    *,
    spoil: Callable[[Case, bytes], bytes] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Answered:
    """Launch a case for that long, at least once and until every SM took part; an error ends it. Raises NodeError."""
    missed = notices(device, case, seed)
    if missed:
        return Answered("failed", missed[:DETAIL_CHARACTERS], 1, 0)
    sms: frozenset[int] = frozenset()
    end = clock() + seconds
    for per_sm in BLOCKS_PER_SM:
        with prepared(device, case, seed, per_sm * device.sms, spoil=spoil) as run:
            while True:
                run.start()
                result = run.read()
                sms |= result.sms
                if result.count:
                    return Answered("failed", detail(case, result), result.count, len(sms))
                if clock() >= end:
                    break
        if len(sms) >= device.sms:
            return Answered("done", "", 0, len(sms))
    return Answered("error", f"{case.kernel}: {len(sms)} of {device.sms} SMs were seen", 0, len(sms))


def measure(
    device: Device,
    id: str,
    cases: Sequence[Case],
    seeds: Sequence[int],
    seconds: float,
    *,
    spoil: Callable[[Case, bytes], bytes] | None = None,
) -> tuple[Measurement, int]:
    """Run all cases of a measurement with all seeds, ``seconds`` in all; return it and the SMs that each case saw."""
    began = time.monotonic()
    if not cases:
        detail = f"compute capability {device.capability} has no kernel"
        return Measurement(id, device.uuid, "error", None, "mismatches", detail, seeds[0]), 0
    sms = device.sms
    for seed in seeds:
        for case in cases:
            outcome = answer(device, case, seed, seconds / len(seeds) / len(cases), spoil=spoil)
            sms = min(sms, outcome.sms_seen)
            if outcome.status != "done":
                return _measured(device, id, outcome, seed, began), sms
    return _measured(device, id, Answered("done", "", 0, sms), seeds[0], began), sms


def _measured(device: Device, id: str, outcome: Answered, seed: int, began: float) -> Measurement:
    seconds = round(time.monotonic() - began, 3)
    measured = None if outcome.status == "error" else float(outcome.wrong)
    return Measurement(id, device.uuid, outcome.status, measured, "mismatches", outcome.detail, seed, seconds)


def rate(
    device: Device, case: Case, seed: int, seconds: float, *, warm: float = _WARM_SECONDS
) -> Measurement:
    """Measure the TFLOP/s of a tensor kernel: the median of its launches after a warm-up, each of them compared."""
    began = time.monotonic()
    blocks = BLOCKS_PER_SM[0] * device.sms
    operations = case.operations * case.steps * case.rounds * blocks * (LANES // 32)
    rates: list[float] = []
    with prepared(device, case, seed, blocks) as run:
        while not rates or time.monotonic() < began + warm + seconds:
            took = device.timed(run.start)
            result = run.read()
            if result.count:
                answered = Answered("failed", detail(case, result), result.count, len(result.sms))
                return replace(
                    _measured(device, "perf.mma", answered, seed, began), measured=None, unit="TFLOP/s"
                )
            if time.monotonic() >= began + warm:
                rates.append(operations / took / 1e12)
    spent = round(time.monotonic() - began, 3)
    summary = f"{case.kernel} of {case.module}, the median of {len(rates)} launches"
    return Measurement(
        "perf.mma", device.uuid, "done", round(median(rates), 2), "TFLOP/s", summary, seed, spent
    )
