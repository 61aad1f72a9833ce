"""Our NVML bindings have the vendor's layouts, and pass recorded answers through unchanged.

No GPU is involved: the library is a fake that serves recorded answers through the same C types.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import pytest

from image_builder.node.gpu import nvml, readings
from image_builder.node.gpu.model import Gpu, Process
from image_builder.node.gpu.rules import active
from tests.data.gpu.layout import STRUCTURES, layout
from tests.support.gpu_stand_in.libnvidia_ml import VENDOR, Answering, Node
from tests.support.gpu_stand_in.recordings import DATA, recorded

RECORDINGS = sorted(path.stem for path in DATA.glob("*.json") if path.stem != "nvml-layout")


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_structure_is_as_the_vendors(name: str) -> None:
    assert layout(getattr(nvml, name)) == VENDOR["structures"][name]


def test_constants_are_the_vendors() -> None:
    counters = tuple(readings.LINK_COUNTERS)
    ours = {
        "NVML_SUCCESS": nvml.SUCCESS,
        "NVML_ERROR_INVALID_ARGUMENT": nvml.INVALID_ARGUMENT,
        "NVML_ERROR_NOT_SUPPORTED": nvml.NOT_SUPPORTED,
        "NVML_ERROR_INSUFFICIENT_SIZE": nvml.INSUFFICIENT_SIZE,
        "NVML_ERROR_DRIVER_NOT_LOADED": nvml.DRIVER_NOT_LOADED,
        "NVML_ERROR_FUNCTION_NOT_FOUND": nvml.FUNCTION_NOT_FOUND,
        "NVML_ERROR_CORRUPTED_INFOROM": nvml.CORRUPTED_INFOROM,
        "NVML_ERROR_LIB_RM_VERSION_MISMATCH": nvml.VERSION_MISMATCH,
        "NVML_ERROR_ARGUMENT_VERSION_MISMATCH": nvml.NO_SUCH_VERSION,
        "NVML_ERROR_INVALID_STATE": readings.LINK_IS_DOWN,
        "NVML_MEMORY_ERROR_TYPE_CORRECTED": readings.CORRECTED,
        "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": readings.UNCORRECTED,
        "NVML_VOLATILE_ECC": readings.VOLATILE,
        "NVML_AGGREGATE_ECC": readings.AGGREGATE,
        "NVML_MEMORY_LOCATION_DRAM": readings.DRAM,
        "NVML_MEMORY_LOCATION_SRAM": readings.SRAM,
        "NVML_TEMPERATURE_GPU": readings.SENSOR_GPU,
        "NVML_TEMPERATURE_THRESHOLD_SLOWDOWN": readings.THRESHOLD_SLOWDOWN,
        "NVML_FI_DEV_RETIRED_SBE": readings.FI_RETIRED_SBE,
        "NVML_FI_DEV_RETIRED_DBE": readings.FI_RETIRED_DBE,
        "NVML_FI_DEV_RETIRED_PENDING": readings.FI_RETIRED_PENDING,
        "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION": readings.FI_RECOVERY_ACTION,
        "NVML_NVLINK_ERROR_DL_REPLAY": counters[0],
        "NVML_NVLINK_ERROR_DL_RECOVERY": counters[1],
        "NVML_NVLINK_ERROR_DL_CRC_FLIT": counters[2],
        "NVML_NVLINK_ERROR_DL_CRC_DATA": counters[3],
        "nvmlMemory_v2": nvml.versioned(nvml.MemoryV2, 2).version,
        "nvmlEccSramErrorStatus_v1": nvml.versioned(nvml.SramStatus, 1).version,
        "nvmlGpuFabricInfo_v2": nvml.versioned(nvml.FabricInfo, 2).version,
        "nvmlMarginTemperature_v1": nvml.versioned(nvml.MarginTemperature, 1).version,
    }
    constants = VENDOR["constants"]
    assert {name: constants[name] for name in ours} == ours
    assert {bit for name, bit in constants.items() if name.startswith("nvmlClocksEventReason")} == set(
        active.THROTTLES
    )


@pytest.mark.parametrize(
    ("prefix", "ours"),
    [
        ("NVML_GPU_RECOVERY_ACTION_", readings.RECOVERY_ACTIONS),
        ("NVML_GPU_FABRIC_STATE_", readings.FABRIC_STATES),
    ],
)
def test_an_enumeration_is_the_vendors(prefix: str, ours: tuple[str, ...]) -> None:
    structures = {
        number: name.removeprefix(prefix).lower().replace("_", "-")
        for name, number in VENDOR["constants"].items()
        if name.startswith(prefix)
    }
    assert structures == dict(enumerate(ours))


FULL = replace(
    recorded("h100-sxm5-80gb")[0],
    inforom_valid=True,
    nvlinks=(True,) * 17 + (False,),
    nvlink_errors=6,
    nvlink_replays=1,
    nvlink_recoveries=2,
    nvlink_crc_errors=3,
    compute_capability="9.0",
    recovery_action="drain-and-reset",
    unrepairable_memory=True,
    retired_single_bit=2,
    retired_double_bit=0,
    retired_pending=True,
    temperature_slowdown_c=90,
    processes=(Process(7, None), Process(8, 1 << 30)),
)


def read(gpu: Gpu, codes: dict[str, int] | None = None) -> Gpu:
    fake = nvml.Library(Answering(gpu, codes))
    return readings.read_gpu(fake, readings.handle_of(fake, 0), gpu.index)


@pytest.mark.parametrize("name", RECORDINGS)
def test_recorded_answers_come_through(name: str) -> None:
    gpu, _ = recorded(name)
    reading = read(gpu)
    nameless = tuple(replace(process, name="") for process in gpu.processes or ())
    assert replace(reading, missing={}) == replace(gpu, processes=nameless, missing={})
    none = {field for field in Gpu.__dataclass_fields__ if getattr(gpu, field) is None}
    assert set(reading.missing) == none
    assert set(reading.missing.values()) == {"not-supported"}


def test_every_answer_comes_through() -> None:
    reading = read(FULL)
    assert reading == replace(FULL, missing={})


FIELDS = {name for names, _ in readings.READERS for name in names}


def test_every_field_is_asked_for() -> None:
    by_other_means = {"index", "uuid", "pci", "missing", "recovery_action"}
    by_other_means |= {"retired_single_bit", "retired_double_bit", "retired_pending"}
    assert FIELDS | by_other_means == set(Gpu.__dataclass_fields__)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (nvml.NOT_SUPPORTED, "not-supported"),
        (nvml.FUNCTION_NOT_FOUND, "no-function"),
        (nvml.NO_SUCH_VERSION, "no-function"),
        (999, "error: nvmlDeviceGetEccMode: unknown error (999)"),
        (15, "error: nvmlDeviceGetEccMode: the GPU is lost (15)"),
    ],
)
def test_no_answer_is_told_apart_from_an_error(code: int, reason: str) -> None:
    reading = read(FULL, {"nvmlDeviceGetEccMode": code})
    assert (reading.ecc_current, reading.ecc_pending) == (None, None)
    assert reading.missing == {"ecc_current": reason, "ecc_pending": reason}


def test_an_unheard_field_value_is_not_supported() -> None:
    class Older(Answering):
        def _FieldValues(self, out: list[Any]) -> int:  # noqa: N802
            for request in out[1]:
                request.nvmlReturn = (
                    nvml.INVALID_ARGUMENT if request.fieldId == readings.FI_RECOVERY_ACTION else 0
                )
            return 0

    fake = nvml.Library(Older(FULL))
    reading = readings.read_gpu(fake, readings.handle_of(fake, 0), 0)
    assert reading.recovery_action is None and reading.missing["recovery_action"] == "not-supported"
    assert reading.retired_double_bit == 0


def test_a_corrupted_inforom_is_an_answer() -> None:
    assert read(replace(FULL, inforom_valid=False)).inforom_valid is False


def test_an_old_library_has_another_memory_call() -> None:
    reading = read(FULL, {"nvmlDeviceGetMemoryInfo_v2": nvml.FUNCTION_NOT_FOUND})
    assert reading.memory_total_bytes == FULL.memory_total_bytes
    assert reading.memory_reserved_bytes is None


def test_an_old_library_has_another_name_for_throttling() -> None:
    class Older(Answering):
        def _plain(self, short: str, out: list[Any]) -> list[Any]:
            return super()._plain(short.replace("Throttle", "Event"), out)

    fake = nvml.Library(Older(FULL, {"nvmlDeviceGetCurrentClocksEventReasons": nvml.FUNCTION_NOT_FOUND}))
    assert readings.read_gpu(fake, readings.handle_of(fake, 0), 0).throttle == FULL.throttle


def test_more_processes_than_there_was_room_for() -> None:
    many = tuple(Process(pid, 1) for pid in range(1, 101))
    assert read(replace(FULL, processes=many)).processes == many


def test_a_lost_gpu_is_named() -> None:
    machine_reading = readings.look(nvml.Library(Node((FULL,) * 8, "535.183.01", lost=(5,))))
    assert (machine_reading.driver, machine_reading.count, len(machine_reading.gpus)) == ("535.183.01", 8, 7)
    assert machine_reading.lost == {"5": "nvmlDeviceGetHandleByIndex_v2: the GPU is lost (15)"}


def test_a_sample_under_load() -> None:
    sample = readings.sample(nvml.Library(Answering(FULL)), ctypes.c_void_p(), FULL.uuid, 1.5)
    assert (sample.gpu, sample.seconds, sample.throttle) == (FULL.uuid, 1.5, FULL.throttle)
    assert (sample.pcie_generation, sample.pcie_width, sample.utilization_percent) == (5, 16, 97)
    assert sample.temperature_margin_c == FULL.temperature_margin_c


def test_no_library() -> None:
    with pytest.raises(OSError, match="no-such") as caught, nvml.opened("libnvidia-ml.so.no-such"):
        pass
    assert nvml.refused(caught.value).error.startswith("library: ")


@pytest.mark.parametrize(
    ("code", "kind"), [(nvml.VERSION_MISMATCH, "mismatch"), (nvml.DRIVER_NOT_LOADED, "init"), (999, "init")]
)
def test_a_library_that_refuses(code: int, kind: str) -> None:
    assert nvml.refused(nvml.NvmlError("nvmlInit_v2", code)).error.startswith(f"{kind}: nvmlInit_v2: ")
