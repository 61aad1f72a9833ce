"""Device memory: a pattern that depends on the address goes in and comes out, then its complement.

All chunks are written before the first is read, so that what is read comes from memory and not from a cache. Memory
that can't be allocated is not tested, which is an error, never a pass.
"""

from __future__ import annotations

import itertools
import random
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from image_builder.node.gpu.model import DETAIL_CHARACTERS, Measurement
from image_builder.node.gpu.smoke import reference
from image_builder.node.gpu.smoke.cuda import U32, U64, Device, OutOfMemoryError
from image_builder.node.gpu.smoke.reference import ALL

CHUNK = 1 << 30
UNIT = 1 << 24  # what a chunk is a multiple of
WORD = 8
OF_FREE = 0.95  # the driver needs some for itself
_BLOCKS_PER_SM = 8
_TALLY = struct.Struct("<4Q")


@dataclass(frozen=True)
class Chunk:
    """Memory of the GPU; ``start`` is the test's number of its first word."""

    address: int
    size: int
    start: int

    @property
    def words(self) -> int:
        return self.size // WORD


@dataclass(frozen=True)
class Tally:
    """The counters of mem_verify. ``lowest`` is the test's number of the first wrong word, ``bits`` all wrong bits."""

    compared: int
    wrong: int
    lowest: int
    bits: int


@dataclass(frozen=True)
class Outcome:
    """The result of all passes: wrong words, the first complaint, and the seed that showed them."""

    status: Literal["done", "failed", "error"]
    wrong: int = 0
    detail: str = ""
    seed: int = 0


@dataclass(frozen=True)
class Tested:
    """The measurement, the bytes that were free, and those of them that were written and read back."""

    measurement: Measurement
    free: int
    tested: int


def allocatable(free: int, unit: int) -> int:
    """Return how many of the free bytes to allocate: whole units."""
    return int(free * OF_FREE) // unit * unit


def allocate(device: Device, size: int, chunk: int, unit: int) -> list[Chunk]:
    """Allocate chunks, smaller ones where a large one is refused; may return less than ``size`` in all."""
    chunks: list[Chunk] = []
    remaining, start = size, 0
    while remaining and chunk:
        part = min(chunk, remaining)
        try:
            address = device.allocate(part)
        except OutOfMemoryError:
            chunk = part // 2 // unit * unit
            continue
        chunks.append(Chunk(address, part, start))
        start += part // WORD
        remaining -= part
    return chunks


def chosen(chunks: Sequence[Chunk], size: float, seed: int) -> list[Chunk]:
    """Return as many chunks, at random, as hold so many bytes or just more; all where there are fewer."""
    selection: list[Chunk] = []
    for chunk in random.Random(seed).sample(chunks, len(chunks)):  # noqa: S311 (the choice is no secret)
        if sum(item.size for item in selection) >= size:
            break
        selection.append(chunk)
    return sorted(selection, key=lambda chunk: chunk.start)


class Memory:
    """The kernels of a memory test, and their counters on the GPU."""

    def __init__(self, device: Device, seed: int) -> None:
        self.device = device
        self.seed = seed
        self._fill = device.kernel("memory", "mem_fill")
        self._verify = device.kernel("memory", "mem_verify")
        self._tally = device.allocate(_TALLY.size)
        self._blocks = _BLOCKS_PER_SM * device.sms

    def close(self) -> None:
        """Free the counters."""
        self.device.free(self._tally)

    def flip_bit(self, chunk: Chunk) -> tuple[int, int]:
        """Flip one bit of a chunk; return the test's number of its word, and the bit."""
        place = random.Random(self.seed)  # noqa: S311 (any place will do)
        index, bit = place.randrange(chunk.words), 1 << place.randrange(64)
        address = chunk.address + index * WORD
        word = struct.unpack("<Q", self.device.download(address, WORD))[0]
        self.device.upload(address, struct.pack("<Q", word ^ bit))
        return chunk.start + index, bit

    def fill(self, chunk: Chunk, *, mask: int = ALL) -> None:
        """Start to write the pattern; doesn't wait."""
        numbers = (chunk.address, chunk.words, chunk.start, mask, self.seed, 0)
        self.device.launch(self._fill, self._blocks, [U64(number) for number in numbers])

    def verify(self, chunk: Chunk, *, flip: int = 0, mask: int = ALL, rewrite: bool = False) -> Tally:
        """Compare with the pattern; with ``rewrite`` leave its complement there."""
        self.device.upload(self._tally, _TALLY.pack(0, 0, ALL, 0))
        numbers = (chunk.address, chunk.words, chunk.start, mask, self.seed, flip, self._tally)
        self.device.launch(self._verify, self._blocks, [*(U64(number) for number in numbers), U32(rewrite)])
        return Tally(*_TALLY.unpack(self.device.download(self._tally, _TALLY.size)))


