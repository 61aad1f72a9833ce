"""A fake libnvidia-ml that serves recorded answers of real GPUs through the real library's C types."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from image_builder.node.gpu import nvml, readings
from image_builder.node.gpu.model import Gpu
from tests.support.gpu_stand_in.recordings import DATA

VENDOR = json.loads((DATA / "nvml-layout.json").read_text(encoding="utf-8"))


class Answering:
    """A fake library that gives the answers of one GPU through the real one's C types."""

    def __init__(self, gpu: Gpu, codes: dict[str, int] | None = None) -> None:
        self.gpu, self.codes = gpu, codes or {}

    def __getattr__(self, name: str) -> Callable[..., int]:
        if self.codes.get(name) == nvml.FUNCTION_NOT_FOUND:
            raise AttributeError(name)
        return lambda *arguments: self.codes.get(name, 0) or self._answer(name, arguments)

    def _answer(self, name: str, arguments: tuple[Any, ...]) -> int:
        gpu, short = self.gpu, name.removeprefix("nvmlDeviceGet")
        out = [getattr(argument, "_obj", argument) for argument in arguments[1:]]
        texts = {"UUID": gpu.uuid, "Name": gpu.name, "Serial": gpu.serial, "VbiosVersion": gpu.vbios}
        if short == "HandleByIndex_v2":
            return 0
        if short in texts:
            return self._text(out[0], texts[short])
        if name == "nvmlDeviceValidateInforom":
            return {None: nvml.NOT_SUPPORTED, False: nvml.CORRUPTED_INFOROM, True: 0}[gpu.inforom_valid]
        if short == "PciInfo_v3":
            out[0].busId = gpu.pci.encode()
            return 0
        special = getattr(self, f"_{short}", None) if short in SPECIAL else None
        return int(special(out)) if special else self._numbers(self._plain(short, out), out)

    def _text(self, buffer: Any, value: str | None) -> int:
        if value is None:
            return nvml.NOT_SUPPORTED
        buffer.value = value.encode()
        return 0

    def _plain(self, short: str, out: list[Any]) -> list[Any]:
        gpu = self.gpu
        if short in ("TotalEccErrors", "MemoryErrorCounter"):
            kind = "uncorrected" if out[0].value else "corrected"
            when = "aggregate" if out[1].value else "volatile"
            where = {2: "_dram", 7: "_sram"}[out[2].value] if short == "MemoryErrorCounter" else ""
            return [getattr(gpu, f"ecc_{when}_{kind}{where}")]
        capability: list[Any] = [int(part) for part in (gpu.compute_capability or "").split(".") if part]
        plain: dict[str, list[Any]] = {
            "CudaComputeCapability": capability or [None],
            "EccMode": [gpu.ecc_current, gpu.ecc_pending],
            "MigMode": [gpu.mig_current, gpu.mig_pending],
            "PersistenceMode": [gpu.persistence],
            "RemappedRows": [
                gpu.remap_correctable,
                gpu.remap_uncorrectable,
                gpu.remap_pending,
                gpu.remap_failure,
            ],
            "CurrPcieLinkGeneration": [gpu.pcie_generation],
            "CurrPcieLinkWidth": [gpu.pcie_width],
            "MaxPcieLinkGeneration": [gpu.pcie_generation_max],
            "MaxPcieLinkWidth": [gpu.pcie_width_max],
            "PcieReplayCounter": [gpu.pcie_replays],
            "CurrentClocksEventReasons": [gpu.throttle],
            "Temperature": [gpu.temperature_c],
            "TemperatureThreshold": [gpu.temperature_slowdown_c],
        }
        return plain[short]

    def _numbers(self, values: list[Any], out: list[Any]) -> int:
        if None in values:
            return nvml.NOT_SUPPORTED
        for value, target in zip(values, out[-len(values) :], strict=True):
            target.value = int(value)
        return 0

    def _MemoryInfo_v2(self, out: list[Any]) -> int:  # noqa: N802 (the library's names)
        assert out[0].version == VENDOR["constants"]["nvmlMemory_v2"]
        out[0].total, out[0].used = self.gpu.memory_total_bytes, self.gpu.memory_used_bytes
        out[0].reserved = self.gpu.memory_reserved_bytes
        return 0

    def _MemoryInfo(self, out: list[Any]) -> int:  # noqa: N802
        out[0].total, out[0].used = self.gpu.memory_total_bytes, self.gpu.memory_used_bytes
        return 0

    def _SramEccErrorStatus(self, out: list[Any]) -> int:  # noqa: N802
        out[0].bThresholdExceeded = bool(self.gpu.sram_threshold_exceeded)
        return nvml.NOT_SUPPORTED if self.gpu.sram_threshold_exceeded is None else 0

    def _RowRemapperHistogram(self, out: list[Any]) -> int:  # noqa: N802
        if self.gpu.remap_histogram is None:
            return nvml.NOT_SUPPORTED
        for (name, _), count in zip(nvml.RowHistogram._fields_, self.gpu.remap_histogram, strict=True):
            setattr(out[0], name, count)
        return 0

    def _NvLinkState(self, out: list[Any]) -> int:  # noqa: N802
        links, number = self.gpu.nvlinks, out[0].value
        if links is None or number >= len(links):
            return nvml.INVALID_ARGUMENT if links else nvml.NOT_SUPPORTED
        out[1].value = int(links[number])
        return 0

    def _NvLinkErrorCounter(self, out: list[Any]) -> int:  # noqa: N802
        name = readings.LINK_COUNTERS[out[1].value]
        # All errors are on the first link; of the two counters that are summed, only the first has any.
        is_first = out[0].value == 0 and out[1].value < 3
        out[2].value = getattr(self.gpu, name) or 0 if is_first else 0
        return 0

    def _GpuFabricInfoV(self, out: list[Any]) -> int:  # noqa: N802
        if self.gpu.fabric_state is None:
            return nvml.NOT_SUPPORTED
        out[0].state = readings.FABRIC_STATES.index(self.gpu.fabric_state)
        out[0].status = 0 if self.gpu.fabric_status == "success" else 999
        return 0

    def _MarginTemperature(self, out: list[Any]) -> int:  # noqa: N802
        out[0].marginTemperature = self.gpu.temperature_margin_c or 0
        return nvml.NOT_SUPPORTED if self.gpu.temperature_margin_c is None else 0

    def _UnrepairableMemoryFlag_v1(self, out: list[Any]) -> int:  # noqa: N802
        out[0].bUnrepairableMemory = bool(self.gpu.unrepairable_memory)
        return nvml.NOT_SUPPORTED if self.gpu.unrepairable_memory is None else 0

    def _UtilizationRates(self, out: list[Any]) -> int:  # noqa: N802
        out[0].gpu = 97
        return 0

    def _ComputeRunningProcesses_v3(self, out: list[Any]) -> int:  # noqa: N802
        count, array = out
        processes = self.gpu.processes or ()
        if count.value < len(processes):
            count.value = len(processes)
            return nvml.INSUFFICIENT_SIZE
        for number, process in enumerate(processes):
            array[number].pid = process.pid
            array[number].usedGpuMemory = 2**64 - 1 if process.used_bytes is None else process.used_bytes
        count.value = len(processes)
        return 0

    def _FieldValues(self, out: list[Any]) -> int:  # noqa: N802
        answers = {
            readings.FI_RETIRED_SBE: self.gpu.retired_single_bit,
            readings.FI_RETIRED_DBE: self.gpu.retired_double_bit,
            readings.FI_RETIRED_PENDING: self.gpu.retired_pending,
            readings.FI_RECOVERY_ACTION: None
            if self.gpu.recovery_action is None
            else readings.RECOVERY_ACTIONS.index(self.gpu.recovery_action),
        }
        for field in out[1]:
            value = answers[field.fieldId]
            field.nvmlReturn = nvml.NOT_SUPPORTED if value is None else 0
            field.valueType, field.value.uiVal = 1, int(value or 0)
        return 0


