"""GPUs at work, as NVML reports them: read, never tested. Running jobs keep the whole GPU.

NVML is read in a process of its own, since a driver call for a GPU that is gone may never return. Its modules are
loaded only if there are GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from image_builder.node import sysfs
from image_builder.node.decode import decode
from image_builder.node.finding import Action
from image_builder.node.health import apart
from image_builder.node.health.model import Finding, Look, Outcome, Sample

if TYPE_CHECKING:
    from image_builder.node.gpu.model import Gpu, Nvml

_SECONDS = 20.0


def read_nvml() -> dict[str, Any]:
    """Return NVML's answers as JSON; if it can't answer, the reason is the answer."""
    from image_builder.node.gpu import nvml, readings

    try:
        with nvml.opened() as library:
            reading = readings.look(library)
    except (OSError, nvml.NvmlError) as error:
        reading = nvml.refused(error)
    return asdict(reading)


def check(look: Look, read: Callable[[], Mapping[str, Any]] = read_nvml) -> Outcome:
    """Query NVML if the machine has GPUs. Raises NodeError (``health.failed``), ValueError."""
    expected = len(sysfs.nvidia_gpus(look.places.sys))
    if not expected:
        return Outcome()
    try:
        answers = apart.run(read, "NVML", _SECONDS, hung=look.memory.get("hung"), proc=look.places.proc)
    except apart.HungError as error:
        detail = f"NVML does not answer: process {error.process[0]} waits for the driver"
        finding = Finding("gpu.hung", "nvml", "fail", detail, "reboot")
        return Outcome((finding,), memory={**look.memory, "hung": list(error.process)})
    from image_builder.node.gpu import model  # only where there are GPUs: it is large

    reading = decode(model.Nvml, answers)
    links = {gpu.uuid: sum(gpu.nvlinks) for gpu in reading.gpus if gpu.nvlinks}
    best: dict[str, int] = dict(look.memory.get("links", {}))
    findings = rule(reading, expected, best)
    best |= {uuid: max(active, best.get(uuid, 0)) for uuid, active in links.items()}
    return Outcome(tuple(findings), tuple(samples(reading, expected)), {"links": best})


def rule(reading: Nvml, expected: int, links: Mapping[str, int]) -> list[Finding]:
    """Return what is wrong with GPUs.

    ``expected`` is how many are on the bus, ``links`` the most NVLinks that were active on each in this boot.
    """
    if reading.error:
        return [Finding("gpu.driver", "nvml", "fail", reading.error, "reboot", patient=True)]
    findings = []
    if reading.lost or len(reading.gpus) < expected:
        reasons = "; ".join(f"{index}: {reason}" for index, reason in reading.lost.items())
        detail = f"{len(reading.gpus)} of {expected} GPUs answer{f' ({reasons})' if reasons else ''}"
        findings.append(Finding("gpu.lost", "nvml", "fail", detail, "reboot"))
    for gpu in reading.gpus:
        findings += _memory_findings(gpu)
        findings += _link_findings(gpu, links.get(gpu.uuid, 0))
    return findings


def _memory_findings(gpu: Gpu) -> Iterable[Finding]:
    rules: tuple[tuple[object, str, str, Action], ...] = (
        (gpu.ecc_volatile_uncorrected, "gpu.ecc", "uncorrected memory errors", "reboot"),
        (gpu.sram_threshold_exceeded, "gpu.sram", "the threshold of SRAM errors is exceeded", "replace"),
        (gpu.remap_failure, "gpu.remap-failure", "a row could not be remapped", "replace"),
        (gpu.unrepairable_memory, "gpu.remap-unrepairable", "its memory can't be repaired", "replace"),
        (gpu.remap_pending, "gpu.remap-pending", "a row is to be remapped at the next reset", "reboot"),
        (gpu.retired_pending, "gpu.remap-pending", "a page is to be retired at the next reset", "reboot"),
        (gpu.inforom_valid is False, "gpu.inforom", "the InfoROM is damaged", "replace"),
    )
    for is_bad, code, fault, action in rules:
        if is_bad:
            count = f" ({is_bad})" if not isinstance(is_bad, bool) else ""
            yield Finding(code, gpu.uuid, "fail", f"{gpu.uuid} at {gpu.pci}: {fault}{count}", action)
    if gpu.recovery != "none":
        detail = f"{gpu.uuid}: the driver asks for {gpu.recovery_action}"
        yield Finding("gpu.recovery", gpu.uuid, "fail", detail, gpu.recovery)


def _link_findings(gpu: Gpu, best: int) -> Iterable[Finding]:
    # MIG mode can switch the links off.
    if gpu.nvlinks is not None and not gpu.mig_current and sum(gpu.nvlinks) < best:
        detail = f"{gpu.uuid}: {sum(gpu.nvlinks)} NVLinks are active, after {best}"
        yield Finding("gpu.nvlink", gpu.uuid, "fail", detail, "replace", patient=True)


def samples(reading: Nvml, expected: int) -> list[Sample]:
    """Return the metrics of GPUs; readings that a GPU lacks are left out."""
    samples = [Sample("gpu_expected", expected), Sample("gpu_answering", len(reading.gpus))]
    for gpu in reading.gpus:
        values = {
            "gpu_ecc_uncorrected_total": gpu.ecc_volatile_uncorrected,
            "gpu_ecc_corrected_total": gpu.ecc_volatile_corrected,
            "gpu_remap_pending": gpu.remap_pending,
            "gpu_remap_failure": gpu.remap_failure,
            "gpu_nvlinks_active": None if gpu.nvlinks is None else sum(gpu.nvlinks),
            "gpu_nvlink_errors_total": gpu.nvlink_errors,
            "gpu_temperature_celsius": gpu.temperature_c,
        }
        labels = {"gpu": gpu.uuid}
        samples += [Sample(name, float(value), labels) for name, value in values.items() if value is not None]
    return samples
