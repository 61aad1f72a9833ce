"""The GPUs' readings through NVML, as plain values of ``model``.

A reading that isn't available leaves its field None and the reason in ``Gpu.missing``: ``not-supported`` isn't an
error, and neither is ever recorded as zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ctypes import byref, c_int, c_uint, c_ulonglong, c_void_p
from typing import Any

from image_builder.node.gpu.model import Gpu, Nvml, Process, Sample
from image_builder.node.gpu.nvml import (
    CORRUPTED_INFOROM,
    ERRORS,
    FUNCTION_NOT_FOUND,
    INSUFFICIENT_SIZE,
    INVALID_ARGUMENT,
    NOT_SUPPORTED,
    SUCCESS,
    FabricInfo,
    FieldValue,
    Library,
    MarginTemperature,
    Memory,
    MemoryV2,
    NvmlError,
    PciInfo,
    ProcessInfo,
    RowHistogram,
    SramStatus,
    UnrepairableMemory,
    Utilization,
    versioned,
)

CORRECTED, UNCORRECTED = 0, 1  # nvmlMemoryErrorType_t
VOLATILE, AGGREGATE = 0, 1  # nvmlEccCounterType_t
DRAM, SRAM = 2, 7  # nvmlMemoryLocation_t
SENSOR_GPU, THRESHOLD_SLOWDOWN = 0, 1
LINKS = 18  # the most of any GPU that this project knows so far
# nvmlNvLinkErrorCounter_t: replays, recoveries, CRC errors of flits and of data.
LINK_COUNTERS: Mapping[int, str] = {
    0: "nvlink_replays",
    1: "nvlink_recoveries",
    2: "nvlink_crc_errors",
    3: "nvlink_crc_errors",
}
LINK_ERRORS = ("nvlink_errors", *dict.fromkeys(LINK_COUNTERS.values()))
FI_RETIRED_SBE, FI_RETIRED_DBE, FI_RETIRED_PENDING, FI_RECOVERY_ACTION = 29, 30, 31, 230
RECOVERY_ACTIONS = (
    "none",
    "gpu-reset",
    "node-reboot",
    "drain-p2p",
    "drain-and-reset",
    "recover-imex-domain",
    "bus-reset",
    "system-reboot",
)
FABRIC_STATES = ("not-supported", "not-started", "in-progress", "completed")
LINK_IS_DOWN = 29  # NVML_ERROR_INVALID_STATE, of a counter
_NO_VALUE = 2**64 - 1
_VALUES: Mapping[int, str] = {
    0: "dVal",
    1: "uiVal",
    2: "ulVal",
    3: "ullVal",
    4: "sllVal",
    5: "siVal",
    6: "usVal",
}

Reader = Callable[[Library, c_void_p], dict[str, Any]]
Entry = tuple[tuple[str, ...], Reader]
"""The fields that a reader fills, and the reader."""


def look(library: Library) -> Nvml:
    """Return the readings of the library and of all GPUs. Raises NvmlError if the GPUs can't be counted."""
    driver = library.text("nvmlSystemGetDriverVersion", size=80)
    count = library.number("nvmlDeviceGetCount_v2")
    gpus: list[Gpu] = []
    lost: dict[str, str] = {}
    for index in range(count):
        try:
            gpus.append(read_gpu(library, handle_of(library, index), index))
        except NvmlError as error:
            lost[str(index)] = str(error)
    return Nvml("", driver, count, tuple(gpus), lost)


def handle_of(library: Library, index: int) -> c_void_p:
    """Return the handle of a GPU; raises NvmlError."""
    handle = c_void_p()
    library.call("nvmlDeviceGetHandleByIndex_v2", c_uint(index), byref(handle))
    return handle


def read_gpu(library: Library, handle: c_void_p, index: int) -> Gpu:
    """Return all readings of a GPU. Raises NvmlError if even its UUID and address can't be read."""
    values: dict[str, Any] = {
        "uuid": library.text("nvmlDeviceGetUUID", handle),
        "pci": _pci(library, handle)["pci"],
    }
    missing: dict[str, str] = {}
    for names, reader in READERS:
        try:
            values |= reader(library, handle)
        except NvmlError as error:
            missing |= dict.fromkeys((name for name in names if name not in values), error.reason)
    fields, unread = _fields(library, handle)
    return Gpu(index=index, **values, **fields, missing=missing | unread)