SPECIAL = {name[1:] for name in vars(Answering) if name[1:2].isupper()}


class Node:
    """The library on a node: it counts the GPUs and opens all but those in ``lost``. ``codes`` apply to all calls."""

    def __init__(
        self,
        gpus: tuple[Gpu, ...],
        driver: str,
        lost: tuple[int, ...] = (),
        codes: dict[str, int] | None = None,
    ) -> None:
        self.gpus, self.driver, self.lost, self.codes = gpus, driver, lost, codes or {}

    def __getattr__(self, name: str) -> Callable[..., int]:
        own: dict[str, Callable[..., int]] = {
            "nvmlDeviceGetCount_v2": self._count,
            "nvmlDeviceGetHandleByIndex_v2": self._open,
            "nvmlSystemGetDriverVersion": self._driver,
        }
        return own.get(name) or (lambda handle, *rest: self._asked(name, handle, *rest))

    def _asked(self, name: str, handle: Any, *rest: Any) -> int:
        # A handle is the index plus 1: 0 isn't a valid pointer.
        entry = getattr(Answering(self.gpus[handle.value - 1], self.codes), name)
        return int(entry(handle, *rest))

    def _open(self, index: Any, out: Any) -> int:
        out._obj.value = index.value + 1
        return 15 if index.value in self.lost else 0

    def _count(self, out: Any) -> int:
        out._obj.value = len(self.gpus)
        return self.codes.get("nvmlDeviceGetCount_v2", 0)

    def _driver(self, buffer: Any, _: Any) -> int:
        buffer.value = self.driver.encode()
        return 0
