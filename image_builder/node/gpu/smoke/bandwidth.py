"""Memory bandwidth: within the GPU, to and from the host, to another GPU. All that arrives is compared.

GB are decimal. Each copy is timed by the GPU's own events, and the best of several counts: a fault is slow each time,
while a busy host is not.

GPUs share PCIe switches (two of them behind one port of an ND A100 v4), and what a copy reaches depends on which NUMA
node its host memory is of, which virtual machines state wrongly or not at all. So the timed copies of a node's GPUs
take turns, and are made from each NUMA node; the best counts, as the floors come from tools that choose the right one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from image_builder.node import files, status
from image_builder.node.errors import NodeError
from image_builder.node.gpu.model import DETAIL_CHARACTERS, Measurement
from image_builder.node.gpu.smoke import reference
from image_builder.node.gpu.smoke.cuda import U64, Device
from image_builder.node.gpu.smoke.memory import WORD, Chunk, Memory, complaint

HBM_BYTES = 4 << 30  # far more than any cache
LINK_BYTES = 256 << 20
TILE = 1 << 17  # words that the pattern of a transfer repeats after: the host computes 1 MiB, not all
Turn = Callable[[], AbstractContextManager[None]]
_OF_FREE = 0.4  # of two buffers each
_BLOCKS_PER_SM = 8
LOCK = status.DIRECTORY / "gpu-copies.lock"
# A turn takes a tenth of a second to a second. Longer means waiting for a worker that hangs.
TURN_SECONDS = 20.0
_NODES = Path("/sys/devices/system/node")


@contextmanager
def _buffer(device: Device, size: int) -> Iterator[Chunk]:
    address = device.allocate(size)
    try:
        yield Chunk(address, size, 0)
    finally:
        device.free(address)


@contextmanager
def _patterns(device: Device, seed: int) -> Iterator[Memory]:
    memory = Memory(device, seed)
    try:
        yield memory
    finally:
        memory.close()


def _best(device: Device, work: Callable[[], None], copies: int) -> float:
    """Return the shortest of the copies, in seconds, after one that isn't counted."""
    work()
    return min(device.timed(work) for _ in range(copies))


def _measured(
    device: Device, id: str, size: int, seconds: float, failure: str, seed: int, began: float
) -> Measurement:
    detail = failure or f"{size} bytes, all compared"
    return Measurement(
        id,
        device.uuid,
        "failed" if failure else "done",
        None if failure else round(size / seconds / 1e9, 2),
        "GB/s",
        detail[:DETAIL_CHARACTERS],
        seed,
        round(time.monotonic() - began, 3),
    )


