"""What a VM size must have and reach: ``sizes.json``, read so that a slip of the pen can't become a floor.

Published tables of this kind have had a value in GB/s where MB/s were meant, a missing digit, and a floor above what
the part can do: all pass a test for "a number". So each key has its unit, each floor must lie between 0.2 and 1.0 of
the part's peak, each peak within what any GPU has, and each value says where it is from.
"""

from __future__ import annotations

import json
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

from image_builder.node.errors import NodeError

FORMAT = 1
# A floor below the first part of the peak tests nothing, one above the second can't be reached.
FLOOR_OF_PEAK = (0.2, 1.0)
# What any GPU from Volta to the next generations may have; a table in other units falls out of these.
_PLAUSIBLE: Mapping[str, tuple[float, float]] = {
    "memory_mib": (8_000, 600_000),
    "hbm_peak_gbps": (200, 20_000),
    "mma_fp16_peak_tflops": (20, 10_000),
    "nvlink_peak_gbps": (100, 4_000),
    "pcie_peak_gbps": (7, 260),
    "pcie_generation": (3, 7),
    "memory_gib": (8, 8_000),
    "infiniband_gbit": (40, 1_600),
}
_WIDTHS = (1, 2, 4, 8, 16)
FLAVOURS = ("open", "proprietary")


@dataclass(frozen=True)
class Floor:
    """The least that is accepted, in the unit of its key, and where that number is from."""

    value: float
    source: str


@dataclass(frozen=True)
class GpuModel:
    """A part. ``gbps`` is 10^9 bytes a second in one direction, ``nvlink_peak_gbps`` both directions together.

    ``fabric_state``: the GPU itself tells whether it has joined the NVLink fabric. ``mma_reference_tflops`` is what
    this project's own kernel reaches on a healthy one; None until it was measured.
    """

    name_pattern: str
    compute_capability: str
    memory_mib: int
    hbm_peak_gbps: float
    mma_fp16_peak_tflops: float
    nvlink_peak_gbps: float
    nvlink_links_max: int
    pcie_generation: int
    pcie_width: int
    pcie_peak_gbps: float
    driver_flavours: tuple[str, ...]
    row_remapping: bool
    fabric_state: bool
    source: str
    mma_reference_tflops: Floor | None


@dataclass(frozen=True)
class Size:
    """A VM size: what it has, and the floors. ``local_nvme`` None: not known. ``nvlink_links`` 0: none are used.

    ``calibrated``: floors and disks were measured with this test on healthy machines of this size.
    """

    name: str
    gpu: str
    count: int
    h2d_floor_gbps: Floor
    d2h_floor_gbps: Floor
    hbm_floor_gbps: Floor
    p2p_floor_gbps: Floor | None
    nvlink_links: int
    nvswitch: bool
    pcie_width: int
    infiniband_ports: int
    infiniband_gbit: int
    local_nvme: int | None
    memory_gib: int
    calibrated: bool
    retired: str
    source: str


@dataclass(frozen=True)
class Table:
    """All sizes, by the lower-case name: Azure's own spelling varies."""

    version: str
    gpus: Mapping[str, GpuModel]
    sizes: Mapping[str, Size]

    def find(self, size: str) -> tuple[Size, GpuModel] | None:
        """Return a size and its part, None where the table has no such size."""
        entry = self.sizes.get(size.lower())
        return (entry, self.gpus[entry.gpu]) if entry else None


OVERRIDABLE = ("h2d_floor_gbps", "d2h_floor_gbps", "hbm_floor_gbps", "p2p_floor_gbps", "mma_reference_tflops")


def load() -> Table:
    """Return the table that comes with the agent. Raises NodeError (``gpu.sizes``)."""
    return parse(json.loads(pkgutil.get_data(__package__, "sizes.json") or b"{}"))


def parse(document: Any) -> Table:
    """Return a table; raises NodeError (``gpu.sizes``) with all that is wrong with it at once."""
    problems: list[str] = []
    if not isinstance(document, dict):
        raise NodeError("gpu.sizes", "sizes.json holds no object")
    unknown = sorted(set(document) - {"format", "version", "about", "gpus", "sizes"})
    problems += [f"{name}: there is no such key" for name in unknown]
    if document.get("format") != FORMAT:
        problems.append(f"format: {document.get('format')!r} is not {FORMAT}")
    if not isinstance(document.get("version"), str) or not document["version"]:
        problems.append("version: missing")
    gpus = {k: _read(GpuModel, v, f"gpus.{k}", problems) for k, v in _objects(document, "gpus", problems)}
    sizes = {
        k.lower(): _read(Size, {"name": k, **v}, f"sizes.{k}", problems)
        for k, v in _objects(document, "sizes", problems)
    }
    models = {k: v for k, v in gpus.items() if v}
    for gpu_name, gpu in models.items():
        problems += [f"gpus.{gpu_name}.{problem}" for problem in model_problems(gpu)]
    for size in sizes.values():
        if size and size.gpu not in gpus:
            problems.append(f"sizes.{size.name}.gpu: there is no {size.gpu!r}")
        elif size and size.gpu in models:
            problems += [f"sizes.{size.name}.{problem}" for problem in size_problems(size, models[size.gpu])]
    if problems:
        raise NodeError("gpu.sizes", "sizes.json: " + "; ".join(problems))
    return Table(document["version"], models, {k: v for k, v in sizes.items() if v})


