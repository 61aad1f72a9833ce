"""The driver's management library, libnvidia-ml.so.1, through ctypes: no package is needed. ``readings`` calls it.

Constants and layouts are those of NVIDIA's nvml.h; a test compares them with the vendor's own Python binding, or with
the header where the binding is wrong.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from ctypes import byref, c_char, c_int, c_longlong, c_ubyte, c_uint, c_ulonglong
from typing import Any

from image_builder.node.gpu.model import Nvml

LIBRARY = "libnvidia-ml.so.1"
SUCCESS, INVALID_ARGUMENT, NOT_SUPPORTED, INSUFFICIENT_SIZE, DRIVER_NOT_LOADED = 0, 2, 3, 7, 9
FUNCTION_NOT_FOUND, CORRUPTED_INFOROM, VERSION_MISMATCH, NO_SUCH_VERSION = 13, 14, 18, 25
ERRORS: Mapping[int, str] = {
    1: "uninitialized",
    INVALID_ARGUMENT: "invalid argument",
    4: "no permission",
    6: "not found",
    8: "power cables are not attached",
    DRIVER_NOT_LOADED: "the driver is not loaded",
    10: "timeout",
    11: "the kernel found a problem with interrupts",
    12: "library not found",
    CORRUPTED_INFOROM: "corrupted InfoROM",
    15: "the GPU is lost",
    16: "the GPU needs a reset",
    17: "the operating system blocks the GPU",
    VERSION_MISMATCH: "driver and library differ in version",
    27: "not ready",
    29: "invalid state",
    999: "unknown error",
}


class PciInfo(ctypes.Structure):
    _fields_ = (
        ("busIdLegacy", c_char * 16),
        ("domain", c_uint),
        ("bus", c_uint),
        ("device", c_uint),
        ("pciDeviceId", c_uint),
        ("pciSubSystemId", c_uint),
        ("busId", c_char * 32),
    )


class Memory(ctypes.Structure):
    _fields_ = (("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))


class MemoryV2(ctypes.Structure):
    _fields_ = (
        ("version", c_uint),
        ("total", c_ulonglong),
        ("reserved", c_ulonglong),
        ("free", c_ulonglong),
        ("used", c_ulonglong),
    )


class ProcessInfo(ctypes.Structure):
    _fields_ = (
        ("pid", c_uint),
        ("usedGpuMemory", c_ulonglong),
        ("gpuInstanceId", c_uint),
        ("computeInstanceId", c_uint),
    )


class Value(ctypes.Union):
    _fields_ = (
        ("dVal", ctypes.c_double),
        ("uiVal", c_uint),
        ("ulVal", ctypes.c_ulong),
        ("ullVal", c_ulonglong),
        ("sllVal", c_longlong),
        ("siVal", c_int),
        ("usVal", ctypes.c_ushort),
    )


class FieldValue(ctypes.Structure):
    _fields_ = (
        ("fieldId", c_uint),
        ("scopeId", c_uint),
        ("timestamp", c_longlong),
        ("latencyUsec", c_longlong),
        ("valueType", c_uint),
        ("nvmlReturn", c_uint),
        ("value", Value),
    )


class RowHistogram(ctypes.Structure):
    _fields_ = (("max", c_uint), ("high", c_uint), ("partial", c_uint), ("low", c_uint), ("none", c_uint))


class SramStatus(ctypes.Structure):
    _fields_ = (
        ("version", c_uint),
        ("aggregateUncParity", c_ulonglong),
        ("aggregateUncSecDed", c_ulonglong),
        ("aggregateCor", c_ulonglong),
        ("volatileUncParity", c_ulonglong),
        ("volatileUncSecDed", c_ulonglong),
        ("volatileCor", c_ulonglong),
        ("aggregateUncBucketL2", c_ulonglong),
        ("aggregateUncBucketSm", c_ulonglong),
        ("aggregateUncBucketPcie", c_ulonglong),
        ("aggregateUncBucketMcu", c_ulonglong),
        ("aggregateUncBucketOther", c_ulonglong),
        ("bThresholdExceeded", c_uint),
    )


class FabricInfo(ctypes.Structure):
    _fields_ = (
        ("version", c_uint),
        ("clusterUuid", c_ubyte * 16),
        ("status", c_uint),
        ("cliqueId", c_uint),
        ("state", c_uint),
        ("healthMask", c_uint),
    )


class MarginTemperature(ctypes.Structure):
    _fields_ = (("version", c_uint), ("marginTemperature", c_int))


class UnrepairableMemory(ctypes.Structure):
    _fields_ = (("bUnrepairableMemory", c_uint),)


class Utilization(ctypes.Structure):
    _fields_ = (("gpu", c_uint), ("memory", c_uint))


class NvmlError(Exception):
    """An error that the library returned; ``code`` is its nvmlReturn_t."""

    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function}: {ERRORS.get(code, 'error')} ({code})")
        self.code = code

    @property
    def reason(self) -> str:
        """Return the reason as ``Gpu.missing`` records it."""
        if self.code == NOT_SUPPORTED:
            return "not-supported"
        # A driver that is older than a structure's version reports that, instead of lacking the function.
        if self.code in (FUNCTION_NOT_FOUND, NO_SUCH_VERSION):
            return "no-function"
        return f"error: {self}"


class Library:
    """The loaded library. ``native`` is a ctypes library, or a stand-in for one."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function of the library; raises NvmlError."""
        try:
            entry = getattr(self._native, function)
        except AttributeError:
            raise NvmlError(function, FUNCTION_NOT_FOUND) from None
        code = int(entry(*arguments))
        if code != SUCCESS:
            raise NvmlError(function, code)

    def text(self, function: str, *before: Any, size: int = 96) -> str:
        buffer = ctypes.create_string_buffer(size)
        self.call(function, *before, buffer, c_uint(size))
        return buffer.value.decode("ascii", "replace")

    def number(self, function: str, *before: Any, kind: type[Any] = c_uint) -> int:
        value = kind()
        self.call(function, *before, byref(value))
        return int(value.value)


def versioned(kind: type[Any], version: int) -> Any:
    """Return a structure with its version field set: its size, and the version number in the highest byte."""
    return kind(version=ctypes.sizeof(kind) | version << 24)


@contextmanager
def opened(name: str = LIBRARY) -> Iterator[Library]:
    """Load and initialize the library. Raises OSError (no library) or NvmlError."""
    library = Library(ctypes.CDLL(name))
    library.call("nvmlInit_v2")
    try:
        yield library
    finally:
        with suppress(NvmlError):  # the readings are still valid
            library.call("nvmlShutdown")


def refused(error: OSError | NvmlError) -> Nvml:
    """Return the readings of a library that couldn't be opened."""
    if isinstance(error, OSError):
        return Nvml(error=f"library: {error}")
    kind = "mismatch" if error.code == VERSION_MISMATCH else "init"
    return Nvml(error=f"{kind}: {error}")
