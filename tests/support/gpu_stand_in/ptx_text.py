"""A parser for PTX text: the instructions that the node's kernels use; anything else is an error."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.support.gpu_stand_in import fragments

BITS = {"pred": 1, "b32": 32, "u32": 32, "s32": 32, "f32": 32, "b64": 64, "u64": 64, "f64": 64}
# The supported forms of each instruction; anything else is an error.
_FORMS: dict[str, frozenset[str]] = {
    name: frozenset(forms.split())
    for name, forms in {
        "ld": "param.u32 param.u64 global.v4.u32 volatile.global.u32 volatile.global.u64 volatile.global.f32 "
        "volatile.global.f64 volatile.global.v2.u32 volatile.global.v2.u64 volatile.global.v2.f32 "
        "volatile.global.v4.u32",
        "st": "global.u32 global.u64 global.v4.u32 global.v2.u64",
        "red": "global.add.u64 global.min.u64 global.or.b64",
        "mov": "u32 u64 b32 b64 s32 f32 f64",
        "setp": "eq.u32 ne.u32 lt.u32 ge.u32 eq.u64 ne.u64 ge.u64 eq.and.u32",
        "selp": "b32 b64",
        "mul": "lo.u32 lo.u64 hi.u32 wide.u32 rn.f32 rn.f64",
        "mad": "lo.u32 lo.u64 wide.u32",
        "fma": "rn.f32 rn.f64",
        "neg": "f32 f64",
        "shf": "l.wrap.b32",
        "lop3": "b32",
        "bfe": "s32",
        "cvt": "u64.u32 u32.u64 rn.f32.s32 rn.f64.s32",
        "cvta": "to.global.u64",
        "add": "u32 u64",
        "sub": "u64",
        "and": "b64",
        "or": "b64",
        "xor": "b32 b64",
        "not": "b64",
        "min": "u64",
        "shl": "b64",
        "shr": "u64",
        "popc": "b32",
        "mma": " ".join(fragments.SHAPES),
    }.items()
}
_FORMS["bra"] = _FORMS["ret"] = frozenset([""])
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_ENTRY = re.compile(r"\.visible \.entry (\w+)\((.*?)\)\s*\{(.*?)\n\}", re.DOTALL)
_INSTRUCTION = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.]*)\s*(.*)", re.DOTALL)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")


class PtxError(Exception):
    """The text isn't understood, or does something that a GPU would stop for."""


@dataclass(frozen=True)
class Instruction:
    """``@!%guard name.suffix operands``, parsed; a vector operand is a tuple of names."""

    name: str
    suffixes: tuple[str, ...]
    operands: tuple[str | tuple[str, ...], ...]
    guard: str
    negated: bool
    bits: int  # of the type
    text: str


@dataclass(frozen=True)
class Kernel:
    """An entry: its parameters (name, type), its instructions, the positions of its labels, its registers' masks."""

    name: str
    parameters: tuple[tuple[str, str], ...]
    code: tuple[Instruction, ...]
    labels: dict[str, int]
    registers: dict[str, int]


def parse(text: str) -> dict[str, Kernel]:
    """Return the entries of a module by name. Raises PtxError if something isn't understood."""
    kernels = {}
    plain = _COMMENT.sub("", text)
    for name, parameters, body in _ENTRY.findall(plain):
        kernels[name] = _kernel(name, parameters, body)
    if plain.count(".entry") != len(kernels):
        raise PtxError("an entry could not be read")
    return kernels


def _kernel(name: str, parameters: str, body: str) -> Kernel:
    registers: dict[str, int] = {}
    labels: dict[str, int] = {}
    code: list[Instruction] = []
    for statement in re.split(r";|(?<=:)\n", body):
        text = statement.strip()
        if text.endswith(":"):
            labels[text[:-1]] = len(code)
        elif text.startswith(".reg"):
            registers |= _registers(text)
        elif text:
            code.append(_instruction(text))
    pairs = re.findall(r"\.param \.(\w+) (\w+)", parameters)
    return Kernel(name, tuple((word, kind) for kind, word in pairs), tuple(code), labels, registers)


def _registers(declaration: str) -> dict[str, int]:
    _, kind, names = declaration.split(None, 2)
    registers = {}
    for name in names.split(","):
        stem, _, count = name.strip().rstrip(">").partition("<")
        for register in [f"{stem}{n}" for n in range(int(count))] if count else [stem]:
            registers[register] = (1 << BITS[kind[1:]]) - 1
    return registers


def _instruction(statement: str) -> Instruction:
    match = _INSTRUCTION.fullmatch(statement)
    if not match:
        raise PtxError(f"not understood: {statement}")
    negated, guard, name, rest = match.groups()
    operands: list[str | tuple[str, ...]] = []
    for operand in _OPERAND.findall(rest):
        text = operand.strip()
        operands.append(tuple(w.strip() for w in text[1:-1].split(",")) if text.startswith("{") else text)
    head, _, form = name.partition(".")
    if form not in _FORMS.get(head, ()):
        raise PtxError(f"not understood: {statement}")
    bits = BITS.get(form.rpartition(".")[2], 0)
    return Instruction(
        head, tuple(form.split(".")), tuple(operands), guard or "", bool(negated), bits, statement
    )
