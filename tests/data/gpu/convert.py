"""From what `nvidia-smi -q` printed to a recording of the answers that NVML gave it.

    python tests/data/gpu/convert.py OUTPUT.txt --source URL > tests/data/gpu/NAME.json

nvidia-smi asks NVML and prints the answers, one a line, indented by section; with `-x` it prints XML. The recording
holds them as ``image_builder.node.gpu.model.Gpu`` has them. ``N/A`` is NVML's "not supported". What nvidia-smi
doesn't print (is the InfoROM valid, which links are up) is ``not recorded`` in ``missing``. The recordings here are of
the first GPU of each output, whose lines without a meaning for us were left out before.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from image_builder.node.gpu.model import Gpu, Process

_MIB = 1 << 20
_THROTTLES = {
    "Idle": 0x1,
    "Applications Clocks Setting": 0x2,
    "SW Power Cap": 0x4,
    "HW Slowdown": 0x8,
    "Sync Boost": 0x10,
    "SW Thermal Slowdown": 0x20,
    "HW Slowdown/HW Thermal Slowdown": 0x40,
    "HW Slowdown/HW Power Brake Slowdown": 0x80,
}
# What XML calls a section or a value that the text calls otherwise.
_XML_NAMES = {
    "product_name": "Product Name",
    "serial": "Serial Number",
    "uuid": "GPU UUID",
    "vbios_version": "VBIOS Version",
    "persistence_mode": "Persistence Mode",
    "mig_mode/current_mig": "MIG Mode/Current",
    "mig_mode/pending_mig": "MIG Mode/Pending",
    "pci/pci_bus_id": "PCI/Bus Id",
    "pci/pci_device_id": "PCI/Device Id",
    "pci/pci_gpu_link_info/pcie_gen/max_link_gen": "PCI/GPU Link Info/PCIe Generation/Max",
    "pci/pci_gpu_link_info/pcie_gen/current_link_gen": "PCI/GPU Link Info/PCIe Generation/Current",
    "pci/pci_gpu_link_info/link_widths/max_link_width": "PCI/GPU Link Info/Link Width/Max",
    "pci/pci_gpu_link_info/link_widths/current_link_width": "PCI/GPU Link Info/Link Width/Current",
    "pci/replay_counter": "PCI/Replays Since Reset",
    "fb_memory_usage/total": "FB Memory Usage/Total",
    "fb_memory_usage/reserved": "FB Memory Usage/Reserved",
    "fb_memory_usage/used": "FB Memory Usage/Used",
    "ecc_mode/current_ecc": "ECC Mode/Current",
    "ecc_mode/pending_ecc": "ECC Mode/Pending",
    **{
        f"ecc_errors/{when.lower()}/{xml}": f"ECC Errors/{when}/{name}"
        for when in ("Volatile", "Aggregate")
        for xml, name in {
            "sram_correctable": "SRAM Correctable",
            "sram_uncorrectable": "SRAM Uncorrectable",
            "dram_correctable": "DRAM Correctable",
            "dram_uncorrectable": "DRAM Uncorrectable",
        }.items()
    },
    "retired_pages/multiple_single_bit_retirement/retired_count": "Retired Pages/Single Bit ECC",
    "retired_pages/double_bit_retirement/retired_count": "Retired Pages/Double Bit ECC",
    "retired_pages/pending_retirement": "Retired Pages/Pending Page Blacklist",
    "remapped_rows": "Remapped Rows",
    "temperature/gpu_temp": "Temperature/GPU Current Temp",
    "temperature/gpu_temp_slow_threshold": "Temperature/GPU Slowdown Temp",
    "fabric/state": "Fabric/State",
    "fabric/status": "Fabric/Status",
}
_XML_THROTTLES = {
    "gpu_idle": "Idle",
    "applications_clocks_setting": "Applications Clocks Setting",
    "sw_power_cap": "SW Power Cap",
    "hw_slowdown": "HW Slowdown",
    "sync_boost": "Sync Boost",
    "sw_thermal_slowdown": "SW Thermal Slowdown",
    "hw_thermal_slowdown": "HW Slowdown/HW Thermal Slowdown",
    "hw_power_brake_slowdown": "HW Slowdown/HW Power Brake Slowdown",
}


def convert(text: str, source: str) -> dict[str, Any]:
    """Return the recording of one output."""
    blocks = list(_xml(text) if text.lstrip().startswith("<") else _plain(text))
    head, gpus = blocks[0], blocks[1:]
    return {
        "format": 1,
        "source": source,
        "recorded": head.get("Timestamp", ""),
        "driver": head["Driver Version"],
        "attached": int(head["Attached GPUs"]),
        "pci_devices": [gpu["PCI/Device Id"].removeprefix("0x")[:4].lower() for gpu in gpus],
        "gpus": [_without_defaults(asdict(_gpu(n, values))) for n, values in enumerate(gpus)],
    }


def _without_defaults(gpu: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in gpu.items() if value not in (None, {})}


def _plain(text: str) -> Iterator[dict[str, str]]:
    """Yield the head and each GPU as values by their path of sections."""
    values: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    for line in text.splitlines():
        indent, content = len(line) - len(line.lstrip()), line.strip()
        if not content or content.startswith("==="):
            continue
        if re.match(r"GPU [0-9A-Fa-f]{8}:", content):
            yield values
            values, path = {}, []
            continue
        name, colon, value = (part.strip() for part in content.partition(" : "))
        path = [(depth, section) for depth, section in path if depth < indent]
        key = "/".join([*(section for _, section in path), name])
        if colon or " : " in content:
            values[_free(values, key)] = value
        # A line of a kind like "HW Slowdown : Active" has lines below it, too.
        path.append((indent, name))
    yield values


def _free(values: dict[str, str], key: str) -> str:
    """Return a key that isn't taken: each process has the same ones."""
    number = 1
    while f"{key}#{number}" in values or (number == 1 and key in values):
        number += 1
    return key if key not in values else f"{key}#{number}"