def sample(library: Library, handle: c_void_p, gpu: str, seconds: float) -> Sample:
    """Return one sample of a GPU under load; values that can't be read are None."""
    values: dict[str, Any] = {}
    for _, reader in UNDER_LOAD:
        try:
            values |= reader(library, handle)
        except NvmlError:
            continue
    names = Sample.__dataclass_fields__
    return Sample(gpu=gpu, seconds=seconds, **{key: value for key, value in values.items() if key in names})


def _pci(library: Library, handle: c_void_p) -> dict[str, Any]:
    info = PciInfo()
    library.call("nvmlDeviceGetPciInfo_v3", handle, byref(info))
    return {"pci": info.busId.decode("ascii", "replace")}


def _text(key: str, function: str, size: int = 96) -> Entry:
    return (key,), lambda library, handle: {key: library.text(function, handle, size=size)}


def _number(key: str, function: str, *arguments: int, kind: type[Any] = c_uint) -> Entry:
    return (key,), lambda library, handle: {
        key: library.number(function, handle, *map(c_uint, arguments), kind=kind)
    }


def _count(key: str, function: str, *arguments: int) -> Entry:
    return _number(key, function, *arguments, kind=c_ulonglong)


def _truth(key: str, function: str) -> Entry:
    return (key,), lambda library, handle: {key: library.number(function, handle) != 0}


def _compute_capability(library: Library, handle: c_void_p) -> dict[str, Any]:
    major, minor = c_int(), c_int()
    library.call("nvmlDeviceGetCudaComputeCapability", handle, byref(major), byref(minor))
    return {"compute_capability": f"{major.value}.{minor.value}"}


def _memory(library: Library, handle: c_void_p) -> dict[str, Any]:
    new = versioned(MemoryV2, 2)
    try:
        library.call("nvmlDeviceGetMemoryInfo_v2", handle, byref(new))
        reserved = {"memory_reserved_bytes": int(new.reserved)}
        return {"memory_total_bytes": int(new.total), "memory_used_bytes": int(new.used), **reserved}
    except NvmlError:
        old = Memory()  # here `used` includes reserved memory
        library.call("nvmlDeviceGetMemoryInfo", handle, byref(old))
        return {"memory_total_bytes": int(old.total), "memory_used_bytes": int(old.used)}


def _pair(current_key: str, pending_key: str, function: str) -> Entry:
    def read(library: Library, handle: c_void_p) -> dict[str, Any]:
        current, pending = c_uint(), c_uint()
        library.call(function, handle, byref(current), byref(pending))
        return {current_key: current.value != 0, pending_key: pending.value != 0}

    return (current_key, pending_key), read


def _sram(library: Library, handle: c_void_p) -> dict[str, Any]:
    status = versioned(SramStatus, 1)
    library.call("nvmlDeviceGetSramEccErrorStatus", handle, byref(status))
    return {"sram_threshold_exceeded": status.bThresholdExceeded != 0}


def _remapped(library: Library, handle: c_void_p) -> dict[str, Any]:
    values = [c_uint() for _ in range(4)]
    library.call("nvmlDeviceGetRemappedRows", handle, *map(byref, values))
    correctable, uncorrectable, pending, failure = (value.value for value in values)
    return {
        "remap_correctable": correctable,
        "remap_uncorrectable": uncorrectable,
        "remap_pending": pending != 0,
        "remap_failure": failure != 0,
    }


def _histogram(library: Library, handle: c_void_p) -> dict[str, Any]:
    histogram = RowHistogram()
    library.call("nvmlDeviceGetRowRemapperHistogram", handle, byref(histogram))
    return {"remap_histogram": tuple(int(getattr(histogram, name)) for name, _ in RowHistogram._fields_)}


def _unrepairable(library: Library, handle: c_void_p) -> dict[str, Any]:
    flag = UnrepairableMemory()
    library.call("nvmlDeviceGetUnrepairableMemoryFlag_v1", handle, byref(flag))
    return {"unrepairable_memory": flag.bUnrepairableMemory != 0}


