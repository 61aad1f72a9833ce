"""VM sizes with their hardware and floors: ``sizes.json``, validated so that a typo can't become a floor.

Published tables of this kind have had GB/s in place of MB/s, a missing digit, and a floor above what the part can do,
all of which pass a check for "a number". So each key names its unit, each floor must be between 0.2 and 1.0 of the
part's peak, each peak must be plausible for a GPU, and each value cites its source.
"""

from __future__ import annotations

import json
import pkgutil
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from image_builder.node import settings
from image_builder.node.decode import one_of, shown, within
from image_builder.node.errors import NodeError

FORMAT = 1
# Fractions of the peak: a floor below the first tests nothing, one above the second can't be reached.
FLOOR_OF_PEAK = (0.2, 1.0)
# What any GPU from Volta to the next generations may have; a value in another unit is outside these ranges.
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
OVERRIDABLE = ("h2d_floor_gbps", "d2h_floor_gbps", "hbm_floor_gbps", "p2p_floor_gbps", "mma_reference_tflops")


@dataclass(frozen=True)
class Floor:
    """The lowest accepted value, in the unit of its key, and the source of that number."""

    value: float
    source: str = field(metadata={"key": "from"})

    def problems(self) -> Iterator[str]:
        """Yield the problems of the floor itself."""
        if not self.value > 0:
            yield f"value must be above 0, not {shown(self.value)}"
        yield from _source(self.source)


@dataclass(frozen=True)
class GpuModel:
    """A part. ``gbps`` is 10^9 bytes per second in one direction; ``nvlink_peak_gbps`` counts both directions.

    ``fabric_state``: the GPU itself reports whether it has joined the NVLink fabric. ``mma_reference_tflops`` is what
    this project's own kernel reaches on a healthy GPU; None until measured.
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
    driver_flavours: tuple[Literal["open", "proprietary"], ...]
    row_remapping: bool
    fabric_state: bool
    mma_reference_tflops: Floor | None
    source: str = field(metadata={"key": "from"})

    def problems(self) -> Iterator[str]:
        """Yield what is implausible about the part."""
        has_links = self.nvlink_links_max > 0
        for key in _PLAUSIBLE:
            if hasattr(self, key) and (key != "nvlink_peak_gbps" or has_links):
                yield from _plausible(key, getattr(self, key))
        yield from within("nvlink_links_max", self.nvlink_links_max, 0, 18)
        if not has_links and self.nvlink_peak_gbps:
            yield f"nvlink_peak_gbps must be 0 without links, not {self.nvlink_peak_gbps:g}"
        yield from _width(self.pcie_width)
        if not re.fullmatch(r"\d{1,2}\.\d", self.compute_capability):
            yield f"compute_capability must be like 9.0, not {shown(self.compute_capability)}"
        if not _is_pattern(self.name_pattern):
            yield "name_pattern must be a regular expression that doesn't match everything"
        if not self.driver_flavours:
            yield "driver_flavours must not be empty"
        if self.pcie_generation in range(3, 8):
            lanes_gbps = 0.985 * 2 ** (self.pcie_generation - 3) * self.pcie_width
            if not 0.9 < self.pcie_peak_gbps / lanes_gbps < 1.1:
                yield f"pcie_peak_gbps must be what this generation and width carry, {lanes_gbps:.4g}"
        yield from _source(self.source)
        if self.mma_reference_tflops:
            yield from _floor("mma_reference_tflops", self.mma_reference_tflops, self.mma_fp16_peak_tflops)


@dataclass(frozen=True)
class Size:
    """A VM size: its hardware, and the floors. ``local_nvme`` None: unknown. ``nvlink_links`` 0: none are used.

    ``calibrated``: floors and disks were measured with this test on healthy machines of this size. ``name`` is the
    table's key.
    """

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
    source: str = field(metadata={"key": "from"})
    name: str = ""

    def problems(self) -> Iterator[str]:
        """Yield what is implausible regardless of the part."""
        yield from within("count", self.count, 1, 16)
        yield from _plausible("memory_gib", self.memory_gib)
        if self.infiniband_ports:
            yield from _plausible("infiniband_gbit", self.infiniband_gbit)
        yield from within("infiniband_ports", self.infiniband_ports, 0, 16)
        if self.local_nvme is not None:
            yield from within("local_nvme", self.local_nvme, 0, 16)
        yield from _width(self.pcie_width)
        if self.nvswitch and not self.nvlink_links:
            yield "nvswitch must be false without links"
        if self.p2p_floor_gbps and (self.count < 2 or not self.nvlink_links):
            yield "p2p_floor_gbps must be null without a link to another GPU"
        if not re.fullmatch(r"(\d{4}-\d\d-\d\d)?", self.retired):
            yield f"retired must be a date, not {shown(self.retired)}"
        yield from _source(self.source)

    def problems_with(self, gpu: GpuModel) -> Iterator[str]:
        """Yield what doesn't fit the part: links, PCIe width, and floors compared with its peaks."""
        yield from within("nvlink_links", self.nvlink_links, 0, gpu.nvlink_links_max)
        if self.pcie_width > gpu.pcie_width:
            yield f"pcie_width must be at most the part's {gpu.pcie_width}, not {self.pcie_width}"
        peaks = floor_peaks(self, gpu)
        for key in OVERRIDABLE[:-1]:
            floor = getattr(self, key)
            if floor:
                yield from _floor(key, floor, peaks[key])