def _objects(
    document: Mapping[str, Any], key: str, problems: list[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    group = document.get(key)
    if not isinstance(group, dict) or not group:
        problems.append(f"{key}: missing or no object")
        return
    for name, value in group.items():
        if isinstance(value, dict):
            yield name, value
        else:
            problems.append(f"{key}.{name}: no object")


def _read(kind: Callable[..., Any], raw: Mapping[str, Any], where: str, problems: list[str]) -> Any:
    """Return a GpuModel or Size, None where it can't be made; what is wrong goes to ``problems``."""
    types = {field.name: str(field.type) for field in fields(kind) if field.default is MISSING}  # type: ignore[arg-type]
    value = {"source" if key == "from" else key: item for key, item in raw.items()}
    wrong = [f"{where}.{key}: there is no such key" for key in sorted(set(value) - set(types))]
    wrong += [f"{where}.{key}: missing" for key in types if key not in value]
    values: dict[str, Any] = {}
    for key, type_name in types.items():
        if key in value:
            try:
                values[key] = _typed(value[key], type_name)
            except ValueError as error:
                wrong.append(f"{where}.{key}: {error}")
    problems += wrong
    return None if wrong else kind(**values)


def _typed(value: Any, type_name: str) -> Any:
    if value is None and type_name.endswith("| None"):
        return None
    name = type_name.removesuffix(" | None")
    if name == "Floor":
        return read_floor(value)
    if name == "tuple[str, ...]":
        if isinstance(value, list) and value and all(item in FLAVOURS for item in value):
            return tuple(value)
        raise ValueError(f"{value!r} is no list of {', '.join(FLAVOURS)}")
    kind = {"str": str, "int": int, "bool": bool, "float": (int, float)}[name]
    if not isinstance(value, kind) or (name != "bool" and isinstance(value, bool)):  # type: ignore[arg-type]
        raise ValueError(f"{value!r} is of another type than {name}")
    return value


def read_floor(value: Any) -> Floor:
    """Return a floor from ``{"value": 21, "from": "…"}``; raises ValueError."""
    if not isinstance(value, dict) or set(value) != {"value", "from"}:
        raise ValueError(f"{value!r} is no object with value and from")
    number, source = value["value"], value["from"]
    if isinstance(number, bool) or not isinstance(number, int | float) or not number > 0:
        raise ValueError(f"{number!r} is no number above 0")
    if not isinstance(source, str) or not source.strip():
        raise ValueError("from: nothing says where the number is from")
    return Floor(float(number), source)


def model_problems(gpu: GpuModel) -> list[str]:
    """Return what is implausible about a part."""
    bounded = {key: getattr(gpu, key) for key in _PLAUSIBLE if hasattr(gpu, key)}
    has_links = gpu.nvlink_links_max > 0
    if not has_links and gpu.nvlink_peak_gbps == 0:
        bounded.pop("nvlink_peak_gbps")
    wrong = _out_of_bounds(bounded)
    rules = {
        "nvlink_links_max: not 0 to 18": 0 <= gpu.nvlink_links_max <= 18,
        "nvlink_peak_gbps: a peak without links, or links without one": has_links
        == (gpu.nvlink_peak_gbps > 0),
        f"pcie_width: not one of {_WIDTHS}": gpu.pcie_width in _WIDTHS,
        "compute_capability: not like 9.0": bool(re.fullmatch(r"\d{1,2}\.\d", gpu.compute_capability)),
        "name_pattern: no regular expression that says something": _is_pattern(gpu.name_pattern),
        "from: nothing says where these are from": bool(gpu.source.strip()),
        "pcie_peak_gbps: not what this generation and width carry": (
            0.9 < gpu.pcie_peak_gbps / (0.985 * 2 ** (gpu.pcie_generation - 3) * gpu.pcie_width) < 1.1
            if gpu.pcie_generation in range(3, 8)
            else True
        ),
    }
    wrong += [problem for problem, is_kept in rules.items() if not is_kept]
    if gpu.mma_reference_tflops:
        wrong += _floor_problem("mma_reference_tflops", gpu.mma_reference_tflops, gpu.mma_fp16_peak_tflops)
    return wrong


def size_problems(size: Size, gpu: GpuModel) -> list[str]:
    """Return what is implausible about a size, its floors against the peaks of its part."""
    wrong = _out_of_bounds({"memory_gib": size.memory_gib})
    if size.infiniband_ports:
        wrong += _out_of_bounds({"infiniband_gbit": size.infiniband_gbit})
    rules = {
        f"count: {size.count} is not 1 to 16": 1 <= size.count <= 16,
        "name: not like Standard_NC6s_v3": bool(re.fullmatch(r"Standard_N[A-Z]+\w+_v\d", size.name)),
        f"nvlink_links: not 0 to {gpu.nvlink_links_max}": 0 <= size.nvlink_links <= gpu.nvlink_links_max,
        "p2p_floor_gbps: a floor without a link to another GPU": not size.p2p_floor_gbps
        or (size.count > 1 and size.nvlink_links > 0),
        "nvswitch: without links": not size.nvswitch or size.nvlink_links > 0,
        f"pcie_width: not one of {_WIDTHS}, or more than the part has": size.pcie_width in _WIDTHS
        and size.pcie_width <= gpu.pcie_width,
        "infiniband_ports: not 0 to 16": 0 <= size.infiniband_ports <= 16,
        "local_nvme: not 0 to 16": size.local_nvme is None or 0 <= size.local_nvme <= 16,
        "retired: no date": bool(re.fullmatch(r"(\d{4}-\d\d-\d\d)?", size.retired)),
        "from: nothing says where these are from": bool(size.source.strip()),
    }
    wrong += [problem for problem, is_kept in rules.items() if not is_kept]
    peaks = floor_peaks(size, gpu)
    for key in OVERRIDABLE[:-1]:
        floor = getattr(size, key)
        if floor:
            wrong += _floor_problem(key, floor, peaks[key])
    return wrong


def floor_peaks(size: Size, gpu: GpuModel) -> dict[str, float]:
    """Return by key what a floor may not exceed. NVLink: one direction, over the links that lead to other GPUs."""
    share = size.nvlink_links / gpu.nvlink_links_max if gpu.nvlink_links_max else 0.0
    # A pair's peak is told for the links that are used (H100 NVL: 12 of 18), so only fewer than these lower it.
    nvlink = gpu.nvlink_peak_gbps / 2 * (1.0 if share >= 0.5 else share)
    pcie = gpu.pcie_peak_gbps
    return {
        "h2d_floor_gbps": pcie,
        "d2h_floor_gbps": pcie,
        "hbm_floor_gbps": gpu.hbm_peak_gbps,
        "p2p_floor_gbps": nvlink,
        "mma_reference_tflops": gpu.mma_fp16_peak_tflops,
    }


def _out_of_bounds(values: Mapping[str, float]) -> list[str]:
    return [
        f"{key}: {value:g} is not {_PLAUSIBLE[key][0]:g} to {_PLAUSIBLE[key][1]:g}: another unit?"
        for key, value in values.items()
        if not _PLAUSIBLE[key][0] <= value <= _PLAUSIBLE[key][1]
    ]


def _floor_problem(key: str, floor: Floor, peak: float) -> list[str]:
    least, most = (part * peak for part in FLOOR_OF_PEAK)
    if least <= floor.value <= most:
        return []
    return [f"{key}: {floor.value:g} is not {least:g} to {most:g}, 0.2 to 1.0 of the peak: another unit?"]


def _is_pattern(text: str) -> bool:
    try:
        return len(text) > 3 and not re.fullmatch(text, "")
    except re.error:
        return False


def overridden(size: Size, gpu: GpuModel, overrides: Mapping[str, Floor]) -> tuple[Size, GpuModel]:
    """Return a size and its part with a pool's own floors. Raises NodeError (``gpu.settings``) as the table would."""
    for_gpu = {key: floor for key, floor in overrides.items() if key == "mma_reference_tflops"}
    for_size = {key: floor for key, floor in overrides.items() if key not in for_gpu}
    unknown = sorted(set(overrides) - set(OVERRIDABLE))
    if unknown:
        raise NodeError(
            "gpu.settings", f"overrides: {', '.join(unknown)}: not one of {', '.join(OVERRIDABLE)}"
        )
    made_gpu = replace(gpu, **for_gpu)  # type: ignore[arg-type]
    made_size = replace(size, **for_size)  # type: ignore[arg-type]
    wrong = model_problems(made_gpu) + size_problems(made_size, made_gpu)
    if wrong:
        raise NodeError("gpu.settings", f"overrides for {size.name}: {'; '.join(wrong)}")
    return made_size, made_gpu