def _inforom(library: Library, handle: c_void_p) -> dict[str, Any]:
    try:
        library.call("nvmlDeviceValidateInforom", handle)
    except NvmlError as error:
        if error.code != CORRUPTED_INFOROM:
            raise
        return {"inforom_valid": False}
    return {"inforom_valid": True}


def _links(library: Library, handle: c_void_p) -> dict[str, Any]:
    """Return the state of each link. Past the last, NVML reports an invalid argument; without links, no support."""
    states: list[bool] = []
    for link in range(LINKS):
        try:
            states.append(library.number("nvmlDeviceGetNvLinkState", handle, c_uint(link)) != 0)
        except NvmlError as error:
            if not states or error.code not in (INVALID_ARGUMENT, NOT_SUPPORTED):
                raise
            break
    return {"nvlinks": tuple(states)}


def _link_errors(library: Library, handle: c_void_p) -> dict[str, Any]:
    sums = dict.fromkeys(LINK_ERRORS, 0)
    answered = False
    for link in range(len(_links(library, handle)["nvlinks"])):
        for counter, name in LINK_COUNTERS.items():
            try:
                arguments = (handle, c_uint(link), c_uint(counter))
                count = library.number("nvmlDeviceGetNvLinkErrorCounter", *arguments, kind=c_ulonglong)
                sums[name] += count
                sums["nvlink_errors"] += count
                answered = True
            except NvmlError as error:
                if error.code not in (INVALID_ARGUMENT, NOT_SUPPORTED, LINK_IS_DOWN):
                    raise
    if not answered:
        raise NvmlError("nvmlDeviceGetNvLinkErrorCounter", NOT_SUPPORTED)
    return dict(sums)


def _fabric(library: Library, handle: c_void_p) -> dict[str, Any]:
    info = versioned(FabricInfo, 2)
    library.call("nvmlDeviceGetGpuFabricInfoV", handle, byref(info))
    state = FABRIC_STATES[info.state] if info.state < len(FABRIC_STATES) else f"state {info.state}"
    status = "success" if info.status == SUCCESS else f"{ERRORS.get(info.status, 'error')} ({info.status})"
    return {"fabric_state": state, "fabric_status": status}


def _throttle(library: Library, handle: c_void_p) -> dict[str, Any]:
    names = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
    try:
        return {"throttle": library.number(names[0], handle, kind=c_ulonglong)}
    except NvmlError as error:
        if error.code != FUNCTION_NOT_FOUND:
            raise
        return {"throttle": library.number(names[1], handle, kind=c_ulonglong)}


def _margin(library: Library, handle: c_void_p) -> dict[str, Any]:
    margin = versioned(MarginTemperature, 1)
    library.call("nvmlDeviceGetMarginTemperature", handle, byref(margin))
    return {"temperature_margin_c": int(margin.marginTemperature)}


def _utilization(library: Library, handle: c_void_p) -> dict[str, Any]:
    rates = Utilization()
    library.call("nvmlDeviceGetUtilizationRates", handle, byref(rates))
    return {"utilization_percent": int(rates.gpu)}


def _processes(library: Library, handle: c_void_p) -> dict[str, Any]:
    function, count, entries = "nvmlDeviceGetComputeRunningProcesses_v3", c_uint(64), (ProcessInfo * 64)()
    try:
        library.call(function, handle, byref(count), entries)
    except NvmlError as error:
        if error.code != INSUFFICIENT_SIZE:
            raise
        count = c_uint(count.value * 2 + 5)  # more may start meanwhile
        entries = (ProcessInfo * count.value)()
        library.call(function, handle, byref(count), entries)
    return {
        "processes": tuple(
            Process(int(entry.pid), None if entry.usedGpuMemory == _NO_VALUE else int(entry.usedGpuMemory))
            for entry in entries[: count.value]
        )
    }


