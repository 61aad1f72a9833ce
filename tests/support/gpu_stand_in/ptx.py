"""An interpreter that runs PTX text on the host: the instructions that the node's kernels use, as in the PTX ISA.

It involves neither a GPU nor the program under test: it executes a kernel thread by thread, from its text only. The
threads of a warp run one after another up to an ``mma``, where they meet.

A register holds bits, as a Python int. Memory is one bytearray per allocation; an access outside all of them, or an
unaligned one, is an error, as on a GPU.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from tests.support.gpu_stand_in import fragments
from tests.support.gpu_stand_in.ptx_text import BITS, Instruction, Kernel, PtxError, parse

__all__ = ["Kernel", "Memory", "PtxError", "from_float", "fused", "launch", "parse", "rounded", "to_float"]

WARP = 32


@dataclass
class Memory:
    """A GPU's memory: allocations with a gap between them, so that an access outside one is noticed."""

    blocks: dict[int, bytearray] = field(default_factory=dict)
    following: int = 0x7F00_0000_0000

    def allocate(self, size: int) -> int:
        """Allocate this many bytes, all 0xCC, and return their address."""
        address = self.following
        self.blocks[address] = bytearray(b"\xcc" * size)
        self.following += (size + 0x1FFF) // 0x1000 * 0x1000
        return address

    def place(self, address: int, size: int, alignment: int = 1) -> tuple[bytearray, int]:
        """Return the allocation that holds the bytes and their offset. Raises PtxError if none does or if unaligned."""
        if address % alignment:
            raise PtxError(f"{address:#x} is not aligned to {alignment}")
        for start, block in self.blocks.items():
            if start <= address and address + size <= start + len(block):
                return block, address - start
        raise PtxError(f"{size} bytes at {address:#x} lie in no allocation")

    def read(self, address: int, size: int) -> int:
        """Return an aligned little-endian number."""
        block, at = self.place(address, size, size)
        return int.from_bytes(block[at : at + size], "little")

    def write(self, address: int, size: int, value: int) -> None:
        """Write an aligned little-endian number."""
        block, at = self.place(address, size, size)
        block[at : at + size] = value.to_bytes(size, "little")


# -- numbers ---------------------------------------------------------------------------------------------------


def signed(value: int, bits: int) -> int:
    """Return bits read as two's complement."""
    return value - (1 << bits) if value >> bits - 1 else value


