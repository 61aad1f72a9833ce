"""Write ``nvml-layout.json``: what NVIDIA's own Python binding says of the structures and constants that we use.

The binding is wrong about one of them: that one is as in NVIDIA's nvml.h.

pip install --target /tmp/ml nvidia-ml-py==13.615.71 && PYTHONPATH=/tmp/ml:. python tests/data/gpu/layout.py
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from importlib import import_module, metadata
from pathlib import Path
from typing import Any


class UnrepairableMemory(ctypes.Structure):
    """nvmlUnrepairableMemoryStatus_v1_t of nvml.h (nvidia-nvml-dev 13.4.92). The binding has a version before the flag.

    A driver writes the flag over such a version: see the recording ``h200-580.159.04``.
    """

    _fields_ = (("bUnrepairableMemory", ctypes.c_uint),)


STRUCTURES: Mapping[str, str | type[ctypes.Structure]] = {
    "PciInfo": "nvmlPciInfo_t",
    "Memory": "c_nvmlMemory_t",
    "MemoryV2": "c_nvmlMemory_v2_t",
    "ProcessInfo": "c_nvmlProcessInfo_v3_t",
    "Value": "c_nvmlValue_t",
    "FieldValue": "c_nvmlFieldValue_t",
    "RowHistogram": "c_nvmlRowRemapperHistogramValues",
    "SramStatus": "c_nvmlEccSramErrorStatus_v1_t",
    "FabricInfo": "c_nvmlGpuFabricInfo_v2_t",
    "MarginTemperature": "c_nvmlMarginTemperature_v1_t",
    "UnrepairableMemory": UnrepairableMemory,
    "Utilization": "c_nvmlUtilization_t",
}
CONSTANTS = (
    "NVML_SUCCESS",
    "NVML_ERROR_INVALID_ARGUMENT",
    "NVML_ERROR_NOT_SUPPORTED",
    "NVML_ERROR_INSUFFICIENT_SIZE",
    "NVML_ERROR_DRIVER_NOT_LOADED",
    "NVML_ERROR_FUNCTION_NOT_FOUND",
    "NVML_ERROR_CORRUPTED_INFOROM",
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH",
    "NVML_ERROR_ARGUMENT_VERSION_MISMATCH",
    "NVML_ERROR_INVALID_STATE",
    "NVML_MEMORY_ERROR_TYPE_CORRECTED",
    "NVML_MEMORY_ERROR_TYPE_UNCORRECTED",
    "NVML_VOLATILE_ECC",
    "NVML_AGGREGATE_ECC",
    "NVML_MEMORY_LOCATION_DRAM",
    "NVML_MEMORY_LOCATION_SRAM",
    "NVML_TEMPERATURE_GPU",
    "NVML_TEMPERATURE_THRESHOLD_SLOWDOWN",
    "NVML_FI_DEV_RETIRED_SBE",
    "NVML_FI_DEV_RETIRED_DBE",
    "NVML_FI_DEV_RETIRED_PENDING",
    "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION",
    "NVML_NVLINK_ERROR_DL_REPLAY",
    "NVML_NVLINK_ERROR_DL_RECOVERY",
    "NVML_NVLINK_ERROR_DL_CRC_FLIT",
    "NVML_NVLINK_ERROR_DL_CRC_DATA",
    "nvmlMemory_v2",
    "nvmlEccSramErrorStatus_v1",
    "nvmlGpuFabricInfo_v2",
    "nvmlMarginTemperature_v1",
    "nvmlClocksEventReasonHwSlowdown",
    "nvmlClocksEventReasonSwThermalSlowdown",
    "nvmlClocksEventReasonHwThermalSlowdown",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown",
)
_PREFIXES = ("NVML_GPU_RECOVERY_ACTION_", "NVML_GPU_FABRIC_STATE_", "NVML_VALUE_TYPE_")


def layout(kind: Any) -> dict[str, Any]:
    """Return a structure's size, and each field's offset and size."""
    fields = {name: [getattr(kind, name).offset, getattr(kind, name).size] for name, *_ in kind._fields_}
    return {"size": ctypes.sizeof(kind), "fields": fields}


def main() -> None:
    vendor = import_module("pynvml")
    constants = [*CONSTANTS, *(name for name in dir(vendor) if name.startswith(_PREFIXES))]
    document = {
        "format": 1,
        "source": f"nvidia-ml-py {metadata.version('nvidia-ml-py')} (NVIDIA, BSD)",
        "structures": {
            ours: layout(getattr(vendor, theirs) if isinstance(theirs, str) else theirs)
            for ours, theirs in STRUCTURES.items()
        },
        "constants": {name: getattr(vendor, name) for name in constants},
    }
    target = Path(__file__).with_name("nvml-layout.json")
    target.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
