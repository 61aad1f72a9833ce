"""A stand-in for libcuda.so.1: real C functions (ctypes callbacks), behind which PTX is interpreted on the host.

There is no GPU, so nothing here proves what one does. The program's own ctypes calls, allocations, launches and
comparisons run for real, and tests can inject errors where a broken GPU would have them. The blocks of a kernel with a
known answer differ only in where they write, so only one of them is interpreted and its records are copied.
"""

# ruff: noqa: ARG002, N802 (the methods have the driver's names and arguments)

from __future__ import annotations

import ctypes
import uuid as uuids
from collections.abc import Callable, Sequence
from ctypes import c_char_p, c_int, c_void_p
from dataclasses import dataclass, field
from typing import Any

from image_builder.node.gpu.smoke import cuda, reference
from tests.support.gpu_stand_in import ptx

OUT_OF_MEMORY, INVALID_PTX, ILLEGAL_ADDRESS, ECC = 2, 218, 700, 214
_NAMES = {
    OUT_OF_MEMORY: b"CUDA_ERROR_OUT_OF_MEMORY",
    INVALID_PTX: b"CUDA_ERROR_INVALID_PTX",
    ILLEGAL_ADDRESS: b"CUDA_ERROR_ILLEGAL_ADDRESS",
    ECC: b"CUDA_ERROR_ECC_UNCORRECTABLE",
}
KIB = 1024
AfterLaunch = Callable[["Gpu", str, Sequence[int]], None]


def _nothing(gpu: Gpu, kernel: str, arguments: Sequence[int]) -> None:
    """Do nothing: the GPU is healthy."""


@dataclass
class Gpu:
    """One GPU: what it reports about itself, and what is wrong with it.

    ``unused_sms`` never get a block. ``after_launch`` may change memory once a kernel has ended; ``refuses`` maps the
    names of functions to the errors that they return.
    """

    uuid: str
    sms: int = 2
    capability: tuple[int, int] = (7, 0)
    bytes: int = 256 * KIB
    unused_sms: frozenset[int] = frozenset()
    linked: bool = True
    after_launch: AfterLaunch = _nothing
    refuses: dict[str, int] = field(default_factory=dict)
    allocated: dict[int, int] = field(default_factory=dict)
    launches: int = 0