def to_float(bits: int, size: int) -> float:
    """Return the number that 32 or 64 bits stand for."""
    return float(
        struct.unpack("<f" if size == 32 else "<d", bits.to_bytes(size // 8, "little"))[0],
    )


def from_float(value: float, size: int) -> int:
    """Return a number's bits; the number must be representable in this size."""
    return int.from_bytes(struct.pack("<f" if size == 32 else "<d", value), "little")


def rounded(exact: Fraction, size: int) -> int:
    """Return the bits of the nearest normal number, ties to even, computed only with whole numbers."""
    mantissa, exponent_bits = (24, 8) if size == 32 else (53, 11)
    if exact == 0:
        return 0
    sign, exact = (1, -exact) if exact < 0 else (0, exact)
    exponent = exact.numerator.bit_length() - exact.denominator.bit_length()
    if Fraction(2) ** exponent > exact:
        exponent -= 1
    scaled = exact * Fraction(2) ** (mantissa - 1 - exponent)
    whole, rest = divmod(scaled.numerator, scaled.denominator)
    if 2 * rest > scaled.denominator or (2 * rest == scaled.denominator and whole & 1):
        whole += 1
    if whole >> mantissa:
        whole, exponent = whole >> 1, exponent + 1
    bias = (1 << exponent_bits - 1) - 1
    if not 0 < exponent + bias < (1 << exponent_bits) - 1:
        raise PtxError("beyond the normal numbers: this interpreter has no more of IEEE 754")
    fields = (exponent + bias) << mantissa - 1 | whole & (1 << mantissa - 1) - 1
    return sign << size - 1 | fields


def fused(a: float, b: float, c: float, size: int) -> int:
    """Return the bits of a * b + c, rounded once."""
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return from_float(a * b + c, size)  # which zero: the host's fp64 follows IEEE 754
    return rounded(exact, size)


# -- threads ---------------------------------------------------------------------------------------------------

Meeting = Generator[tuple[Instruction, list[list[int]]], list[int], None]


class Thread:
    """One thread: its registers, and a generator that stops at each ``mma``."""

    def __init__(self, kernel: Kernel, memory: Memory, parameters: dict[str, int], special: dict[str, int]):
        self.kernel = kernel
        self.memory = memory
        self.parameters = parameters
        self.special = special
        self.registers = dict.fromkeys(kernel.registers, 0)
        self.executed = 0

    def value(self, operand: str | tuple[str, ...], bits: int = 64) -> int:
        """Return an operand's bits: of a register, a special register or a number."""
        name = str(operand)
        register = self.registers.get(name)
        if register is not None:
            return register
        return self.special[name] if name in self.special else _number(name, bits)

    def set(self, operand: str | tuple[str, ...], value: int) -> None:
        """Write a register. Raises PtxError if it isn't declared."""
        name = str(operand)
        if name not in self.registers:
            raise PtxError(f"{name} is not declared")
        self.registers[name] = value & self.kernel.registers[name]

    def address(self, operand: str | tuple[str, ...]) -> int:
        """Return the address in ``[register+offset]``."""
        name, offset = _place(str(operand))
        return self.value(name) + offset

    def run(self, limit: int) -> Meeting:
        """Run to the end. Raises PtxError after ``limit`` instructions."""
        position = 0
        while position < len(self.kernel.code):
            self.executed += 1
            if self.executed > limit:
                raise PtxError(f"{self.kernel.name} did not end within {limit} instructions")
            instruction = self.kernel.code[position]
            position += 1
            if instruction.guard and bool(self.registers[instruction.guard]) == instruction.negated:
                continue
            if instruction.name == "ret":
                return
            if instruction.name == "bra":
                position = self.kernel.labels[str(instruction.operands[0])]
            elif instruction.name == "mma":
                matrices = [[self.value(name) for name in group] for group in instruction.operands[1:]]
                answer = yield instruction, matrices
                for name, value in zip(instruction.operands[0], answer, strict=True):
                    self.set(name, value)
            else:
                self.step(instruction)

    def step(self, instruction: Instruction) -> None:
        """Execute an instruction that concerns only this thread."""
        _STEPS[instruction.name](self, instruction)


@functools.cache
def _number(text: str, bits: int) -> int:
    if text[:2] in ("0f", "0d"):
        return int.from_bytes(bytes.fromhex(text[2:]), "big")
    try:
        return int(text, 0) & (1 << bits) - 1
    except ValueError:
        raise PtxError(f"{text} is neither a register nor a number") from None


@functools.cache
def _place(text: str) -> tuple[str, int]:
    """Return the register and the offset of ``[register+offset]``."""
    name, _, offset = text[1:-1].partition("+")
    return name.strip(), int(offset or "0", 0)


def _load(thread: Thread, i: Instruction) -> None:
    size = i.bits // 8
    if i.suffixes[0] == "param":
        name = str(i.operands[1])[1:-1]
        thread.set(i.operands[0], thread.parameters[name])
        return
    targets = i.operands[0] if isinstance(i.operands[0], tuple) else (i.operands[0],)
    address = thread.address(i.operands[1])
    thread.memory.place(address, size * len(targets), size * len(targets))  # vectors are aligned as a whole
    for number, target in enumerate(targets):
        thread.set(target, thread.memory.read(address + size * number, size))


def _store(thread: Thread, i: Instruction) -> None:
    size = i.bits // 8
    sources = i.operands[1] if isinstance(i.operands[1], tuple) else (i.operands[1],)
    address = thread.address(i.operands[0])
    thread.memory.place(address, size * len(sources), size * len(sources))
    for number, source in enumerate(sources):
        thread.memory.write(address + size * number, size, thread.value(source))


def _reduce(thread: Thread, i: Instruction) -> None:
    size = i.bits // 8
    address = thread.address(i.operands[0])
    before, value = thread.memory.read(address, size), thread.value(i.operands[1])
    after = {"add": before + value, "min": min(before, value), "or": before | value}[i.suffixes[1]]
    thread.memory.write(address, size, after & (1 << 8 * size) - 1)


def _move(thread: Thread, i: Instruction) -> None:
    source = i.operands[1]
    if isinstance(source, tuple):  # mov.b64 %to, {%low, %high}
        low, high = (thread.value(word) for word in source)
        thread.set(i.operands[0], low | high << 32)
    else:
        thread.set(i.operands[0], thread.value(source, i.bits))


def _compare(thread: Thread, i: Instruction) -> None:
    a, b = (thread.value(word, i.bits) for word in i.operands[1:3])
    is_true = {"eq": a == b, "ne": a != b, "lt": a < b, "ge": a >= b}[i.suffixes[0]]
    if i.suffixes[1] == "and":
        is_true = is_true and bool(thread.value(i.operands[3]))
    thread.set(i.operands[0], is_true)


def _select(thread: Thread, i: Instruction) -> None:
    chosen = i.operands[1] if thread.value(i.operands[3]) else i.operands[2]
    thread.set(i.operands[0], thread.value(chosen, i.bits))


def _multiply(thread: Thread, i: Instruction) -> None:
    size = i.bits
    a, b = (thread.value(word, size) for word in i.operands[1:3])
    if i.suffixes[-1] in ("f32", "f64"):
        product = fused(to_float(a, size), to_float(b, size), 0.0, size)
        zero = from_float(to_float(a, size) * to_float(b, size), size) if product == 0 else product
        thread.set(i.operands[0], zero)
    elif i.suffixes[0] == "hi":
        thread.set(i.operands[0], a * b >> size)
    else:
        thread.set(i.operands[0], a * b)


def _multiply_add(thread: Thread, i: Instruction) -> None:
    size = i.bits
    a, b = (thread.value(word, size) for word in i.operands[1:3])
    c = thread.value(i.operands[3], 64 if i.suffixes[0] == "wide" else size)
    thread.set(i.operands[0], a * b + c)


def _fused(thread: Thread, i: Instruction) -> None:
    size = i.bits
    a, b, c = (to_float(thread.value(word, size), size) for word in i.operands[1:])
    thread.set(i.operands[0], fused(a, b, c, size))


def _negate(thread: Thread, i: Instruction) -> None:
    thread.set(i.operands[0], thread.value(i.operands[1]) ^ 1 << i.bits - 1)


def _funnel(thread: Thread, i: Instruction) -> None:
    low, high, count = (thread.value(word, 32) for word in i.operands[1:])
    thread.set(i.operands[0], (high << 32 | low) << (count & 31) >> 32)


def _lookup(thread: Thread, i: Instruction) -> None:
    a, b, c = (thread.value(word, 32) for word in i.operands[1:4])
    table = thread.value(i.operands[4])
    result = 0
    for bit in range(32):
        index = (a >> bit & 1) << 2 | (b >> bit & 1) << 1 | c >> bit & 1
        result |= (table >> index & 1) << bit
    thread.set(i.operands[0], result)


def _extract(thread: Thread, i: Instruction) -> None:
    a, start, length = (thread.value(word, 32) for word in i.operands[1:])
    thread.set(i.operands[0], signed(a >> start & (1 << length) - 1, length))


def _convert(thread: Thread, i: Instruction) -> None:
    value = thread.value(i.operands[1])
    if i.suffixes[-1] == "s32":
        value = rounded(Fraction(signed(value, 32)), BITS[i.suffixes[1]])
    thread.set(i.operands[0], value)


def _simple(work: Callable[..., int]) -> Callable[[Thread, Instruction], None]:
    def step(thread: Thread, i: Instruction) -> None:
        thread.set(i.operands[0], work(*(thread.value(word, i.bits) for word in i.operands[1:])))

    return step


_STEPS: dict[str, Callable[[Thread, Instruction], None]] = {
    "ld": _load,
    "st": _store,
    "red": _reduce,
    "mov": _move,
    "setp": _compare,
    "selp": _select,
    "mul": _multiply,
    "mad": _multiply_add,
    "fma": _fused,
    "neg": _negate,
    "shf": _funnel,
    "lop3": _lookup,
    "bfe": _extract,
    "cvt": _convert,
    "cvta": _simple(lambda a: a),
    "add": _simple(lambda a, b: a + b),
    "sub": _simple(lambda a, b: a - b),
    "and": _simple(lambda a, b: a & b),
    "or": _simple(lambda a, b: a | b),
    "xor": _simple(lambda a, b: a ^ b),
    "not": _simple(lambda a: ~a),
    "min": _simple(min),
    "shl": _simple(lambda a, b: a << b),
    "shr": _simple(lambda a, b: a >> b),
    "popc": _simple(int.bit_count),
}


# -- grids -----------------------------------------------------------------------------------------------------


def launch(
    kernel: Kernel,
    memory: Memory,
    arguments: Sequence[int],
    *,
    blocks: int,
    threads: int,
    places: Sequence[int] | None = None,
    limit: int = 1_000_000,
) -> None:
    """Run a grid to its end. ``places`` has the SM of each block. Raises PtxError where a GPU would stop."""
    assert len(arguments) == len(kernel.parameters), kernel.name
    parameters = {name: value for (name, _), value in zip(kernel.parameters, arguments, strict=True)}
    for block in range(blocks):
        for start in range(0, threads, WARP):
            warp = []
            for thread in range(start, min(start + WARP, threads)):
                special = {"%tid.x": thread, "%ntid.x": threads, "%ctaid.x": block, "%nctaid.x": blocks}
                special["%smid"] = places[block] if places else block
                warp.append(Thread(kernel, memory, parameters, special))
            _run_warp(warp, limit)


def _run_warp(warp: Sequence[Thread], limit: int) -> None:
    """Run a warp's threads up to each ``mma``, where all must reach the same one."""
    running = [thread.run(limit) for thread in warp]
    answers: list[list[int]] | None = None
    while True:
        met = []
        for number, thread in enumerate(running):
            try:
                met.append(next(thread) if answers is None else thread.send(answers[number]))
            except StopIteration:
                continue
        if not met:
            return
        if len(met) != WARP or len({id(instruction) for instruction, _ in met}) != 1:
            raise PtxError("the threads of a warp do not meet at their mma")
        instruction = met[0][0]
        answers = fragments.multiply(".".join(instruction.suffixes), [matrices for _, matrices in met])