def complaint(memory: Memory, chunk: Chunk, tally: Tally, *, flip: int = 0, mask: int = ALL) -> str:
    """Return what is wrong with a chunk, or an empty string."""
    if tally.wrong:
        address = chunk.address + (tally.lowest - chunk.start) * WORD
        expected = reference.pattern(tally.lowest, memory.seed, flip=flip, mask=mask)
        summary = (
            f"{tally.wrong} wrong words, the first at {address:#x} (byte {tally.lowest * WORD} of the test): "
        )
        if tally.wrong == 1:
            return f"{summary}expected {expected:#018x}, found {expected ^ tally.bits:#018x}"
        return (
            f"{summary}expected {expected:#018x}; bits {tally.bits:#018x} were wrong in one word or another"
        )
    if tally.compared != chunk.words:
        return f"the GPU compared {tally.compared} of {chunk.words} words at {chunk.address:#x}"
    return ""


def _march(memory: Memory, chunks: Sequence[Chunk], *, corrupt: bool) -> tuple[int, str]:
    """Write all, read all and write the complement, read that; return the wrong words and the first complaint."""
    for chunk in chunks:
        memory.fill(chunk)
    if corrupt:
        memory.flip_bit(chunks[0])
    for flip, rewrite in ((0, True), (ALL, False)):
        wrong, first = 0, ""
        for chunk in chunks:
            tally = memory.verify(chunk, flip=flip, rewrite=rewrite)
            wrong += tally.wrong
            first = first or complaint(memory, chunk, tally, flip=flip)
        if first:
            return max(wrong, 1), first
    return 0, ""


def notices(memory: Memory, chunk: Chunk) -> str:
    """Return an empty string where verification finds one bit that is flipped on purpose, and nothing else.

    The chunk holds the complement of its pattern.
    """
    index, bit = memory.flip_bit(chunk)
    tally = memory.verify(chunk, flip=ALL)
    if tally == Tally(chunk.words, 1, index, bit):
        return ""
    return f"bit {bit:#018x} of word {index} was flipped on purpose, but verification found {tally}"


def measure(
    device: Device,
    fraction: float,
    seeds: Sequence[int],
    seconds: float,
    *,
    corrupt: bool = False,
    chunk: int = CHUNK,
    unit: int = UNIT,
) -> Tested:
    """Test a fraction of the free memory with each seed in turn until the time is up, at least once.

    ``corrupt`` flips one bit between writing and reading, for a drill. Raises NodeError.
    """
    began = time.monotonic()
    free, _ = device.memory()
    chunks = allocate(device, allocatable(free, unit), chunk, unit)
    try:
        if sum(item.size for item in chunks) < allocatable(free, unit) or not chunks:
            allocated = sum(item.size for item in chunks)
            outcome = Outcome("error", 0, f"only {allocated} of {free} free bytes could be allocated")
            part: list[Chunk] = []
        else:
            part = chosen(chunks, min(fraction, OF_FREE) * free, seeds[0])
            outcome = _passes(device, part, seeds, began + seconds, corrupt=corrupt)
    finally:
        for item in chunks:
            device.free(item.address)
    tested = sum(item.size for item in part)
    detail = outcome.detail or f"{tested} of {free} free bytes"
    measurement = Measurement(
        "mem.pattern",
        device.uuid,
        outcome.status,
        None if outcome.status == "error" else float(outcome.wrong),
        "mismatches",
        detail[:DETAIL_CHARACTERS],
        outcome.seed,
        round(time.monotonic() - began, 3),
    )
    return Tested(measurement, free, tested)


def _passes(
    device: Device, part: Sequence[Chunk], seeds: Sequence[int], end: float, *, corrupt: bool
) -> Outcome:
    for seed in itertools.cycle(seeds):
        memory = Memory(device, seed)
        try:
            wrong, failure = _march(memory, part, corrupt=corrupt)
            if not failure and (missed := notices(memory, part[0])):
                wrong, failure = 1, missed
        finally:
            memory.close()
        if failure:
            return Outcome("failed", wrong, failure, seed)
        if time.monotonic() >= end:
            break
    return Outcome("done", seed=seeds[0])
