"""The NVML functions to call and their arguments: all that read something from a GPU and take only numbers.

Signatures are those of NVIDIA's nvml.h and of its Python binding (nvidia-ml-py 13.615.71). No call changes a GPU.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Mapping, Sequence
from ctypes import c_int, c_uint, c_ulong, c_ulonglong
from dataclasses import dataclass
from typing import Any

from image_builder.node.gpu import nvml

LINKS = range(18)
FIELDS = range(1, 320)  # a few past the last one that the binding knows (307)
# Fields whose scope is a link: queried for each link.
LINK_FIELDS = (*range(138, 142), *range(164, 173), *range(195, 230))
Output = tuple[str, Any]  # a name and a ctypes type; "text" has a size instead


@dataclass(frozen=True)
class Call:
    """One function, with the numbers passed after the handle, and its outputs.

    ``peer``: a second handle follows the first. An output's capacity is passed by address before it (``in-out``) or as
    a number after it (``text``).
    """

    function: str
    numbers: tuple[int, ...] = ()
    outputs: tuple[Output, ...] = ()
    peer: int | None = None


def _structure(name: str, *fields: tuple[str, Any]) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": fields})


_Bar1 = _structure("Bar1", ("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))
_Violation = _structure("Violation", ("referenceTime", c_ulonglong), ("violationTime", c_ulonglong))
_Ecc = _structure(
    "Ecc", *((name, c_ulonglong) for name in ("l1Cache", "l2Cache", "deviceMemory", "registerFile"))
)
_Affinity = _structure("Affinity", ("set", c_ulong * 16))
_U: tuple[Output, ...] = (("value", c_uint),)
_Q: tuple[Output, ...] = (("value", c_ulonglong),)
_PAIR: tuple[Output, ...] = (("first", c_uint), ("second", c_uint))

_SYSTEM = (
    Call("nvmlSystemGetDriverVersion", (), (("text", 80),)),
    Call("nvmlSystemGetNVMLVersion", (), (("text", 80),)),
    Call("nvmlSystemGetCudaDriverVersion_v2", (), (("value", c_int),)),
    Call("nvmlDeviceGetCount_v2", (), _U),
)
_TEXTS: Mapping[str, int] = {
    "Name": 96,
    "BoardPartNumber": 80,
    "Serial": 30,
    "UUID": 96,
    "InforomImageVersion": 16,
    "VbiosVersion": 32,
    "GspFirmwareVersion": 80,
}
_NUMBERS = [
    "Brand",
    "BoardId",
    "MultiGpuBoard",
    "ModuleId",
    "MinorNumber",
    "InforomConfigurationChecksum",
    "Index",
    "PersistenceMode",
    "DisplayMode",
    "DisplayActive",
    "PowerState",
    "PerformanceState",
    "PowerManagementMode",
    "PowerManagementLimit",
    "PowerManagementDefaultLimit",
    "EnforcedPowerLimit",
    "PowerUsage",
    "ComputeMode",
    "DefaultEccMode",
    "PcieReplayCounter",
    "CurrPcieLinkGeneration",
    "CurrPcieLinkWidth",
    "MaxPcieLinkGeneration",
    "MaxPcieLinkWidth",
    "GpuMaxPcieLinkGeneration",
    "PcieLinkMaxSpeed",
    "PcieSpeed",
    "RetiredPagesPendingStatus",
    "MaxMigDeviceCount",
    "VirtualizationMode",
    "Architecture",
    "BusType",
    "IrqNum",
    "NumGpuCores",
    "PowerSource",
    "MemoryBusWidth",
    "AdaptiveClockInfoStatus",
    "NumaNodeId",
    "AccountingMode",
    "HostVgpuMode",
    "NumFans",
]
_WIDE = [
    "TotalEnergyConsumption",
    "SupportedClocksEventReasons",
    "CurrentClocksEventReasons",
    "SupportedClocksThrottleReasons",
    "CurrentClocksThrottleReasons",
    "SupportedEventTypes",
]
_PAIRS = [
    "PowerManagementLimitConstraints",
    "EccMode",
    "MigMode",
    "GspFirmwareMode",
    "EncoderUtilization",
    "DecoderUtilization",
    "AutoBoostedClocksEnabled",
]
_STRUCTURES: Mapping[str, Any] = {
    "PciInfo_v3": nvml.PciInfo,
    "MemoryInfo": nvml.Memory,
    "BAR1MemoryInfo": _Bar1,
    "UtilizationRates": nvml.Utilization,
    "RowRemapperHistogram": nvml.RowHistogram,
    "UnrepairableMemoryFlag_v1": nvml.UnrepairableMemory,
}
_VERSIONED: Mapping[str, tuple[Any, int]] = {
    "MemoryInfo_v2": (nvml.MemoryV2, 2),
    "MarginTemperature": (nvml.MarginTemperature, 1),
    "GpuFabricInfoV": (nvml.FabricInfo, 2),
    "SramEccErrorStatus": (nvml.SramStatus, 1),
}
VERSIONS: Mapping[Any, int] = dict(_VERSIONED.values())
# Functions, the choices for their numbers, and their outputs.
_OF_NUMBERS: Sequence[tuple[str, Sequence[Sequence[int]], tuple[Output, ...]]] = (
    ("InforomVersion", [range(4)], (("text", 16),)),
    ("ClockInfo", [range(4)], _U),
    ("MaxClockInfo", [range(4)], _U),
    ("ApplicationsClock", [range(3)], _U),
    ("DefaultApplicationsClock", [range(3)], _U),
    ("Temperature", [[0]], _U),
    ("TemperatureThreshold", [range(9)], _U),
    ("TotalEccErrors", [range(2), range(2)], _Q),
    ("DetailedEccErrors", [range(2), range(2)], (("value", _Ecc),)),
    ("MemoryErrorCounter", [range(2), range(2), range(9)], _Q),
    ("PcieThroughput", [range(2)], _U),
    ("ViolationStatus", [range(11)], (("value", _Violation),)),
    ("NvLinkState", [LINKS], _U),
    ("NvLinkVersion", [LINKS], _U),
    ("NvLinkCapability", [LINKS, range(6)], _U),
    ("NvLinkErrorCounter", [LINKS, range(5)], _Q),
    ("NvLinkRemotePciInfo_v2", [LINKS], (("value", nvml.PciInfo),)),
    ("NvLinkRemoteDeviceType", [LINKS], _U),
    ("CpuAffinity", [[16]], (("value", _Affinity),)),
)
_OF_PEERS: Sequence[tuple[str, Sequence[Sequence[int]]]] = (
    ("TopologyCommonAncestor", []),
    ("P2PStatus", [range(6)]),
)


def of_system() -> list[Call]:
    """Return the calls that don't concern a GPU."""
    return list(_SYSTEM)


