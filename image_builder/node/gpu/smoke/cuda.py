"""The CUDA driver by ctypes: libcuda.so.1, which every driver brings, and no more of it than the tests call.

Signatures and numbers are those of NVIDIA's cuda.h. Every call is checked. The kernels are PTX, which the driver
compiles for the GPU at hand; what it says of that is in the error.
"""

from __future__ import annotations

import ctypes
import importlib.resources
import uuid as uuids
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from ctypes import (
    POINTER,
    byref,
    c_char_p,
    c_float,
    c_int,
    c_size_t,
    c_ubyte,
    c_uint,
    c_uint64,
    c_void_p,
)
from typing import Any

from image_builder.node.errors import NodeError

THREADS = 256  # a block's, in every launch
U32, U64 = c_uint, c_uint64  # a kernel's parameters
Argument = c_uint | c_uint64
LIBRARY = "libcuda.so.1"
OUT_OF_MEMORY = 2
# CUdevice_attribute, CUdevice_P2PAttribute, CUjit_option
MULTIPROCESSORS, CAPABILITY_MAJOR, CAPABILITY_MINOR = 16, 75, 76
P2P_ACCESS, P2P_NATIVE_ATOMICS = 2, 3
JIT_INFO_LOG, JIT_INFO_SIZE, JIT_ERROR_LOG, JIT_ERROR_SIZE = 3, 4, 5, 6
JIT_LOG_BYTES = 8192
_ADDRESS = c_uint64  # CUdeviceptr
_PREFERRED = {"cuDeviceGetUuid": "cuDeviceGetUuid_v2"}  # the older one is wrong on a GPU with MIG
FUNCTIONS: Mapping[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetUuid": (c_char_p, c_int),
    "cuDeviceGetPCIBusId": (c_char_p, c_int, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceGetP2PAttribute": (POINTER(c_int), c_int, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxSynchronize": (),
    "cuCtxEnablePeerAccess": (c_void_p, c_uint),
    "cuModuleLoadDataEx": (POINTER(c_void_p), c_char_p, c_uint, POINTER(c_int), POINTER(c_void_p)),
    "cuModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuMemAlloc_v2": (POINTER(_ADDRESS), c_size_t),
    "cuMemFree_v2": (_ADDRESS,),
    "cuMemHostAlloc": (POINTER(c_void_p), c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuMemsetD8_v2": (_ADDRESS, c_ubyte, c_size_t),
    "cuMemcpyHtoD_v2": (_ADDRESS, c_void_p, c_size_t),
    "cuMemcpyDtoH_v2": (c_void_p, _ADDRESS, c_size_t),
    "cuMemcpyHtoDAsync_v2": (_ADDRESS, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, _ADDRESS, c_size_t, c_void_p),
    "cuMemcpyDtoDAsync_v2": (_ADDRESS, _ADDRESS, c_size_t, c_void_p),
    "cuMemcpyPeerAsync": (_ADDRESS, c_void_p, _ADDRESS, c_void_p, c_size_t, c_void_p),
    "cuLaunchKernel": (c_void_p, *[c_uint] * 7, c_void_p, POINTER(c_void_p), POINTER(c_void_p)),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventSynchronize": (c_void_p,),
    "cuEventElapsedTime": (POINTER(c_float), c_void_p, c_void_p),
    "cuEventDestroy_v2": (c_void_p,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
}
HINTS: Mapping[str, str] = {
    "CUDA_ERROR_NO_DEVICE": "is /dev/nvidia-uvm missing? `nvidia-modprobe -u -c0` creates it",
    "CUDA_ERROR_UNKNOWN": "is /dev/nvidia-uvm missing? `nvidia-modprobe -u -c0` creates it",
    "CUDA_ERROR_JIT_COMPILER_NOT_FOUND": "libnvidia-ptxjitcompiler.so.1 of the driver is missing",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "the driver is older than CUDA 11.0 (GPUs before Ampere: 10.2)",
    "CUDA_ERROR_SYSTEM_NOT_READY": "is the fabric manager running, in the driver's version?",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "libcuda.so.1 differs in version from the loaded driver",
}


class OutOfMemoryError(NodeError):
    """The GPU has no more memory."""


class CudaError(NodeError):
    """The driver refused a call; ``name`` is the error's, as in CUDA_ERROR_ECC_UNCORRECTABLE."""

    def __init__(self, function: str, result: int, name: str, more: str = "") -> None:
        parts = [f"{function}: {name or 'error'} ({result})", more.strip(), HINTS.get(name, "")]
        super().__init__("gpu.cuda", "; ".join(word for word in parts if word))
        self.function, self.result, self.name = function, result, name


class Driver:
    """The library, initialised. Raises NodeError where there is none, or it refuses."""

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise NodeError("gpu.library", f"can't load {library}: {error}") from error
        self._functions = {name: self._bind(name) for name in FUNCTIONS}
        self("cuInit", 0)

    def _bind(self, name: str) -> Callable[..., int]:
        entry: Any = None
        for symbol in (_PREFERRED.get(name, name), name):
            with suppress(AttributeError):
                entry = entry or self._library[symbol]
        if entry is None:
            raise NodeError("gpu.library", f"{LIBRARY} lacks {name}: the driver is too old")
        entry.argtypes, entry.restype = FUNCTIONS[name], c_int
        bound: Callable[..., int] = entry
        return bound

    def __call__(self, function: str, *arguments: Any, more: Callable[[], str] = str) -> None:
        """Call a function. Raises CudaError, which says ``more``; OutOfMemoryError where that is why."""
        result = self._functions[function](*arguments)
        if result == OUT_OF_MEMORY:
            raise OutOfMemoryError("gpu.memory", f"{function}: {self._name(result)}")
        if result:
            raise CudaError(function, result, self._name(result), more())

    def _name(self, result: int) -> str:
        text = c_char_p()
        self._functions["cuGetErrorName"](result, byref(text))
        return (text.value or b"").decode()

    def number(self, function: str, *arguments: int) -> int:
        """Return the int that a function writes to its first argument."""
        value = c_int()
        self(function, byref(value), *arguments)
        return value.value

    def text(self, function: str, size: int, *arguments: int) -> bytes:
        """Return the bytes that a function writes to its first argument."""
        buffer = ctypes.create_string_buffer(size)
        self(function, buffer, *arguments)
        return buffer.raw


class Device:
    """One GPU of those that CUDA shows, with the primary context of this process from the first use on.

    Addresses are numbers, sizes bytes. Every method may raise CudaError; after most of them the context is lost.
    """

    def __init__(self, driver: Driver, index: int) -> None:
        self._driver = driver
        self._modules: dict[str, c_void_p] = {}
        self._handle = driver.number("cuDeviceGet", index)
        self.uuid = f"GPU-{uuids.UUID(bytes=driver.text('cuDeviceGetUuid', 16, self._handle)[:16])}"
        self.name = driver.text("cuDeviceGetName", 256, 256, self._handle).split(b"\0")[0].decode()
        self.sms = self._attribute(MULTIPROCESSORS)
        self.capability = (self._attribute(CAPABILITY_MAJOR), self._attribute(CAPABILITY_MINOR))
        self._context = c_void_p()

    def _attribute(self, number: int) -> int:
        return self._driver.number("cuDeviceGetAttribute", number, self._handle)

    def _call(self, function: str, *arguments: Any, more: Callable[[], str] = str) -> None:
        self._driver("cuCtxSetCurrent", self._opened())
        self._driver(function, *arguments, more=more)

    def _opened(self) -> c_void_p:
        if not self._context:
            self._driver("cuDevicePrimaryCtxRetain", byref(self._context), self._handle)
        return self._context

    def pci(self) -> str:
        """Return the address as /sys writes it: 0000:17:00.0."""
        return self._driver.text("cuDeviceGetPCIBusId", 32, 32, self._handle).split(b"\0")[0].decode().lower()

    # -- kernels -----------------------------------------------------------------------------------------------

    def kernel(self, module: str, name: str) -> c_void_p:
        """Return an entry of ``kernels/MODULE.ptx``, which the driver compiles at the first time."""
        if module not in self._modules:
            self._modules[module] = self._load(module)
        entry = c_void_p()
        self._call("cuModuleGetFunction", byref(entry), self._modules[module], name.encode())
        return entry

    def _load(self, module: str) -> c_void_p:
        log, errors = (ctypes.create_string_buffer(JIT_LOG_BYTES) for _ in range(2))
        options = (c_int * 4)(JIT_INFO_LOG, JIT_INFO_SIZE, JIT_ERROR_LOG, JIT_ERROR_SIZE)
        # The sizes are passed as if they were pointers.
        values = (c_void_p * 4)(ctypes.addressof(log), JIT_LOG_BYTES, ctypes.addressof(errors), JIT_LOG_BYTES)
        handle = c_void_p()

        def compiler_log() -> str:
            return " ".join(
                f"{module}.ptx: {buffer.value.decode(errors='replace').strip()}"
                for buffer in (errors, log)
                if buffer.value
            )[:1000]

        self._call(
            "cuModuleLoadDataEx", byref(handle), text_of(module), 4, options, values, more=compiler_log
        )
        return handle

    def launch(self, kernel: c_void_p, blocks: int, arguments: Sequence[Argument]) -> None:
        """Start a kernel; doesn't wait."""
        pointers = (c_void_p * len(arguments))(*[ctypes.addressof(argument) for argument in arguments])
        self._call("cuLaunchKernel", kernel, blocks, 1, 1, THREADS, 1, 1, 0, None, pointers, None)

    def synchronize(self) -> None:
        """Wait for all that was started."""
        self._call("cuCtxSynchronize")

    def timed(self, work: Callable[[], None]) -> float:
        """Return the seconds between two events around what ``work`` starts."""
        events = (c_void_p(), c_void_p())
        for event in events:
            self._call("cuEventCreate", byref(event), 0)
        try:
            self._call("cuEventRecord", events[0], None)
            work()
            self._call("cuEventRecord", events[1], None)
            self._call("cuEventSynchronize", events[1])
            milliseconds = c_float()
            self._call("cuEventElapsedTime", byref(milliseconds), *events)
        finally:
            for event in events:
                self._call("cuEventDestroy_v2", event)
        return milliseconds.value / 1000

    # -- memory ------------------------------------------------------------------------------------------------

    def memory(self) -> tuple[int, int]:
        """Return the bytes that are free, and all there are."""
        free, total = c_size_t(), c_size_t()
        self._call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def allocate(self, size: int) -> int:
        """Return the address of new memory. Raises OutOfMemoryError."""
        address = _ADDRESS()
        self._call("cuMemAlloc_v2", byref(address), size)
        return address.value

    def free(self, address: int) -> None:
        """Give memory back. An error that ended the context has freed it already, and is the one to report."""
        with suppress(CudaError):
            self._call("cuMemFree_v2", address)

    def set_bytes(self, address: int, value: int, size: int) -> None:
        """Write one byte all over."""
        self._call("cuMemsetD8_v2", address, value, size)

    def upload(self, address: int, data: bytes) -> None:
        """Copy bytes to the GPU."""
        self._call("cuMemcpyHtoD_v2", address, data, len(data))

    def download(self, address: int, size: int) -> bytes:
        """Copy bytes from the GPU."""
        buffer = ctypes.create_string_buffer(size)
        self._call("cuMemcpyDtoH_v2", buffer, address, size)
        return buffer.raw

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy within the GPU's memory; doesn't wait."""
        self._call("cuMemcpyDtoDAsync_v2", target, source, size, None)

    @contextmanager
    def pinned(self, size: int) -> Iterator[memoryview]:
        """Make host memory that the GPU reads and writes by itself; it is gone after the block."""
        address = c_void_p()
        self._call("cuMemHostAlloc", byref(address), size, 0)
        try:
            yield memoryview((c_ubyte * size).from_address(address.value or 0)).cast("B")
        finally:
            with suppress(CudaError):
                self._call("cuMemFreeHost", address)

    def from_pinned(self, address: int, view: memoryview) -> None:
        """Copy pinned memory to the GPU; doesn't wait."""
        self._call("cuMemcpyHtoDAsync_v2", address, _address(view), len(view), None)

    def to_pinned(self, view: memoryview, address: int) -> None:
        """Copy from the GPU to pinned memory; doesn't wait."""
        self._call("cuMemcpyDtoHAsync_v2", _address(view), address, len(view), None)

    # -- peers -------------------------------------------------------------------------------------------------

    def is_linked(self, peer: Device) -> bool:
        """Tell whether two GPUs reach each other by NVLink: peer access with atomics, which PCIe alone lacks."""
        return all(
            self._driver.number("cuDeviceGetP2PAttribute", attribute, self._handle, peer._handle)
            for attribute in (P2P_ACCESS, P2P_NATIVE_ATOMICS)
        )

    def connect(self, peer: Device) -> None:
        """Let this GPU write the other's memory."""
        self._call("cuCtxEnablePeerAccess", peer._opened(), 0)

    def copy_to(self, peer: Device, target: int, source: int, size: int) -> None:
        """Copy to another GPU's memory; doesn't wait."""
        contexts = peer._opened(), self._opened()
        self._call("cuMemcpyPeerAsync", target, contexts[0], source, contexts[1], size, None)


def _address(view: memoryview) -> int:
    return ctypes.addressof(c_ubyte.from_buffer(view))


def text_of(module: str) -> bytes:
    """Return ``kernels/MODULE.ptx``, also from the agent's archive, with the zero that ends a C string."""
    package = importlib.resources.files("image_builder.node.gpu.smoke")
    return package.joinpath("kernels", f"{module}.ptx").read_bytes() + b"\0"


def devices(driver: Driver) -> list[Device]:
    """Return all GPUs that CUDA_VISIBLE_DEVICES lets this process see."""
    return [Device(driver, index) for index in range(driver.number("cuDeviceGetCount"))]