@dataclass(frozen=True)
class Table:
    """All sizes, by lowercase name: Azure's own spelling varies."""

    format: int
    version: str
    gpus: Mapping[str, GpuModel]
    sizes: Mapping[str, Size]
    about: str = ""

    def problems(self) -> Iterator[str]:
        """Yield the inconsistencies of the table."""
        if self.format != FORMAT:
            yield f"format must be {FORMAT}, not {self.format}"
        for key in ("version", "gpus", "sizes"):
            if not getattr(self, key):
                yield f"{key} must not be empty"
        for name, size in self.sizes.items():
            gpu = self.gpus.get(size.gpu)
            if not re.fullmatch(r"Standard_N[A-Z]+\w+_v\d", name):
                yield f"sizes.{name} must have a name like Standard_NC6s_v3"
            if gpu:
                yield from (f"sizes.{name}.{problem}" for problem in size.problems_with(gpu))
            else:
                yield from one_of(f"sizes.{name}.gpu", size.gpu, self.gpus)

    def find(self, size: str) -> tuple[Size, GpuModel] | None:
        """Return a size and its part, None if the table has no such size."""
        entry = self.sizes.get(size.lower())
        return (entry, self.gpus[entry.gpu]) if entry else None


def load() -> Table:
    """Return the table that comes with the agent. Raises NodeError (``gpu.sizes``)."""
    return parse(json.loads(pkgutil.get_data(__package__, "sizes.json") or b"{}"))


def parse(document: Any) -> Table:
    """Return a table. Raises NodeError (``gpu.sizes``) that lists all problems at once."""
    table = settings.parse(Table, document, "sizes", code="gpu.sizes")
    return replace(
        table, sizes={name.lower(): replace(size, name=name) for name, size in table.sizes.items()}
    )


def _source(text: str) -> Iterator[str]:
    if not text.strip():
        yield "from must say where the numbers are from"


def _width(lanes: int) -> Iterator[str]:
    if lanes not in _WIDTHS:
        yield f"pcie_width must be one of {', '.join(map(str, _WIDTHS))}, not {lanes}"


def _plausible(key: str, value: float) -> Iterator[str]:
    for problem in within(key, value, *_PLAUSIBLE[key]):
        yield f"{problem}: another unit?"


def _floor(key: str, floor: Floor, peak: float) -> Iterator[str]:
    least, most = (part * peak for part in FLOOR_OF_PEAK)
    for problem in within(key, floor.value, least, most):
        yield f"{problem}, 0.2 to 1.0 of the peak: another unit?"


def floor_peaks(size: Size, gpu: GpuModel) -> dict[str, float]:
    """Return the limit of each floor, by key. NVLink: one direction, over the links that lead to other GPUs."""
    share = size.nvlink_links / gpu.nvlink_links_max if gpu.nvlink_links_max else 0.0
    # A pair's peak is given for the links in use (H100 NVL: 12 of 18), so only fewer links than those lower it.
    nvlink = gpu.nvlink_peak_gbps / 2 * (1.0 if share >= 0.5 else share)
    pcie = gpu.pcie_peak_gbps
    return {
        "h2d_floor_gbps": pcie,
        "d2h_floor_gbps": pcie,
        "hbm_floor_gbps": gpu.hbm_peak_gbps,
        "p2p_floor_gbps": nvlink,
        "mma_reference_tflops": gpu.mma_fp16_peak_tflops,
    }


def _is_pattern(text: str) -> bool:
    try:
        return len(text) > 3 and not re.fullmatch(text, "")
    except re.error:
        return False


def overridden(size: Size, gpu: GpuModel, overrides: Mapping[str, Floor]) -> tuple[Size, GpuModel]:
    """Return a size and its part with a pool's own floors. Raises NodeError (``gpu.settings``) if they are invalid."""
    for_gpu = {key: floor for key, floor in overrides.items() if key == "mma_reference_tflops"}
    for_size = {key: floor for key, floor in overrides.items() if key not in for_gpu}
    own_gpu = replace(gpu, **for_gpu)  # type: ignore[arg-type]
    own_size = replace(size, **for_size)  # type: ignore[arg-type]
    problems = [*own_gpu.problems(), *own_size.problems(), *own_size.problems_with(own_gpu)]
    if problems:
        raise NodeError("gpu.settings", f"overrides for {size.name}: {'; '.join(problems)}")
    return own_size, own_gpu