def of_gpu(gpu: int, count: int) -> Iterator[Call]:
    """Yield the calls about one of ``count`` GPUs, except those for field values, which need a structure each."""
    for name, size in _TEXTS.items():
        yield _call(name, (), (("text", size),))
    for name in _NUMBERS:
        yield _call(name, (), _U)
    for name in _WIDE:
        yield _call(name, (), _Q)
    for name in _PAIRS:
        yield _call(name, (), _PAIR)
    for name, kind in {**_STRUCTURES, **{name: kind for name, (kind, _) in _VERSIONED.items()}}.items():
        yield _call(name, (), (("value", kind),))
    yield _call("CudaComputeCapability", (), (("major", c_int), ("minor", c_int)))
    yield _call("RemappedRows", (), tuple((f"value{n}", c_uint) for n in range(4)))
    yield Call("nvmlDeviceValidateInforom")
    yield _call("ComputeRunningProcesses_v3", (), (("in-out", nvml.ProcessInfo * 64),))
    for cause in range(2):
        yield _call("RetiredPages", (cause,), (("in-out", c_ulonglong * 64),))
    for name, choices, outputs in _OF_NUMBERS:
        for numbers in itertools.product(*choices):
            yield _call(name, numbers, outputs)
    for peer in range(count):
        for name, choices in _OF_PEERS if peer != gpu else ():
            for numbers in itertools.product(*choices):
                yield _call(name, numbers, _U, peer)


def fields() -> Iterator[tuple[int, int]]:
    """Yield every field and its scope."""
    for number in FIELDS:
        yield number, 0
    for number in LINK_FIELDS:
        for link in LINKS[1:]:
            yield number, link


def _call(name: str, numbers: Sequence[int], outputs: tuple[Output, ...], peer: int | None = None) -> Call:
    return Call(f"nvmlDeviceGet{name}", tuple(numbers), outputs, peer)