def _xml(text: str) -> Iterator[dict[str, str]]:
    root = ET.fromstring(text)
    yield {
        "Timestamp": root.findtext("timestamp", ""),
        "Driver Version": root.findtext("driver_version", ""),
        "Attached GPUs": root.findtext("attached_gpus", ""),
    }
    for gpu in root.findall("gpu"):
        values = {name: (gpu.findtext(path) or "").strip() for path, name in _XML_NAMES.items()}
        for section in ("clocks_throttle_reasons", "clocks_event_reasons"):
            prefix = f"{section.removesuffix('s')}_"
            for process in gpu.findall(f"{section}/*"):
                bit = _XML_THROTTLES.get(process.tag.removeprefix(prefix))
                if bit:
                    values[f"Clocks Event Reasons/{bit}"] = process.text or ""
        for number, process in enumerate(gpu.findall("processes/process_info")):
            mark = f"#{number}" if number else ""
            for tag, name in (
                ("pid", "Process ID"),
                ("type", "Process ID/Type"),
                ("process_name", "Process ID/Name"),
                ("used_memory", "Process ID/Used GPU Memory"),
            ):
                values[f"Processes/{name}{mark}"] = process.findtext(tag, "")
        yield values


def _gpu(index: int, values: dict[str, str]) -> Gpu:
    fields: dict[str, Any] = {}
    missing: dict[str, str] = {}

    def put(field: str, value: str | None, make: Any) -> None:
        if value is None or value == "":
            missing[field] = "not recorded"
        elif value in ("N/A", "[N/A]") or value.startswith("Requested functionality"):
            missing[field] = "not-supported"
        else:
            fields[field] = make(value)

    for field, (make, *names) in _PLAIN.items():
        put(field, _get(values, *names), make)
    for when in ("Volatile", "Aggregate"):
        _put_ecc(put, values, when)
    _put_rows(put, values)
    limit = _get(values, "Temperature/GPU T.Limit Temp")
    slowdown = _get(values, "Temperature/GPU Slowdown T.Limit Temp")
    both = "N/A" if "N/A" in (limit, slowdown) else limit if slowdown else None
    put("temperature_margin_c", both, lambda _: _number(limit or "0") - _number(slowdown or "0"))
    sections = ("Clocks Event Reasons", "Clocks Throttle Reasons")
    active = [b for n, b in _THROTTLES.items() if _get(values, *(f"{s}/{n}" for s in sections)) == "Active"]
    put("throttle", _get(values, *(f"{section}/Idle" for section in sections)), lambda _: sum(active))
    for field in ("unrepairable_memory", "inforom_valid", "nvlinks", "nvlink_errors", "compute_capability"):
        missing[field] = "not recorded"
    fields["processes"] = tuple(_processes(values))
    return Gpu(
        index, values["GPU UUID"], values["PCI/Bus Id"], values["Product Name"], **fields, missing=missing
    )


def _get(values: dict[str, str], *names: str) -> str | None:
    return next((values[name] for name in names if name in values), None)


