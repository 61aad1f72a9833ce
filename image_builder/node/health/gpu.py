"""What NVML says of the GPUs while they work: read, never tested. Whoever runs here keeps the whole GPU.

The reading is another module's: this one knows only the shape of what it needs (``Reading``). It is made in a
process of its own, since a call into the driver of a GPU that is gone may never return.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from image_builder.node.finding import Action
from image_builder.node.health import apart
from image_builder.node.health.model import Finding, Look, Outcome, Sample
from image_builder.node.health.sysfs import text

_SECONDS = 20.0
_NVIDIA = "0x10de"
_DISPLAY = ("0x0300", "0x0302")  # VGA and 3D controllers, the first two bytes of the class
# NVML_FI_DEV_GET_GPU_RECOVERY_ACTION in words, and what it asks for.
_RECOVERY: Mapping[str, Action] = {
    "gpu-reset": "reboot",
    "node-reboot": "reboot",
    "drain-p2p": "reboot",
    "drain-and-reset": "reboot",
}


class Gpu(Protocol):
    """One GPU. None is what it can't say: neither good nor bad."""

    @property
    def uuid(self) -> str: ...
    @property
    def pci(self) -> str: ...
    @property
    def ecc_volatile_uncorrected(self) -> int | None: ...
    @property
    def ecc_volatile_corrected(self) -> int | None: ...
    @property
    def sram_threshold_exceeded(self) -> bool | None: ...
    @property
    def remap_pending(self) -> bool | None: ...
    @property
    def remap_failure(self) -> bool | None: ...
    @property
    def retired_pending(self) -> bool | None: ...
    @property
    def inforom_valid(self) -> bool | None: ...
    @property
    def recovery_action(self) -> str | None: ...
    @property
    def nvlinks(self) -> tuple[bool, ...] | None: ...
    @property
    def nvlink_errors(self) -> int | None: ...
    @property
    def temperature_c(self) -> int | None: ...


class Reading(Protocol):
    """All of NVML: ``error`` is why it can't be asked, ``lost`` the GPUs that it counts and can't open."""

    @property
    def error(self) -> str: ...
    @property
    def gpus(self) -> Sequence[Gpu]: ...
    @property
    def lost(self) -> Mapping[str, str]: ...


Reader = Callable[[], Mapping[str, Any]]
"""Asks NVML, and returns its answers as JSON."""
Decode = Callable[[Mapping[str, Any]], Reading]


def check(look: Look, read: Reader, decode: Decode) -> Outcome:
    """Ask NVML, where the machine has GPUs. Raises NodeError (``health.failed``)."""
    addresses = on_the_bus(look)
    if not addresses:
        return Outcome()
    memory = dict(look.memory)
    pid, born = memory.pop("hung", (0, ""))
    if born and apart.started(pid, look.places.proc) == born:
        return _hung(look.memory, pid)
    try:
        reading = decode(apart.run(read, "NVML", _SECONDS))
    except apart.HungError as error:
        return _hung({**memory, "hung": list(error.process)}, error.process[0])
    links = {one.uuid: sum(one.nvlinks) for one in reading.gpus if one.nvlinks}
    best: dict[str, int] = dict(memory.get("links", {}))
    findings = rule(reading, len(addresses), best)
    best |= {uuid: max(active, best.get(uuid, 0)) for uuid, active in links.items()}
    return Outcome(tuple(findings), tuple(samples(reading, len(addresses))), {"links": best})


def _hung(memory: Mapping[str, Any], pid: int) -> Outcome:
    detail = f"NVML does not answer: process {pid} waits for the driver"
    return Outcome((Finding("gpu.hung", "nvml", "fail", detail, "reboot"),), memory=memory)


def on_the_bus(look: Look) -> list[str]:
    """Return the PCI addresses of NVIDIA's display and 3D controllers."""
    return [
        entry.name
        for entry in sorted((look.places.sys / "bus/pci/devices").glob("*"))
        if text(entry / "vendor") == _NVIDIA and text(entry / "class").startswith(_DISPLAY)
    ]


def rule(reading: Reading, expected: int, links: Mapping[str, int]) -> list[Finding]:
    """Return what is wrong with GPUs.

    ``expected`` is how many are on the bus, ``links`` how many NVLinks of each were active at best in this boot.
    """
    if reading.error:
        return [Finding("gpu.driver", "nvml", "fail", reading.error, "reboot", patient=True)]
    found = []
    if reading.lost or len(reading.gpus) < expected:
        why = "; ".join(f"{index}: {words}" for index, words in reading.lost.items())
        detail = f"{len(reading.gpus)} of {expected} GPUs answer{f' ({why})' if why else ''}"
        found.append(Finding("gpu.lost", "nvml", "fail", detail, "reboot"))
    for one in reading.gpus:
        found += _of_memory(one)
        found += _of_links(one, links.get(one.uuid, 0))
    return found


def _of_memory(gpu: Gpu) -> Iterable[Finding]:
    rules: tuple[tuple[object, str, str, Action], ...] = (
        (gpu.ecc_volatile_uncorrected, "gpu.ecc", "uncorrected memory errors", "reboot"),
        (gpu.sram_threshold_exceeded, "gpu.sram", "the threshold of SRAM errors is exceeded", "replace"),
        (gpu.remap_failure, "gpu.remap-failure", "a row could not be remapped", "replace"),
        (gpu.remap_pending, "gpu.remap-pending", "a row is to be remapped at the next reset", "reboot"),
        (gpu.retired_pending, "gpu.remap-pending", "a page is to be retired at the next reset", "reboot"),
        (gpu.inforom_valid is False, "gpu.inforom", "the InfoROM is damaged", "replace"),
    )
    for is_bad, code, words, action in rules:
        if is_bad:
            count = f" ({is_bad})" if not isinstance(is_bad, bool) else ""
            yield Finding(code, gpu.uuid, "fail", f"{gpu.uuid} at {gpu.pci}: {words}{count}", action)
    if (wanted := gpu.recovery_action) and wanted not in ("none", "NONE"):
        action = _RECOVERY.get(wanted.lower().replace("_", "-"), "reboot")
        yield Finding("gpu.recovery", gpu.uuid, "fail", f"{gpu.uuid}: the driver asks for {wanted}", action)


def _of_links(gpu: Gpu, best: int) -> Iterable[Finding]:
    if gpu.nvlinks is not None and sum(gpu.nvlinks) < best:
        detail = f"{gpu.uuid}: {sum(gpu.nvlinks)} NVLinks are active, after {best}"
        yield Finding("gpu.nvlink", gpu.uuid, "fail", detail, "replace", patient=True)


def samples(reading: Reading, expected: int) -> list[Sample]:
    """Return the metrics of GPUs; what one can't say is left out."""
    found = [Sample("gpu_expected", expected), Sample("gpu_answering", len(reading.gpus))]
    for one in reading.gpus:
        values = {
            "gpu_ecc_uncorrected_total": one.ecc_volatile_uncorrected,
            "gpu_ecc_corrected_total": one.ecc_volatile_corrected,
            "gpu_remap_pending": one.remap_pending,
            "gpu_remap_failure": one.remap_failure,
            "gpu_nvlinks_active": None if one.nvlinks is None else sum(one.nvlinks),
            "gpu_nvlink_errors_total": one.nvlink_errors,
            "gpu_temperature_celsius": one.temperature_c,
        }
        labels = {"gpu": one.uuid}
        found += [Sample(name, float(value), labels) for name, value in values.items() if value is not None]
    return found
