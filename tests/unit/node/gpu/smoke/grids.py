"""The node's kernels on the interpreter: what the tests launch, and how."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from pathlib import Path

from image_builder.node.gpu.smoke import reference
from image_builder.node.gpu.smoke.reference import Case
from tests.support.gpu_stand_in import ptx

KERNELS = Path(reference.__file__).with_name("kernels")


@functools.cache
def module(name: str) -> dict[str, ptx.Kernel]:
    """Return the entries of one of the program's modules."""
    return ptx.parse((KERNELS / f"{name}.ptx").read_text())


def block_of(
    case: Case, operands: bytes, expected: Sequence[int], *, steps: int, rounds: int, threads: int
) -> bytes:
    """Return the records that one block of a kernel with a known answer writes."""
    memory = ptx.Memory()
    records = memory.allocate(threads * reference.RECORD.size)
    places = memory.allocate(4)
    inputs = memory.allocate(len(operands))
    memory.blocks[inputs][:] = operands
    expectations = memory.allocate(8 * len(expected))
    memory.blocks[expectations][:] = struct.pack(f"<{len(expected)}Q", *expected)
    arguments = [records, places, inputs, expectations, steps, rounds]
    ptx.launch(module(case.module)[case.kernel], memory, arguments, blocks=1, threads=threads, places=[77])
    assert memory.read(places, 4) == 77
    return bytes(memory.blocks[records])