def _put_rows(put: Any, values: dict[str, str]) -> None:
    """Put the remapped rows; a GPU without them has `N/A` instead of the whole section."""
    section = "Remapped Rows"
    none = _get(values, section)
    put("remap_correctable", _get(values, f"{section}/Correctable Error") or none, int)
    put("remap_uncorrectable", _get(values, f"{section}/Uncorrectable Error") or none, int)
    put("remap_pending", _get(values, f"{section}/Pending") or none, _is_on)
    put("remap_failure", _get(values, f"{section}/Remapping Failure Occurred") or none, _is_on)
    banks = f"{section}/Bank Remap Availability Histogram"
    counts = [_get(values, f"{banks}/{name}") for name in ("Max", "High", "Partial", "Low", "None")]
    put("remap_histogram", counts[0] or none, lambda _: tuple(_number(count or "0") for count in counts))


def _put_ecc(put: Any, values: dict[str, str], when: str) -> None:
    """Put the counts of one scope: by SRAM and DRAM since Turing, by single and double bits on Volta."""
    at, low = f"ECC Errors/{when}", when.lower()
    sums = {"corrected": [f"{at}/SRAM Correctable", f"{at}/DRAM Correctable", f"{at}/Single Bit/Total"]}
    sums["uncorrected_sram"] = [
        f"{at}/SRAM Uncorrectable",
        f"{at}/SRAM Uncorrectable Parity",
        f"{at}/SRAM Uncorrectable SEC-DED",
    ]
    sums["uncorrected_dram"] = [f"{at}/DRAM Uncorrectable", f"{at}/Double Bit/Device Memory"]
    sums["uncorrected"] = [*sums["uncorrected_sram"], f"{at}/DRAM Uncorrectable", f"{at}/Double Bit/Total"]
    for kind, names in sums.items():
        answers = [values[name] for name in names if values.get(name)]
        total = "N/A" if "N/A" in answers else str(sum(map(int, answers))) if answers else None
        put(f"ecc_{low}_{kind}", total, int)


def _processes(values: dict[str, str]) -> Iterator[Process]:
    """Yield the processes of type C: NVML's list of compute processes has no others."""
    for key, pid in values.items():
        if re.fullmatch(r"Processes/Process ID(#\d+)?", key):
            mark = key.partition("#")[2]
            mark = f"#{mark}" if mark else ""
            if "C" in values[f"Processes/Process ID/Type{mark}"]:
                used = values[f"Processes/Process ID/Used GPU Memory{mark}"]
                name = Path(values[f"Processes/Process ID/Name{mark}"]).name
                yield Process(int(pid), _mib(used) if used != "N/A" else None, name)


def _mib(text: str) -> int:
    return int(text.removesuffix("MiB")) * _MIB


def _number(text: str) -> int:
    number = re.match(r"-?\d+", text)
    return int(number[0]) if number else 0


def _is_on(text: str) -> bool:
    return text in ("Enabled", "Yes", "Active")


_LINK = "PCI/GPU Link Info"
# Fields that are one value: what makes it, and its names in the output.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "serial": (str, "Serial Number"),
    "vbios": (str, "VBIOS Version"),
    "memory_total_bytes": (_mib, "FB Memory Usage/Total"),
    "memory_reserved_bytes": (_mib, "FB Memory Usage/Reserved"),
    "memory_used_bytes": (_mib, "FB Memory Usage/Used"),
    "ecc_current": (_is_on, "ECC Mode/Current", "Ecc Mode/Current"),
    "ecc_pending": (_is_on, "ECC Mode/Pending", "Ecc Mode/Pending"),
    "sram_threshold_exceeded": (_is_on, "ECC Errors/Aggregate/SRAM Threshold Exceeded"),
    "retired_single_bit": (int, "Retired Pages/Single Bit ECC"),
    "retired_double_bit": (int, "Retired Pages/Double Bit ECC"),
    "retired_pending": (_is_on, "Retired Pages/Pending Page Blacklist"),
    "recovery_action": (str.lower, "GPU Recovery Action"),
    "persistence": (_is_on, "Persistence Mode"),
    "mig_current": (_is_on, "MIG Mode/Current"),
    "mig_pending": (_is_on, "MIG Mode/Pending"),
    "pcie_generation": (_number, f"{_LINK}/PCIe Generation/Current"),
    "pcie_generation_max": (_number, f"{_LINK}/PCIe Generation/Max"),
    "pcie_width": (_number, f"{_LINK}/Link Width/Current"),
    "pcie_width_max": (_number, f"{_LINK}/Link Width/Max"),
    "pcie_replays": (int, "PCI/Replays Since Reset"),
    "fabric_state": (lambda word: word.lower().replace(" ", "-"), "Fabric/State"),
    "fabric_status": (str.lower, "Fabric/Status"),
    "temperature_c": (_number, "Temperature/GPU Current Temp"),
    "temperature_slowdown_c": (_number, "Temperature/GPU Slowdown Temp"),
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--source", required=True)
    options = parser.parse_args()
    json.dump(convert(options.output.read_text(), options.source), sys.stdout, indent=1)
    sys.stdout.write("\n")