def _fields(library: Library, handle: c_void_p) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the readings that exist only as field values, and the reasons for those that are missing."""
    field_ids = {
        "retired_single_bit": FI_RETIRED_SBE,
        "retired_double_bit": FI_RETIRED_DBE,
        "retired_pending": FI_RETIRED_PENDING,
        "recovery_action": FI_RECOVERY_ACTION,
    }
    requests = (FieldValue * len(field_ids))(*[FieldValue(fieldId=number) for number in field_ids.values()])
    try:
        library.call("nvmlDeviceGetFieldValues", handle, c_int(len(field_ids)), requests)
    except NvmlError as error:
        return {}, dict.fromkeys(field_ids, error.reason)
    values: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for name, answer in zip(field_ids, requests, strict=True):
        if answer.nvmlReturn != SUCCESS:
            # The driver reports a field that it doesn't know as an invalid argument.
            unheard = answer.nvmlReturn == INVALID_ARGUMENT
            code = NOT_SUPPORTED if unheard else answer.nvmlReturn
            missing[name] = NvmlError("nvmlDeviceGetFieldValues", code).reason
        else:
            values[name] = int(getattr(answer.value, _VALUES.get(answer.valueType, "ullVal")))
    if "retired_pending" in values:
        values["retired_pending"] = values["retired_pending"] != 0
    if "recovery_action" in values:
        number = values["recovery_action"]
        is_known = number < len(RECOVERY_ACTIONS)
        values["recovery_action"] = RECOVERY_ACTIONS[number] if is_known else f"action {number}"
    return values, missing


_ECC = "nvmlDeviceGetTotalEccErrors"
_ECC_AT = "nvmlDeviceGetMemoryErrorCounter"


UNDER_LOAD: tuple[Entry, ...] = (
    (("throttle",), _throttle),
    _number("temperature_c", "nvmlDeviceGetTemperature", SENSOR_GPU),
    (("temperature_margin_c",), _margin),
    _number("pcie_generation", "nvmlDeviceGetCurrPcieLinkGeneration"),
    _number("pcie_width", "nvmlDeviceGetCurrPcieLinkWidth"),
    (("utilization_percent",), _utilization),
)
READERS: tuple[Entry, ...] = (
    _text("name", "nvmlDeviceGetName"),
    _text("serial", "nvmlDeviceGetSerial", 30),
    _text("vbios", "nvmlDeviceGetVbiosVersion", 32),
    (("compute_capability",), _compute_capability),
    (("memory_total_bytes", "memory_used_bytes", "memory_reserved_bytes"), _memory),
    _pair("ecc_current", "ecc_pending", "nvmlDeviceGetEccMode"),
    _count("ecc_volatile_uncorrected", _ECC, UNCORRECTED, VOLATILE),
    _count("ecc_volatile_corrected", _ECC, CORRECTED, VOLATILE),
    _count("ecc_aggregate_uncorrected", _ECC, UNCORRECTED, AGGREGATE),
    _count("ecc_aggregate_corrected", _ECC, CORRECTED, AGGREGATE),
    _count("ecc_volatile_uncorrected_sram", _ECC_AT, UNCORRECTED, VOLATILE, SRAM),
    _count("ecc_volatile_uncorrected_dram", _ECC_AT, UNCORRECTED, VOLATILE, DRAM),
    _count("ecc_aggregate_uncorrected_sram", _ECC_AT, UNCORRECTED, AGGREGATE, SRAM),
    _count("ecc_aggregate_uncorrected_dram", _ECC_AT, UNCORRECTED, AGGREGATE, DRAM),
    (("sram_threshold_exceeded",), _sram),
    (("remap_correctable", "remap_uncorrectable", "remap_pending", "remap_failure"), _remapped),
    (("remap_histogram",), _histogram),
    (("unrepairable_memory",), _unrepairable),
    (("inforom_valid",), _inforom),
    _truth("persistence", "nvmlDeviceGetPersistenceMode"),
    _pair("mig_current", "mig_pending", "nvmlDeviceGetMigMode"),
    _number("pcie_generation_max", "nvmlDeviceGetMaxPcieLinkGeneration"),
    _number("pcie_width_max", "nvmlDeviceGetMaxPcieLinkWidth"),
    _number("pcie_replays", "nvmlDeviceGetPcieReplayCounter"),
    (("nvlinks",), _links),
    (LINK_ERRORS, _link_errors),
    (("fabric_state", "fabric_status"), _fabric),
    _number("temperature_slowdown_c", "nvmlDeviceGetTemperatureThreshold", 1),
    (("processes",), _processes),
    *UNDER_LOAD[:-1],
)