def hbm(
    device: Device, seed: int, copies: int, *, size: int = HBM_BYTES, corrupt: bool = False
) -> Measurement:
    """Copy within the GPU's memory by a kernel; what is read and what is written both count. Raises NodeError."""
    began = time.monotonic()
    size = min(size, int(device.memory()[0] * _OF_FREE)) // 4096 * 4096
    kernel = device.kernel("memory", "stream_copy")
    with (
        _buffer(device, size) as source,
        _buffer(device, size) as target,
        _patterns(device, seed) as patterns,
        _patterns(device, seed + 1) as others,
    ):
        patterns.fill(source)
        others.fill(target)  # so that what is found there later was copied
        arguments = [U64(target.address), U64(source.address), U64(size // 16)]
        seconds = _best(device, lambda: device.launch(kernel, _BLOCKS_PER_SM * device.sms, arguments), copies)
        if corrupt:
            patterns.flip_bit(target)
        failure = complaint(patterns, target, patterns.verify(target))
    return _measured(device, "bw.hbm", 2 * size, seconds, failure, seed, began)


def to_device(
    device: Device,
    seed: int,
    copies: int,
    *,
    size: int = LINK_BYTES,
    tile: int = TILE,
    corrupt: bool = False,
    turn: Turn = nullcontext,
) -> Measurement:
    """Copy from pinned memory to the GPU, which compares all of it; timed in a ``turn``. Raises NodeError."""
    began = time.monotonic()
    golden = reference.pattern_bytes(tile, seed)
    with (
        _buffer(device, size) as target,
        _patterns(device, seed) as patterns,
        _patterns(device, seed + 1) as others,
        device.pinned(size) as view,
    ):
        for start in range(0, size, len(golden)):
            view[start : start + len(golden)] = golden
        others.fill(target)
        with turn():
            seconds = _best(device, lambda: device.from_pinned(target.address, view), copies)
        if corrupt:
            patterns.flip_bit(target)
        failure = complaint(patterns, target, patterns.verify(target, mask=tile - 1), mask=tile - 1)
    return _measured(device, "bw.h2d", size, seconds, failure, seed, began)


def to_host(
    device: Device,
    seed: int,
    copies: int,
    *,
    size: int = LINK_BYTES,
    tile: int = TILE,
    corrupt: bool = False,
    turn: Turn = nullcontext,
) -> Measurement:
    """Copy from the GPU to pinned memory, where the host compares all of it; timed in a ``turn``. Raises NodeError."""
    began = time.monotonic()
    golden = reference.pattern_bytes(tile, seed)
    with (
        _buffer(device, size) as source,
        _patterns(device, seed) as patterns,
        device.pinned(size) as view,
    ):
        nothing = bytes(len(golden))
        for start in range(0, size, len(golden)):
            view[start : start + len(golden)] = nothing
        patterns.fill(source, mask=tile - 1)
        if corrupt:
            patterns.flip_bit(source)
        with turn():
            seconds = _best(device, lambda: device.to_pinned(view, source.address), copies)
            device.synchronize()
        failure = differs(view, golden)
    return _measured(device, "bw.d2h", size, seconds, failure, seed, began)


def differs(view: memoryview, golden: bytes) -> str:
    """Return where memory differs from a tile that repeats, or an empty string."""
    for start in range(0, len(view), len(golden)):
        part = view[start : start + len(golden)]
        if part == golden:
            continue
        wrong = [at for at in range(0, len(golden), WORD) if part[at : at + WORD] != golden[at : at + WORD]]
        at = wrong[0]
        expected, actual = (int.from_bytes(data[at : at + WORD], "little") for data in (golden, bytes(part)))
        place = f"{len(wrong)} wrong words in the {len(golden)} bytes from byte {start}"
        return f"{place}, the first at byte {start + at}: expected {expected:#018x}, found {actual:#018x}"
    return ""


def peer(
    device: Device, peers: list[Device], seed: int, copies: int, *, size: int = LINK_BYTES
) -> Measurement:
    """Copy to the first of the peers that NVLink reaches; that GPU compares all of it. Raises NodeError."""
    began = time.monotonic()
    linked = next((candidate for candidate in peers if device.is_linked(candidate)), None)
    if linked is None:
        return Measurement("bw.p2p", device.uuid, "skipped", None, "GB/s", "no peer by NVLink", seed)
    device.connect(linked)
    with (
        _buffer(device, size) as source,
        _buffer(linked, size) as target,
        _patterns(device, seed) as patterns,
        _patterns(linked, seed) as arrived,
        _patterns(linked, seed + 1) as others,
    ):
        patterns.fill(source)
        others.fill(target)
        linked.synchronize()
        seconds = _best(device, lambda: device.copy_to(linked, target.address, source.address, size), copies)
        device.synchronize()
        failure = complaint(arrived, target, arrived.verify(target))
    measurement = _measured(device, "bw.p2p", size, seconds, failure, seed, began)
    return replace(measurement, detail=f"to {linked.uuid}: {measurement.detail}"[:DETAIL_CHARACTERS])


# -- turns, and NUMA nodes -------------------------------------------------------------------------------------


@contextmanager
def turn() -> Iterator[None]:
    """Wait until no other GPU of this machine copies. Raises NodeError (``gpu.turn``): timed out."""
    with ExitStack() as stack:
        try:
            stack.enter_context(files.lock(LOCK, TURN_SECONDS))
        except TimeoutError as error:
            message = f"timed out: another GPU's copies took more than {TURN_SECONDS:g} s"
            raise NodeError("gpu.turn", message) from error
        except OSError as error:
            raise NodeError("gpu.turn", f"{LOCK}: {error.strerror}") from error
        yield


def from_each_node(measure: Callable[[], Measurement], nodes: Mapping[int, set[int]]) -> Measurement:
    """Measure from the processors of each NUMA node; return the best, or the first that isn't done.

    Pinned memory is of the node that it is allocated on. ``nodes`` are processors by the node's number.
    """
    if len(nodes) < 2:
        return measure()
    everywhere = os.sched_getaffinity(0)
    results: dict[int, Measurement] = {}
    try:
        for number, processors in nodes.items():
            os.sched_setaffinity(0, processors)
            results[number] = measure()
            if results[number].status != "done":
                break
    finally:
        os.sched_setaffinity(0, everywhere)
    chosen = max(results, key=lambda n: (results[n].status != "done", results[n].measured or 0.0))
    speeds = ", ".join(
        f"{result.measured:g} from {n}" for n, result in results.items() if result.measured is not None
    )
    detail = f"from NUMA node {chosen} ({speeds or 'nothing measured'}): {results[chosen].detail}"
    spent = round(sum(result.seconds for result in results.values()), 3)
    return replace(results[chosen], detail=detail[:DETAIL_CHARACTERS], seconds=spent)


def numa_nodes(directory: Path = _NODES) -> dict[int, set[int]]:
    """Return the processors of each NUMA node that this process may use; empty where the kernel reports none."""
    usable = os.sched_getaffinity(0)
    near_by_node = {}
    for path in sorted(directory.glob("node[0-9]*/cpulist")):
        near = processors(path.read_text()) & usable
        if near:
            near_by_node[int(path.parent.name.removeprefix("node"))] = near
    return near_by_node


def processors(text: str) -> set[int]:
    """Return the processors of a list as /sys writes it: ``0-3,8``."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            numbers |= set(range(int(first), int(last or first) + 1))
    return numbers