class Library:
    """A fake ``ctypes.CDLL``: functions by name. ``memory`` is that of all GPUs; pinned buffers aren't in it."""

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self.gpus = list(gpus)
        self.memory = ptx.Memory()
        self.raised: list[ptx.PtxError] = []
        self._current = 0
        self._modules: list[dict[str, ptx.Kernel]] = []
        self._functions: list[ptx.Kernel] = []
        self._names = [ctypes.create_string_buffer(name) for name in _NAMES.values()]
        self._pinned: dict[int, Any] = {}
        self._made = {name: self._function(name, types) for name, types in cuda.FUNCTIONS.items()}

    def __getitem__(self, name: str) -> Any:
        try:
            return self._made[name]
        except KeyError:
            raise AttributeError(name) from None  # as CDLL does

    def _function(self, name: str, types: tuple[Any, ...]) -> Any:
        # A callback gets a copy of what a c_char_p points to; these functions write there, so they get the address.
        kinds = [c_void_p if kind is c_char_p else kind for kind in types]
        work = getattr(self, f"_{name.removesuffix('_v2')}", None)

        def called(*arguments: Any) -> int:
            refused = self.gpu.refuses.get(name, 0) if self.gpus else 0
            if refused or work is None:
                return refused
            try:
                return int(work(*arguments) or 0)
            except ptx.PtxError as error:
                self.raised.append(error)
                return ILLEGAL_ADDRESS

        return ctypes.CFUNCTYPE(c_int, *kinds)(called)

    @property
    def gpu(self) -> Gpu:
        """The GPU of the current context; its handle is its index, its context index + 1."""
        return self.gpus[self._current]

    # -- devices -----------------------------------------------------------------------------------------------

    def _cuGetErrorName(self, code: int, to: Any) -> None:
        if code in _NAMES:
            to[0] = ctypes.cast(self._names[list(_NAMES).index(code)], c_char_p)

    def _cuDeviceGetCount(self, to: Any) -> None:
        to[0] = len(self.gpus)

    def _cuDeviceGet(self, to: Any, index: int) -> None:
        to[0] = index

    def _cuDeviceGetName(self, to: int, size: int, handle: int) -> None:
        ctypes.memmove(to, b"Interpreted\0", 12)

    def _cuDeviceGetUuid(self, to: int, handle: int) -> None:
        ctypes.memmove(to, uuids.UUID(self.gpus[handle].uuid.removeprefix("GPU-")).bytes, 16)

    def _cuDeviceGetPCIBusId(self, to: int, size: int, handle: int) -> None:
        ctypes.memmove(to, b"FFFF:00:00.0\0", 13)

    def _cuDeviceGetAttribute(self, to: Any, attribute: int, handle: int) -> None:
        gpu = self.gpus[handle]
        to[0] = {16: gpu.sms, 75: gpu.capability[0], 76: gpu.capability[1]}[attribute]

    def _cuDeviceGetP2PAttribute(self, to: Any, attribute: int, handle: int, peer: int) -> None:
        to[0] = int(self.gpus[handle].linked and self.gpus[peer].linked)

    def _cuDevicePrimaryCtxRetain(self, to: Any, handle: int) -> None:
        to[0] = handle + 1

    def _cuCtxSetCurrent(self, context: int) -> None:
        self._current = context - 1

    # -- kernels -----------------------------------------------------------------------------------------------

    def _cuModuleLoadDataEx(self, to: Any, image: int, count: int, options: Any, values: Any) -> int:
        try:
            self._modules.append(ptx.parse(ctypes.string_at(image).decode()))
        except ptx.PtxError as error:
            logs = {options[n]: values[n] for n in range(count)}
            message = str(error).encode()[: logs[cuda.JIT_ERROR_SIZE] - 1] + b"\0"
            ctypes.memmove(logs[cuda.JIT_ERROR_LOG], message, len(message))
            return INVALID_PTX
        to[0] = len(self._modules)
        return 0

    def _cuModuleGetFunction(self, to: Any, module: int, name: int) -> None:
        self._functions.append(self._modules[module - 1][ctypes.string_at(name).decode()])
        to[0] = len(self._functions)

    def _cuLaunchKernel(self, function: int, *more: Any) -> None:
        blocks, _, _, threads, _, _, _, _, pointers, _ = more
        kernel = self._functions[function - 1]
        arguments = [
            ctypes.cast(pointers[n], ctypes.POINTER(ctypes.c_uint32 if kind == "u32" else ctypes.c_uint64))[0]
            for n, (_, kind) in enumerate(kernel.parameters)
        ]
        usable = [sm for sm in range(self.gpu.sms) if sm not in self.gpu.unused_sms]
        places = [usable[block % len(usable)] for block in range(blocks)]
        if kernel.name.startswith(("kat_", "det_")):
            self._known(kernel, arguments, places, threads)
        else:
            ptx.launch(kernel, self.memory, arguments, blocks=blocks, threads=threads, places=places)
        self.gpu.launches += 1
        self.gpu.after_launch(self.gpu, kernel.name, arguments)

    def _known(self, kernel: ptx.Kernel, arguments: list[int], places: list[int], threads: int) -> None:
        ptx.launch(kernel, self.memory, arguments, blocks=1, threads=threads, places=places)
        size = threads * reference.RECORD.size
        block, at = self.memory.place(arguments[0], size * len(places))
        for number, sm in enumerate(places):
            block[at + number * size : at + (number + 1) * size] = block[at : at + size]
            self.memory.write(arguments[1] + 4 * number, 4, sm)

    # -- memory ------------------------------------------------------------------------------------------------

    def _cuMemGetInfo(self, free: Any, total: Any) -> None:
        free[0], total[0] = self.gpu.bytes - sum(self.gpu.allocated.values()), self.gpu.bytes

    def _cuMemAlloc(self, to: Any, size: int) -> int:
        if size + sum(self.gpu.allocated.values()) > self.gpu.bytes:
            return OUT_OF_MEMORY
        to[0] = self.memory.allocate(size)
        self.gpu.allocated[to[0]] = size
        return 0

    def _cuMemFree(self, address: int) -> None:
        owner = next(gpu for gpu in self.gpus if address in gpu.allocated)
        del owner.allocated[address], self.memory.blocks[address]

    def _cuMemHostAlloc(self, to: Any, size: int, flags: int) -> None:
        buffer = ctypes.create_string_buffer(size)
        to[0] = ctypes.addressof(buffer)
        self._pinned[to[0]] = buffer

    def _cuMemFreeHost(self, address: int) -> None:
        del self._pinned[address]

    def _cuMemsetD8(self, to: int, value: int, size: int) -> None:
        block, at = self.memory.place(to, size)
        block[at : at + size] = bytes([value]) * size

    def _cuMemcpyHtoD(self, to: int, source: int, size: int) -> None:
        block, at = self.memory.place(to, size)
        block[at : at + size] = ctypes.string_at(source, size)

    def _cuMemcpyDtoH(self, to: int, source: int, size: int) -> None:
        block, at = self.memory.place(source, size)
        ctypes.memmove(to, bytes(block[at : at + size]), size)

    def _cuMemcpyHtoDAsync(self, to: int, source: int, size: int, stream: int) -> None:
        self._cuMemcpyHtoD(to, source, size)

    def _cuMemcpyDtoHAsync(self, to: int, source: int, size: int, stream: int) -> None:
        self._cuMemcpyDtoH(to, source, size)

    def _cuMemcpyPeerAsync(self, to: int, _a: int, source: int, _b: int, size: int, stream: int) -> None:
        block, at = self.memory.place(source, size)
        target, to_at = self.memory.place(to, size)
        target[to_at : to_at + size] = block[at : at + size]

    # -- time --------------------------------------------------------------------------------------------------

    def _cuEventCreate(self, to: Any, flags: int) -> None:
        to[0] = 1

    def _cuEventElapsedTime(self, to: Any, start: int, end: int) -> None:
        to[0] = 1.0  # millisecond


class Driver(cuda.Driver):
    """The program's driver, with this library in place of the one that the linker finds."""

    def __init__(self, *gpus: Gpu, kind: type[Library] = Library) -> None:
        self.fake = kind(gpus)
        self._library: Any = self.fake
        self._functions = {name: self._bind(name) for name in cuda.FUNCTIONS}
        self("cuInit", 0)


def device(gpu: Gpu) -> tuple[cuda.Device, Library]:
    """Return a GPU as the program opens it."""
    driver = Driver(gpu)
    return cuda.Device(driver, 0), driver.fake
